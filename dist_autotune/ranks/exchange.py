"""The exchanges of a group: one report of each rank to the deciding rank, one order back.

Exchange 7 has these keys. `7/3` is the report of rank 3. `7` is its end, written once, by `compare_set`: the
order, the failure of a rank, or the missing ranks; so all ranks leave the exchange alike. `7/0` says that
rank 0, which decides, waits for others. `7/beats` counts on while an awaited rank compiles. `7/left` counts
the ranks that have read the end of a session's last exchange: the last one deletes all keys. Other keys are
deleted in the next exchange, those of ranks that died in a later one to which all have come.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from msgspec import Struct, msgpack

from ..errors import AgreementTimeout, NoValidConfig, PeerFailed, PeerHasNoConfig, PutAside, TuningError
from ..formatting import described
from .courier import OPERATION_S, Connections, Courier, StoreLost, await_values, has_ended, peek, result_of

T = TypeVar("T")

Decide: TypeAlias = Callable[[dict[int, bytes]], bytes]  # the reports, by rank -> the order

LOOK_S = 0.1  # how often a waiting rank looks whether a peer has failed or compiles; oftener if it waits less
HEARTBEAT_S = 1.0
PATIENCE = 10  # a rank that compiles extends its deadline at most this many times
FAREWELL_S = 1.0  # how long the deciding rank waits for others to read a session's last order
LARGE_BYTES = 1 << 16  # of a message that is compressed: torch's store takes 8 MiB


class FailedExchange(Struct, frozen=True):
    """How an exchange has ended without an order: the same on all ranks."""

    kind: str  # of `KINDS`
    ranks: tuple[int, ...]  # that has failed, or were missing
    text: str

    def on(self, rank: int) -> TuningError:
        """Return the error that this rank raises."""
        kind: Any = KINDS[self.kind]
        if not issubclass(kind, PeerFailed):
            return kind(self.text, self.ranks)  # type: ignore[no-any-return]
        text = f"rank {self.ranks[0]} failed, so this call ends on rank {rank} too: {self.text}"
        return kind(text, self.ranks[0], self.text)  # type: ignore[no-any-return]


KINDS = {kind.__name__: kind for kind in (PeerFailed, PeerHasNoConfig, AgreementTimeout, PutAside)}
_to_bytes, _read_failure = msgpack.Encoder().encode, msgpack.Decoder(FailedExchange).decode


class ExchangeWait(Struct, frozen=True):
    """The purpose of an exchange, and the longest wait in it.

    patience_s: after it the wait ends if all missing ranks are in no call of the function (`tell_idle`).
    """

    what: str  # the ranks are to agree on
    timeout_s: float
    patience_s: float = math.inf


class Exchanges:
    """Numbered exchanges under one prefix as one rank sees them. A rank makes one at a time.

    idle_prefix: of the ranks that tell that they are in no call of the function.
    """

    def __init__(
        self, connections: Connections, prefix: str, ranks: tuple[int, ...], rank: int, idle_prefix: str = ""
    ) -> None:
        self.number = 0  # of this rank's next exchange
        self._connections, self._prefix, self._idle_prefix = connections, prefix, idle_prefix or prefix
        self._ranks, self._rank, self._leader = ranks, rank, ranks[0]
        self._others = [each for each in ranks if each != rank]
        self._courier: Courier | None = None  # from an exchange to the end of its session
        self._trash: list[str] = []  # keys to be deleted in the next exchange
        self._limit_s = OPERATION_S
        self._left = -1  # the exchange that this rank has left as the last of a session
        self._tells_idle = False
        self._idle: dict[int, tuple[int, float]] = {}  # rank that is missing -> its count, since when

    def exchange(
        self,
        report: bytes,
        decide: Decide,
        wait: ExchangeWait,
        fail_later: Callable[[BaseException], None] | None = None,
    ) -> bytes:
        """Return the order. Raises alike on all ranks where there is none, and where the store is lost.

        fail_later: tells peers that have gone on of an exception here; None: in the next exchange.
        """
        number, self.number = self.number, self.number + 1
        try:  # no function is called before it: a Ctrl-C there would leave this rank one exchange ahead
            self._limit_s, self._idle = min(OPERATION_S, wait.timeout_s / 2), {}
            self._courier = self._courier or self._connections.take()
            end = self._take_part(number, report, decide, wait)
        except StoreLost as error:
            self._left = number
            text = f"Rank {self._rank} lost {self._connections.name}, while agreeing on {wait.what}: {error}"
            raise AgreementTimeout(text, self._connections.hosts) from None
        except BaseException as error:  # of the decision, or Ctrl-C
            if not self._tell_failure(number, error):
                (fail_later or self.fail)(error)
            raise
        if end[:1] == b"F":
            self._leave(number, has_order=False)
            raise _read_failure(end[1:]).on(self._rank)
        return _unpacked(end[1:])

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this rank does not come to its next exchange."""
        number, self.number = self.number, self.number + 1
        if not self._tell_failure(number, error):
            self.fail(error)  # they have gone on

    def find_failure(self, number: int) -> TuningError | None:
        """Return how an exchange that this rank has not come to has failed; raises StoreLost."""
        key = str(number)
        end = self._do(lambda store: peek(store, key))
        return _read_failure(end[1:]).on(self._rank) if end[:1] == b"F" else None

    def heartbeat(self, number: int | None = None) -> None:
        """Count on: this rank compiles before an exchange, its next one, and who waits there waits longer."""
        key = f"{self.number if number is None else number}/beats"
        self._trash += [] if key in self._trash else [key]
        self._at_once(lambda store: store.add(key, 1))

    def tell_idle(self) -> None:
        """Count on: this rank lives, has a session open, and is in no call of its function."""
        self._tells_idle = True
        self._at_once(lambda store: store.add(_idle_key(self._rank), 1))

    def leave(self) -> None:
        """Leave a session, after its last exchange."""
        if self._tells_idle:
            self._tells_idle = False
            self._at_once(lambda store: store.delete_key(_idle_key(self._rank)))
        self._leave(self.number - 1, has_order=True)

    def close(self) -> None:
        """Give the connection back."""
        if self._courier is not None:
            self._connections.give(self._courier)
            self._courier = None

    # -- one exchange --------------------------------------------------------------------------------------

    def _take_part(self, number: int, report: bytes, decide: Decide, wait: ExchangeWait) -> bytes:
        """Return the end of an exchange, as it stands in the store."""
        leads, mine = self._rank == self._leader, f"{number}/{self._rank}"
        awaited = [f"{number}/{rank}" for rank in self._others] if leads else [str(number)]
        packed, old = (b"", []) if leads else (_packed(report), self._left_over(number))

        def post_and_wait(store: Any) -> list[bytes]:
            if not leads:
                store.set(mine, packed)
                _delete(store, old)  # while the deciding rank gathers
            return await_values(store, awaited)

        waiting = self._wait_for(post_and_wait)
        self._trash += [] if leads else [mine]
        try:
            found = self._awaited(waiting, number, wait)
            if found is None:
                return self._give_up(number, wait)
            if not leads:
                return found[0]
            reports = {self._rank: report, **dict(zip(self._others, map(_unpacked, found), strict=True))}
            order = b"O" + _packed(decide(dict(sorted(reports.items()))))
        finally:
            if leads and not waiting.done():
                self._release(number)
        writing = self._wait_for(lambda store: bytes(store.compare_set(str(number), "", order)))
        old = self._left_over(number)
        self._trash.append(str(number))
        self._wait_for(lambda store: _delete(store, old))  # all ranks have come to this exchange
        return result_of(writing, self._limit_s)

    def _awaited(self, waiting: Future[T], number: int, wait: ExchangeWait) -> T | None:
        """Return the result of the courier's operation; None: a peer has failed, or the time is up."""
        began, timeout_s = time.monotonic(), wait.timeout_s
        deadline, latest = began + timeout_s, began + PATIENCE * timeout_s
        looking, beats, beats_key, mine = None, 0, f"{number}/beats", f"{number}/{self._rank}"

        def look_around(store: Any) -> tuple[bool, int]:
            if self._rank == self._leader:
                store.set(mine, b"here")  # it is not the one that is missing
            if time.monotonic() - began > min(wait.patience_s / 2, timeout_s):
                self._look_for_idle(store, number)
            return store.check([str(number)]), _count(store, beats_key)

        while not has_ended(waiting, min(LOOK_S, timeout_s / 8)):
            now = time.monotonic()
            if looking is not None and looking.done():
                is_over, count = result_of(looking)
                if is_over and self._rank == self._leader:
                    return None
                if count != beats:
                    beats, deadline = count, min(now + max(timeout_s, 3 * HEARTBEAT_S), latest)
                looking = None
            self._trash += [] if mine in self._trash else [mine]
            looking = looking or self._at_once(look_around)
            if now >= deadline or (now > began + wait.patience_s and self._is_aside(now)):
                return None
        return result_of(waiting)

    def _look_for_idle(self, store: Any, number: int) -> None:
        """See which ranks are missing, and how often they have told that they are in no call."""
        idle, known, self._idle = dist.PrefixStore(self._idle_prefix, store.underlying_store), self._idle, {}
        for rank in self._ranks:
            if not store.check([f"{number}/{rank}"]):
                count = _count(idle, _idle_key(rank))
                before, since = known.get(rank, (count, -math.inf))
                self._idle[rank] = count, since if count == before else time.monotonic()

    def _is_aside(self, now: float) -> bool:
        """Return whether all that are missing have told since a while ago that they are in no call."""
        latest = [since for _, since in self._idle.values()]
        return bool(latest) and min(latest) > now - 2 * HEARTBEAT_S

    # -- ends without an order -----------------------------------------------------------------------------

    def _give_up(self, number: int, wait: ExchangeWait) -> bytes:
        is_aside, what = self._is_aside(time.monotonic()), wait.what

        def write(store: Any) -> bytes:
            missing = tuple(r for r in self._others if not store.check([f"{number}/{r}"])) or (self._leader,)
            names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {list(missing)}"
            text = (
                f"Rank {self._rank} waited {wait.timeout_s:g} s for {names} to agree on {what}. Find the "
                f"first failure in the output of {names}; if there is none, raise timeout_s=."
            )
            if is_aside:
                waited_s = min(wait.timeout_s, wait.patience_s)
                text = f"{names} made no call of it within {waited_s:.3g} s, so {what} counts for no rank"
            kind = PutAside if is_aside else AgreementTimeout
            return _write_failure(store, number, FailedExchange(kind.__name__, missing, text))

        return self._do(write)

    def _tell_failure(self, number: int, error: BaseException) -> bool:
        """Write that this rank has failed; return whether the others learn of it in this exchange."""
        kind = PeerHasNoConfig if isinstance(error, NoValidConfig) else PeerFailed
        failure = FailedExchange(kind.__name__, (self._rank,), described(error)[:2000])
        try:
            is_told = self._do(lambda store: _write_failure(store, number, failure))[:1] == b"F"
        except StoreLost:
            self._left = number
            return True
        if is_told:
            self._leave(number, has_order=False)
        return is_told

    def _release(self, number: int) -> None:
        """Let the deciding rank's courier go, which waits for reports that may never come."""
        keys = [f"{number}/{rank}" for rank in self._ranks]

        def stand_in(store: Any) -> None:
            for key in keys:
                if not store.check([key]):
                    store.set(key, b"")

        self._at_once(stand_in)

    # -- keys ----------------------------------------------------------------------------------------------

    def _left_over(self, number: int) -> list[str]:
        """Return the keys of earlier exchanges, to be deleted now; those of this one are kept."""
        now, known = f"{number}/", self._trash
        self._trash = [key for key in known if key.startswith(now)]
        return [key for key in known if not key.startswith(now)]

    def _leave(self, number: int, *, has_order: bool) -> None:
        """Count this rank out of a session's last exchange; the last rank that leaves deletes its keys."""
        if number == self._left:
            return
        self._left, count = number, len(self._ranks)
        own = [str(number), *(f"{number}/{each}" for each in ("left", "beats", *self._ranks))]
        # The deciding rank deletes them later where a rank has died, and does not leave.
        self._trash = [*self._trash, *own] if self._rank == self._leader else []
        before = [str(number - 1), *(f"{number - 1}/{rank}" for rank in self._ranks)]

        def write(store: Any) -> None:
            if store.add(f"{number}/left", 1) == count:
                _delete(store, [*own, *before])
            elif has_order and self._rank == self._leader:  # its process may serve the store, and end now
                until = time.monotonic() + FAREWELL_S
                while store.check([str(number)]) and time.monotonic() < until:
                    time.sleep(1e-3)

        has_ended(self._at_once(lambda store: None), self._limit_s)  # after the last beat,
        self._courier = self._courier or self._connections.take()
        if has_ended(self._wait_for(write), self._limit_s):  # and after the wait for the end
            self.close()

    def _wait_for(self, operation: Callable[[Any], T]) -> Future[T]:
        """Queue an operation that may wait for peers."""
        assert self._courier is not None
        return self._courier.start(self._with_prefix(operation))

    def _at_once(self, operation: Callable[[Any], T]) -> Future[T]:
        """Start an operation that waits for nobody."""
        return self._connections.scout.start(self._with_prefix(operation))

    def _do(self, operation: Callable[[Any], T]) -> T:
        return self._connections.scout.do(self._with_prefix(operation), self._limit_s)

    def _with_prefix(self, operation: Callable[[Any], T]) -> Callable[[Any], T]:
        return lambda connection: operation(dist.PrefixStore(self._prefix, connection))


def _idle_key(rank: int) -> str:
    return f"idle/{rank}"


def _count(store: Any, key: str) -> int:
    return int(peek(store, key) or 0)


def _delete(store: Any, keys: list[str]) -> None:
    for key in keys:
        store.delete_key(key)


def _write_failure(store: Any, number: int, failure: FailedExchange) -> bytes:
    """Write how an exchange fails, unless it has ended; return its end."""
    return bytes(store.compare_set(str(number), "", b"F" + _to_bytes(failure)))


def _packed(message: bytes) -> bytes:
    return b"Z" + zlib.compress(message, 1) if len(message) > LARGE_BYTES else b"P" + message


def _unpacked(message: bytes) -> bytes:
    return zlib.decompress(message[1:]) if message[:1] == b"Z" else message[1:]
