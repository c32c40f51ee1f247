"""The exchanges of a group: one report of each rank to the deciding rank, one order back.

Exchange 7 has these keys. `7/3` is the report of rank 3. `7` is its end, which is written once, by
`compare_set`: the order, the failure of a rank, or the ranks that were missing; so all ranks leave the
exchange alike. `7/beats` counts on while a rank compiles that the others wait for. `7/left` counts the ranks
that have read the end of a session's last exchange: the last one deletes all. Other keys are deleted in the
next exchange; what ranks have left behind that died, the deciding rank deletes when all have come to a later
one.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from msgspec import Struct, msgpack

from ..errors import NoValidConfig
from ..formatting import described
from .courier import Connections, Courier, Parcel, StoreLost, await_values

T = TypeVar("T")

Decide: TypeAlias = Callable[[dict[int, bytes]], bytes]  # the reports, by rank -> the order

OPERATION_S = 5.0  # a store that does not answer for so long is lost
LOOK_S = 0.1  # how often a waiting rank looks whether a peer has failed or compiles; oftener if it waits less
PATIENCE = 10  # a rank that compiles extends its deadline at most this many times
FAREWELL_S = 1.0  # how long the deciding rank waits for others to read a session's last order
LARGE_BYTES = 1 << 16  # of a message that is compressed: torch's store takes 8 MiB


class FailedExchange(Struct, frozen=True, omit_defaults=True):
    """How an exchange ended without an order: a rank has failed, or ranks were missing."""

    rank: int  # that has failed, or whose time was up
    error: str = ""  # of the rank that has failed
    is_unusable: bool = False  # it has no config left
    missing: tuple[int, ...] = ()
    waited_s: float = 0.0
    what: str = ""  # the ranks were to agree on
    is_lost: bool = False  # the store has gone; known to this rank alone
    is_aside: bool = False  # those that were missing live, and are in no call


End: TypeAlias = bytes | FailedExchange
_to_bytes, _read_failure = msgpack.Encoder().encode, msgpack.Decoder(FailedExchange).decode


class Exchanges:
    """The exchanges of one group as one rank sees them, by number. A rank makes one at a time."""

    def __init__(
        self, connections: Connections, prefix: str, ranks: tuple[int, ...], rank: int, heartbeat_s: float
    ) -> None:
        self._connections, self._prefix = connections, prefix
        self._courier: Courier | None = None  # from an exchange to the end of its session
        self._ranks, self._rank, self._leader = ranks, rank, ranks[0]
        self._heartbeat_s = heartbeat_s
        self._trash: list[str] = []  # keys to be deleted in the next exchange
        self._limit_s = OPERATION_S
        self._left = -1  # the exchange that this rank has left as the last of a session
        self._patience_s = math.inf
        self.idle_prefix = prefix  # of the group's ranks that tell that they are in no call
        self._idle: dict[int, tuple[int, float]] = {}  # rank that is missing -> its count, since when

    def take_part(
        self,
        number: int,
        report: bytes,
        decide: Decide,
        timeout_s: float,
        what: str,
        patience_s: float = math.inf,
    ) -> End:
        """Return the order, or how the exchange ended without one: the same on all ranks.

        patience_s: after so long it ends, where those that are missing are in no call (`tell_idle`).
        """
        began, self._limit_s = time.monotonic(), min(OPERATION_S, timeout_s / 2)
        self._patience_s, self._idle = patience_s, {}
        self._courier = self._courier or self._connections.take()
        try:
            if self._rank == self._leader:
                end = self._lead(number, report, decide, timeout_s, what)
            else:
                end = self._follow(number, report, timeout_s, what)
        except StoreLost as error:
            waited_s = round(time.monotonic() - began, 1)
            self._left = number
            return FailedExchange(self._rank, str(error), waited_s=waited_s, what=what, is_lost=True)
        if isinstance(end, FailedExchange):
            self.leave(number, has_order=False)
        return end

    def _follow(self, number: int, report: bytes, timeout_s: float, what: str) -> End:
        mine, packed, old = f"{number}/{self._rank}", _packed(report), self._left_over(number)
        self._trash = [*self._trash, mine]

        def post_and_get(store: Any) -> bytes:
            store.set(mine, packed)
            for key in old:  # while the deciding rank gathers
                store.delete_key(key)
            return await_values(store, [str(number)])[0]

        found = self._awaited(self._wait_for(post_and_get), number, timeout_s)
        return _read_end(found if found is not None else self._give_up(number, timeout_s, what))

    def _lead(self, number: int, report: bytes, decide: Decide, timeout_s: float, what: str) -> End:
        mine = f"{number}/{self._rank}"
        keys = {rank: f"{number}/{rank}" for rank in self._ranks if rank != self._rank}

        def post_and_gather(store: Any) -> list[bytes]:
            store.set(mine, b"here")
            return await_values(store, [*keys.values()])

        parcel = self._wait_for(post_and_gather)
        try:
            found = self._awaited(parcel, number, timeout_s)
            if found is None:
                end = self._give_up(number, timeout_s, what)
                self._release(number, parcel)
                return _read_end(end)
            reports = {self._rank: report, **dict(zip(keys, map(_unpacked, found), strict=True))}
            order = b"O" + _packed(decide(dict(sorted(reports.items()))))
        except BaseException:  # of the decision, or Ctrl-C: who catches it calls `fail`
            self._release(number, parcel)
            raise
        old = self._left_over(number)
        self._trash += [str(number), mine]

        def write_order(store: Any) -> bytes:
            return bytes(store.compare_set(str(number), "", order))

        writing = self._wait_for(write_order)
        self._wait_for(lambda store: [store.delete_key(key) for key in old])
        if not writing.wait(self._limit_s):
            raise StoreLost(f"no answer in {self._limit_s:.3g} s")
        return _read_end(writing.result())

    def _wait_for(self, operation: Callable[[Any], T]) -> Parcel[T]:
        """Start an operation that may wait for peers, behind those before."""
        assert self._courier is not None
        return self._courier.start(self._with_prefix(operation))

    def _at_once(self, operation: Callable[[Any], T]) -> Parcel[T]:
        """Start an operation that waits for nobody."""
        return self._connections.scout.start(self._with_prefix(operation))

    def _done(self, operation: Callable[[Any], T]) -> T:
        return self._connections.scout.do(self._with_prefix(operation), self._limit_s)

    def _with_prefix(self, operation: Callable[[Any], T]) -> Callable[[Any], T]:
        return lambda connection: operation(dist.PrefixStore(self._prefix, connection))

    def _left_over(self, number: int) -> list[str]:
        """Return the keys of earlier exchanges, to be deleted now; others are kept."""
        beats = f"{number}/beats"
        old = [key for key in self._trash if key != beats]
        self._trash = [beats] if beats in self._trash else []
        return old

    def _awaited(self, parcel: Parcel[T], number: int, timeout_s: float) -> T | None:
        """Return what the courier's operation returns; None: a peer has failed, or the time is up."""
        began = time.monotonic()
        deadline, latest = began + timeout_s, began + PATIENCE * timeout_s
        look, beats, beats_key = None, 0, f"{number}/beats"

        def look_around(connection: Any) -> tuple[bool, int]:
            store = dist.PrefixStore(self._prefix, connection)
            count = int(store.get(beats_key)) if store.check([beats_key]) else 0
            if time.monotonic() - began > min(self._patience_s / 2, timeout_s):
                self._look_for_idle(store, dist.PrefixStore(self.idle_prefix, connection), number)
            return store.check([str(number)]), count

        while not parcel.wait(min(LOOK_S, timeout_s / 8)):
            now = time.monotonic()
            if look is not None and look.wait(0):
                has_ended, count = look.result()
                if has_ended and self._rank == self._leader:
                    return None
                if count != beats:
                    beats = count
                    deadline = min(now + max(timeout_s, 3 * self._heartbeat_s), latest)
                look = None
            look = look or self._connections.scout.start(look_around)
            if now >= deadline or (now > began + self._patience_s and self._is_aside(now)):
                return None
        return parcel.result()

    def _look_for_idle(self, store: Any, idle: Any, number: int) -> None:
        """See which ranks are missing, and how often they have told that they are in no call."""
        before, found = self._idle, {}
        for rank in self._ranks:
            if not store.check([f"{number}/{rank}"]):
                count = int(idle.get(_idle_key(rank))) if idle.check([_idle_key(rank)]) else 0
                known = before.get(rank, (count, -math.inf))
                found[rank] = known if known[0] == count else (count, time.monotonic())
        self._idle = found

    def _is_aside(self, now: float) -> bool:
        """Return whether all that are missing have told since a while ago that they are in no call."""
        latest = [since for _, since in self._idle.values()]
        return bool(latest) and min(latest) > now - 2 * self._heartbeat_s

    def tell_idle(self) -> None:
        """Count on: this rank lives, has a session open, and is in no call."""
        self._at_once(lambda store: store.add(_idle_key(self._rank), 1))

    def end_idle(self) -> None:
        self._at_once(lambda store: store.delete_key(_idle_key(self._rank)))

    def _give_up(self, number: int, timeout_s: float, what: str) -> bytes:
        is_aside, patience_s = self._is_aside(time.monotonic()), self._patience_s

        def write(store: Any) -> bytes:
            missing = [rank for rank in self._ranks if not store.check([f"{number}/{rank}"])]
            failure = FailedExchange(
                self._rank,
                missing=tuple(missing or [self._leader]),
                waited_s=min(timeout_s, patience_s) if is_aside else timeout_s,
                what=what,
                is_aside=is_aside,
            )
            return bytes(store.compare_set(str(number), "", b"F" + _to_bytes(failure)))

        return self._done(write)

    def _release(self, number: int, gathering: Parcel[Any]) -> None:
        """Let the deciding rank's courier go, which waits for reports that may never come."""
        keys, limit_s = [f"{number}/{rank}" for rank in self._ranks], self._limit_s

        def stand_in(store: Any) -> None:
            until = time.monotonic() + limit_s
            while not gathering.is_done.wait(1e-3) and time.monotonic() < until:
                for key in keys:
                    if not store.check([key]):
                        store.set(key, b"")

        self._at_once(stand_in)

    def fail(self, number: int, failure: FailedExchange) -> bool:
        """Write that a rank has failed; return whether the others learn of it in this exchange."""

        def write(store: Any) -> bytes:
            return bytes(store.compare_set(str(number), "", b"F" + _to_bytes(failure)))

        try:
            is_told = self._done(write)[:1] == b"F"
        except StoreLost:
            self._left = number
            return True
        if is_told:
            self.leave(number, has_order=False)
        return is_told

    def find_failure(self, number: int) -> FailedExchange | None:
        """Return how an exchange that this rank has not come to has failed; raises StoreLost."""

        def read(store: Any) -> bytes:
            return bytes(store.get(str(number))) if store.check([str(number)]) else b""

        end = _read_end(self._done(read))
        return end if isinstance(end, FailedExchange) else None

    def beat(self, number: int) -> None:
        """Count on: this rank compiles, and who waits for it in an exchange waits longer."""
        key = f"{number}/beats"
        if key not in self._trash:
            self._trash.append(key)
        self._at_once(lambda store: store.add(key, 1))

    def leave(self, number: int, *, has_order: bool) -> None:
        """Count this rank out; the last rank that leaves an exchange deletes its keys.

        To be called behind a session's last exchange, and behind one without an order.
        """
        if number == self._left:
            return
        self._left, count = number, len(self._ranks)
        own = [str(number), *(f"{number}/{each}" for each in ("left", "beats", *self._ranks))]
        # The deciding rank deletes them later where a rank has died, and does not leave.
        self._trash = [*self._trash, *own] if self._rank == self._leader else []
        before = [str(number - 1), *(f"{number - 1}/{rank}" for rank in self._ranks)]

        def write(store: Any) -> None:
            if store.add(f"{number}/left", 1) == count:
                for key in (*own, *before):
                    store.delete_key(key)
            elif has_order and self._rank == self._leader:  # its process may serve the store, and end now
                until = time.monotonic() + FAREWELL_S
                while store.check([str(number)]) and time.monotonic() < until:
                    time.sleep(1e-3)

        self._at_once(lambda store: None).wait(self._limit_s)  # behind the last beat,
        self._courier = self._courier or self._connections.take()
        if self._wait_for(write).wait(self._limit_s):  # and behind the wait for the end
            self.close()

    def close(self) -> None:
        """Give the connection back."""
        if self._courier is not None:
            self._connections.give(self._courier)
            self._courier = None


def failure_of(rank: int, error: BaseException) -> FailedExchange:
    """Return the end of an exchange that a rank does not come to."""
    return FailedExchange(rank, described(error)[:2000], isinstance(error, NoValidConfig))


def _idle_key(rank: int) -> str:
    return f"idle/{rank}"


def _packed(message: bytes) -> bytes:
    return b"Z" + zlib.compress(message, 1) if len(message) > LARGE_BYTES else b"P" + message


def _unpacked(message: bytes) -> bytes:
    return zlib.decompress(message[1:]) if message[:1] == b"Z" else message[1:]


def _read_end(end: bytes) -> End:
    return _read_failure(end[1:]) if end[:1] == b"F" else _unpacked(end[1:])
