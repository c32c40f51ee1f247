"""One rank's part in one exchange: through the hub of its group, or the store where the hub is lost."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ..errors import NoValidConfig
from ..formatting import described
from . import watchdog
from .client import LOOK, Client, HubLost, HubSilent
from .hub import SEND_S, Hub
from .rendezvous import Rendezvous
from .store import OPERATION_S, StoreLost
from .wire import End, HubMessage

Merge: TypeAlias = Callable[..., bytes]  # any number of payloads -> one

SILENCE_S = 5.0  # a hub that does not answer for so long is stuck
LOOK_S = 1.0  # a waiting rank asks the hub so often for a sign of life; more often if the time-out is short
CONNECTIONS = 5  # how often in one exchange the hub may hang up
ARRIVAL_S = 1.0  # how long ranks that come to the store wait for others that are on their way
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1e-3, 20e-3  # between looks at the store


class Exchange:
    """One rank's part in one exchange."""

    def __init__(self, rendezvous: Rendezvous, sequence: int, timeout_s: float, what: str) -> None:
        self._rendezvous, self._store = rendezvous, rendezvous.store
        self._sequence, self._timeout_s, self._what = sequence, timeout_s, what
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._arrived_at = 0.0  # when this rank recorded its arrival in the store
        self._store_error: StoreLost | None = None
        self._merge_error: Exception | None = None

    def take_part(self, payload: bytes, merge: Merge) -> End:
        """Return how the exchange ended, the same on all ranks."""
        client, pauses = self._rendezvous.client, _pauses()
        try:
            if client is not None and (end := self._through_hub(client, payload, merge)) is not None:
                return end
            while True:
                if self._store_error is not None:
                    raise self._store_error
                found = None if client is not None else self._rendezvous.find_client(self._limit_s)
                if (end := self._store.read_end(self._sequence, self._limit_s)) is not None:
                    return end
                if found is not None and (end := self._through_hub(found, payload, merge)) is not None:
                    return end
                client = client or found
                self._wait_at_store(knows_hub=client is not None)
                time.sleep(next(pauses))
        except StoreLost:  # this rank reaches nobody
            host = 0 if self._rendezvous.client is None else self._rendezvous.ranks[0]
            return {**self._missing([host]), "is_lost": True}

    # -- through the hub -----------------------------------------------------------------------------------

    def _through_hub(self, client: Client, payload: bytes, merge: Merge) -> End | None:
        """Return the end that the hub gives the exchange; None: it is lost or stuck."""
        if self._rendezvous.is_lost:
            return None
        if (hub := self._rendezvous.hub) is not None:
            hub.state.merges[self._sequence] = functools.partial(self._merge, hub, merge)
        client.send_s, client.heard_at = min(SEND_S, self._timeout_s), self._began
        for _ in range(CONNECTIONS):  # it hangs up on a rank that was stopped; to ask twice changes nothing
            with contextlib.suppress(HubLost):
                try:
                    post = client.send("post", self._sequence, payload=payload, what=self._what)
                    return self._settled(self._receive(client, post))
                except HubSilent:
                    return None
        self._rendezvous.is_lost = True
        return None

    def _merge(self, hub: Hub, merge: Merge, payloads: list[bytes]) -> End:
        """Return the end that all payloads make. Runs on the hub's thread."""
        try:  # if the process was stopped, or merges for long, the others may have gone on meanwhile
            merged = {"merged": merge(*payloads)}
            return (self._store.read_end(self._sequence) if hub.was_away() else None) or merged
        except Exception as error:
            self._merge_error = error
            return failure(self._rendezvous.rank, error)

    def _receive(self, client: Client, post: int) -> End:
        """Return the end of the exchange; at the time-out, the end that the hub sets then."""
        latest = self._began + watchdog.PATIENCE * self._timeout_s
        while (reply := self._receive_in_time(client, post)) is None:
            is_patient = time.monotonic() < latest
            giving_up = client.send("give up", self._sequence, end=self._missing([]), is_patient=is_patient)
            reply = client.receive(giving_up, client.heard_at + SILENCE_S - time.monotonic())
            if reply is None:
                client.close()
                raise HubSilent
            if "end" in reply:
                break
            self._deadline = min(time.monotonic() + 3 * watchdog.HEARTBEAT_S, latest)
        return dict(reply["end"])

    def _receive_in_time(self, client: Client, post: int) -> HubMessage | None:
        """Return the reply, or None when the time is up.

        If the hub gives no sign of life, this rank records its arrival in the store, where others look.
        """
        hub, look_s = self._rendezvous.hub, min(LOOK_S, self._timeout_s / 8)
        pauses = _pauses(look_s)
        while (left_s := self._deadline - time.monotonic()) > 0:
            awaits_hosts = hub is not None and hub.awaits_hosts
            reply = client.receive(post, min(left_s, next(pauses) if awaits_hosts else look_s))
            if reply is not None:
                return reply
            client.notify("look", self._sequence, id=LOOK)
            if hub is not None and awaits_hosts:  # ranks of this host need no store that answers
                limit_s = min(self._limit_s, SILENCE_S)
                self._try_store(functools.partial(self._rendezvous.admit_hosts, hub, limit_s))
            elif time.monotonic() - client.heard_at > 2 * look_s and not self._arrived_at:
                self._try_store(self._record_arrival)
        return None

    def _try_store(self, operation: Callable[[], None]) -> None:
        """Use the store while the hub may still answer; the first time that it fails is the last."""
        if self._store_error is None:
            try:
                operation()
            except StoreLost as error:
                self._store_error = error

    def _settled(self, end: End) -> End:
        """Return `end`; store a bad one where it outlives the hub."""
        if self._merge_error is not None:
            raise self._merge_error
        if "merged" not in end and self._rendezvous.hub is not None:
            with contextlib.suppress(StoreLost):
                self._store.publish_end(self._sequence, end)
        return end

    # -- without a hub -------------------------------------------------------------------------------------

    def _wait_at_store(self, *, knows_hub: bool) -> None:
        """Record this rank's arrival; end the exchange as soon as the missing ranks are known.

        knows_hub: it is lost or stuck, which the others may still be finding out.
        """
        if not self._arrived_at:
            self._record_arrival()
        now = time.monotonic()
        if not knows_hub and now <= self._deadline:
            return
        until = max(self._deadline, self._arrived_at + ARRIVAL_S) if knows_hub else self._deadline
        missing = {self._rendezvous.ranks[0], *self._store.absent_ranks(self._sequence, self._limit_s)}
        is_clear = len(missing) == 1 and (self._rendezvous.is_lost or now > self._deadline)
        if is_clear or now > until:
            self._store.publish_end(self._sequence, self._missing(sorted(missing)), self._limit_s)

    def _record_arrival(self) -> None:
        self._store.record_arrival(self._sequence, self._limit_s)
        self._arrived_at = time.monotonic()

    @property
    def _limit_s(self) -> float:
        """Return the time limit of one operation of the store: all operations share the time-out."""
        return min(OPERATION_S, max(self._deadline - time.monotonic(), ARRIVAL_S))

    def _missing(self, ranks: list[int]) -> End:
        waited_s = round(time.monotonic() - self._began, 1)
        return {"missing": ranks, "by": self._rendezvous.rank, "waited_s": waited_s, "what": self._what}


def failure(rank: int, error: BaseException) -> End:
    """Return the end of an exchange that a rank does not reach."""
    return {"failed": rank, "error": described(error)[:2000], "unusable": isinstance(error, NoValidConfig)}


def _pauses(last_s: float = _LAST_PAUSE_S) -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, last_s)
