"""The exchange: every rank of a group sends a payload, all get the merged one, or the same error.

Ranks form a tree over a key-value store (torch.distributed's, through a connection and a key prefix
of our own, so no collective of the user's is touched). A rank appends its payload to its parent's
mailbox; parents merge; the root publishes the result. Whatever ends an exchange is written to one
key by compare-and-set, so all ranks that read it see the same end: the merged payload, the failure
of a rank, or the ranks that were missing when somebody's time was up.

World size 1 is `Alone`: the same interface without a store.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch.distributed as dist

from . import settings
from .errors import AgreementTimeout, PeerFailed, TuningError, name_ranks

Merge: TypeAlias = Callable[[bytes, bytes], bytes]

FAN_OUT = 32  # children of a rank in the tree: flat up to 33 ranks, three levels for 1024
HEARTBEAT_S = 1.0
PATIENCE = 10  # heartbeats extend the deadline at most this many times
LINGER_S = 2.0  # how long the root waits for others to have read a result: it may host the store
FAREWELL_S = 0.5  # how long a failing rank waits for others to have read why
_FIRST_SLEEP_S, _LAST_SLEEP_S = 20e-6, 2e-3


class Agreement(Protocol):
    """What a session needs of its ranks."""

    @property
    def rank(self) -> int:
        """Return the global rank, for names of logs and in messages."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks of the group."""

    def exchange(self, payload: bytes, merge: Merge, timeout_s: float, what: str) -> bytes:
        """Send `payload`, return all payloads merged; raises AgreementTimeout or PeerFailed."""

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this rank does not reach the exchange it is due at."""

    def busy(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Keep peers from giving this rank up while the block runs."""


class Alone:
    """One rank: its payload is the merged one."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.ranks: tuple[int, ...] = (rank,)

    def exchange(self, payload: bytes, merge: Merge, timeout_s: float, what: str) -> bytes:
        return payload

    def fail(self, error: BaseException) -> None:
        """Nobody waits."""

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        yield


class StoreAgreement:
    """The ranks of one process group, over a store. Create it on all ranks of the group."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self.group = group
        self.rank = dist.get_rank()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.pid = os.getpid()
        self._position = self.ranks.index(self.rank)
        self._children = [
            child
            for child in range(self._position * FAN_OUT + 1, self._position * FAN_OUT + FAN_OUT + 1)
            if child < len(self.ranks)
        ]
        # The first is kept because it may be the server itself, which ends with the object.
        self._base, self._store, self._heart = _open_store(group, self.ranks, self.rank, timeout_s)
        self._sequence = 0

    def exchange(self, payload: bytes, merge: Merge, timeout_s: float, what: str) -> bytes:
        sequence, self._sequence = self._sequence, self._sequence + 1
        wait = _Wait(self, sequence, timeout_s, what)
        try:
            return self._exchange(wait, payload, merge)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise AgreementTimeout(
                f"Rank {self.rank} lost the store of the process group while agreeing on {what}: its host, "
                f"usually rank {self.ranks[0]}, is gone ({str(error).splitlines()[0][:120]})",
                (self.ranks[0],),
            ) from None
        except TuningError:
            raise
        except BaseException as error:  # Ctrl-C while waiting: the peers must learn of it
            self._fail_at(sequence, error)
            raise

    def _exchange(self, wait: _Wait, payload: bytes, merge: Merge) -> bytes:
        for child_payload in wait.children(self._children):
            payload = merge(payload, child_payload)
        if self._position == 0:
            result = self._publish(wait.key("end"), {"merged": _text(payload)})
        else:
            frame = json.dumps([self._position, _text(payload)]) + "\n"
            self._store.append(wait.key(f"up{(self._position - 1) // FAN_OUT}"), frame)
            result = wait.end()
        end = json.loads(result)
        self._leave(wait, end)
        if "merged" in end:
            return base64.b64decode(end["merged"])
        raise self._as_error(end, wait)

    def fail(self, error: BaseException) -> None:
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._fail_at(sequence, error)

    def _fail_at(self, sequence: int, error: BaseException) -> None:
        wait = _Wait(self, sequence, FAREWELL_S, "a failure")
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):
            end = self._publish(wait.key("end"), {"failed": self.rank, "error": text[:2000]})
            if "merged" in json.loads(
                end
            ):  # the others have gone on: they meet the failure at their next exchange
                self.fail(error)
                return
            self._store.add(wait.key("read"), 1)
            wait.for_readers(FAREWELL_S, len(self.ranks))

    def _publish(self, key: str, end: dict[str, Any]) -> bytes:
        """Write the end of an exchange unless there is one already; return the one that stands."""
        return bytes(self._store.compare_set(key, "", json.dumps(end)))

    def _leave(self, wait: _Wait, end: dict[str, Any]) -> None:
        """Report that this rank has read the end; the root then clears the keys.

        The root leaves last, as its process may host the store. After a failure the keys stay: a rank
        that comes late must find out.
        """
        self._store.add(wait.key("read"), 1)
        if "merged" not in end:
            if self._position == 0:
                wait.for_readers(FAREWELL_S, len(self.ranks) - len(end.get("missing", ())))
        elif self._position == 0:
            if wait.for_readers(LINGER_S, len(self.ranks)):
                for name in ("end", "read", "up0", "here"):
                    self._store.delete_key(wait.key(name))
        elif self._children:
            self._store.delete_key(wait.key(f"up{self._position}"))

    def _as_error(self, end: dict[str, Any], wait: _Wait) -> TuningError:
        if "failed" in end:
            rank, error = int(end["failed"]), str(end["error"])
            return PeerFailed(
                f"Rank {rank} failed, so this call ends on rank {self.rank} too: {error}", rank, error
            )
        missing = tuple(int(rank) for rank in end["missing"])
        return AgreementTimeout(
            f"Rank {end['by']} waited {end['waited_s']:g} s for {name_ranks(missing)} to agree on "
            f"{end['what']}.",
            missing,
        )

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        done = threading.Event()

        def beat() -> None:
            with contextlib.suppress(dist.DistNetworkError, dist.DistStoreError):
                while not done.wait(HEARTBEAT_S):
                    self._heart.add(f"heart{self._position}", 1)

        thread = threading.Thread(target=beat, name="dist_autotune heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class _Wait:
    """The waiting of one rank in one exchange: polls with a growing pause, against one deadline.

    Blocking waits of the store are not used: they cannot be interrupted by Ctrl-C, and log a warning
    at every slice. The pause starts at 20 us (an exchange between ready ranks takes tens of polls)
    and ends at 2 ms.
    """

    def __init__(self, agreement: StoreAgreement, sequence: int, timeout_s: float, what: str) -> None:
        self._agreement = agreement
        self._store = agreement._store
        self._sequence = sequence
        self._what = what
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._last_beats: dict[int, int] = {}
        self._marked = False

    def key(self, name: str) -> str:
        return f"{self._sequence}/{name}"

    def children(self, children: list[int]) -> list[bytes]:
        """Return the payloads of all children, or of none once the exchange has ended without us."""
        frames: dict[int, bytes] = {}
        pause_s = _FIRST_SLEEP_S
        while len(frames) < len(children):
            frames = self._frames(self._agreement._position)
            if len(frames) == len(children):
                break
            if pause_s == _LAST_SLEEP_S and self._store.check([self.key("end")]):
                return []
            pause_s = self._pause(pause_s)
        return [frames[child] for child in sorted(frames)]

    def end(self) -> bytes:
        """Return what ended the exchange."""
        pause_s = _FIRST_SLEEP_S
        while not self._store.check([self.key("end")]):
            pause_s = self._pause(pause_s)
        return bytes(self._store.get(self.key("end")))

    def for_readers(self, at_most_s: float, readers: int) -> bool:
        """Return whether `readers` ranks have read the end within `at_most_s`."""
        deadline = time.monotonic() + at_most_s
        pause_s = _FIRST_SLEEP_S
        while self._store.add(self.key("read"), 0) < readers:
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_SLEEP_S)
        return True

    def _frames(self, position: int) -> dict[int, bytes]:
        if not self._store.check([self.key(f"up{position}")]):
            return {}
        lines = bytes(self._store.get(self.key(f"up{position}"))).decode().splitlines()
        return {child: base64.b64decode(text) for child, text in map(json.loads, lines)}

    def _pause(self, pause_s: float) -> float:
        if pause_s == _LAST_SLEEP_S and not self._marked:  # a long wait: say who is here, for the diagnosis
            self._store.append(self.key("here"), f"{self._agreement._position}\n")
            self._marked = True
        if time.monotonic() > self._deadline:
            self._give_up()
        time.sleep(pause_s)
        return min(2 * pause_s, _LAST_SLEEP_S)

    def _give_up(self) -> None:
        """Extend the deadline if a missing rank is at work, else end the exchange for everybody."""
        agreement = self._agreement
        missing = self._missing()
        now = time.monotonic()
        if now - self._began < PATIENCE * self._timeout_s and self._any_beats(missing):
            self._deadline = now + min(self._timeout_s, 3 * HEARTBEAT_S)
            return
        names = [agreement.ranks[position] for position in missing] or [agreement.ranks[0]]
        end = {
            "missing": names,
            "by": agreement.rank,
            "waited_s": round(now - self._began, 1),
            "what": self._what,
        }
        agreement._publish(self.key("end"), end)

    def _missing(self) -> list[int]:
        """Return the positions that have neither posted to the root nor said that they wait."""
        present = set(self._frames(0))
        if self._store.check([self.key("here")]):
            present |= set(map(int, bytes(self._store.get(self.key("here"))).split()))
        return [position for position in range(len(self._agreement.ranks)) if position not in present]

    def _any_beats(self, missing: list[int]) -> bool:
        """Return whether some missing rank's heart has moved since the last look."""
        moved = False
        for position in missing:
            beats = self._store.add(f"heart{position}", 0)
            moved |= beats != self._last_beats.get(position, 0)
            self._last_beats[position] = beats
        return moved


def _open_store(group: Any, ranks: tuple[int, ...], rank: int, timeout_s: float) -> tuple[Any, Any, Any]:
    """Return the store and two connections (for exchanges, for heartbeats) to keys of this group's own."""
    default = dist.distributed_c10d._get_default_store()
    base: Any = default
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    name = f"dist_autotune/{group.group_name}/{'-'.join(map(str, ranks)) if len(ranks) < 17 else len(ranks)}"
    # The n-th agreement that a rank opens on a group belongs with the n-th of the others.
    opened = default.add(f"{name}/opened/{rank}", 1)
    prefix = f"{name}/{opened}"
    if not isinstance(base, dist.TCPStore):
        base = _own_store(dist.PrefixStore(prefix, default), rank == ranks[0], ranks[0], timeout_s)
    connections = [base.clone() for _ in range(2)]
    for connection in connections:
        connection.set_timeout(timedelta(seconds=max(timeout_s, 30.0)))
    return base, dist.PrefixStore(prefix, connections[0]), dist.PrefixStore(prefix, connections[1])


def _own_store(meeting: Any, hosts: bool, host_rank: int, timeout_s: float) -> Any:
    """Return a TCP store hosted by the group's first rank; a file store polls too slowly (10 ms)."""
    wait = timedelta(seconds=timeout_s)
    if hosts:
        store = dist.TCPStore("localhost", 0, None, True, timeout=wait, wait_for_workers=False)
        meeting.set("address", json.dumps([socket.gethostname(), store.port]))
        return store
    deadline = time.monotonic() + timeout_s
    while not meeting.check(["address"]):
        if time.monotonic() > deadline:
            raise AgreementTimeout(
                f"waited {timeout_s:g} s for rank {host_rank} to open the session", (host_rank,)
            )
        time.sleep(_LAST_SLEEP_S)
    host, port = json.loads(meeting.get("address"))
    here = "localhost" if host == socket.gethostname() else host
    return dist.TCPStore(here, port, None, False, timeout=wait, wait_for_workers=False)


def _text(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


class Agreements:
    """The agreements of this process, one per process group, shared by all tuned functions."""

    def __init__(self) -> None:
        self._by_group: dict[str, StoreAgreement] = {}
        self._alone: dict[int, Alone] = {}

    def alone(self) -> Agreement:
        """Return the agreement of this process with itself."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else settings.process_rank()
        return self._alone.setdefault(rank, Alone(rank))

    def of(self, group: Any, timeout_s: float) -> Agreement:
        """Return the agreement of `group` (None: the default group).

        Without torch.distributed, with one rank, or in a forked child of a rank: `alone()`.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self.alone()
        if group is None:
            group = dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
            raise TuningError(
                f"Rank {dist.get_rank()} called a tuned function whose group= it is not a member of. "
                "Call it on members only, or give each rank its own group."
            )
        if dist.get_world_size(group) == 1:
            return self.alone()
        known = self._by_group.get(group.group_name)
        if known is None or known.group is not group:
            known = self._by_group[group.group_name] = StoreAgreement(group, timeout_s)
        return known if known.pid == os.getpid() else self.alone()


AGREEMENTS = Agreements()
