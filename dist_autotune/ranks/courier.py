"""Operations of torch's store, made by a thread with a connection of its own.

An operation of torch's stores can be neither interrupted nor bounded in time: Ctrl-C waits for its end, and a
stopped host blocks it for ever. It also locks its connection, and one that times out prints on stderr.
"""

from __future__ import annotations

import collections
import datetime
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from .. import settings

T = TypeVar("T")

CONNECT_S = 30.0  # the longest wait for a connection
FIRST_PAUSE_S, LAST_PAUSE_S = 50e-6, 10e-3  # between looks at a store that is polled


class StoreLost(Exception):
    """The store of the process group does not answer, or its host has gone."""


class Parcel(Generic[T]):
    """An operation under way, and what it returns."""

    def __init__(self, operation: Callable[[Any], T]) -> None:
        self.operation = operation
        self.value: Any = None
        self.error: Exception | None = None
        self.is_done = threading.Event()

    def wait(self, limit_s: float) -> bool:
        """Return whether the operation has ended in time. Ctrl-C ends the wait at once."""
        return self.is_done.wait(limit_s)

    def result(self) -> T:
        """Return what the ended operation has returned; raises StoreLost."""
        if self.error is not None:
            raise StoreLost(str(self.error)) from self.error
        return self.value  # type: ignore[no-any-return]


class Courier:
    """Makes operations on a connection of its own, one after the other, on a thread of its own."""

    def __init__(self, connect: Callable[[], Any], name: str) -> None:
        self._parcels: queue.SimpleQueue[Parcel[Any] | None] = queue.SimpleQueue()
        self._connection: Any = None
        threading.Thread(target=self._serve, args=(connect,), daemon=True, name=name).start()
        self.start(lambda connection: None)  # connect now: later the host may have gone

    def start(self, operation: Callable[[Any], T]) -> Parcel[T]:
        """Let the thread call `operation` with its connection, behind what it was given before."""
        parcel = Parcel(operation)
        self._parcels.put(parcel)
        return parcel

    def do(self, operation: Callable[[Any], T], limit_s: float) -> T:
        """Return what the operation returns; raises StoreLost where it does not end in time."""
        if self._connection is None:  # the store's host may ask a name server who it is that connects
            limit_s = max(limit_s, CONNECT_S)
        parcel = self.start(operation)
        if not parcel.wait(limit_s):
            raise StoreLost(f"no answer in {limit_s:.3g} s")
        return parcel.result()

    def close(self) -> None:
        """End the thread behind its last operation. Takes no lock: a garbage collector may call it."""
        self._parcels.put(None)

    def _serve(self, connect: Callable[[], Any] | None) -> None:
        while (parcel := self._parcels.get()) is not None:
            try:
                if self._connection is None:
                    assert connect is not None
                    self._connection = connect()
                    connect = None  # the store's process can end it only while nobody else holds it
                parcel.value = parcel.operation(self._connection)
            except Exception as error:
                parcel.error = error
            parcel.is_done.set()
            del parcel  # and what it carries
        self._connection = None


class Connections:
    """This process's connections to one store, which all groups and functions share.

    scout: for operations that end at once. Who waits for peers takes a courier, and gives it back.
    """

    def __init__(self, store: Any) -> None:
        self.name, self.hosts = _name_of(store), _hosts_of(store)
        self.scout = Courier(functools.partial(_connected, store), "dist_autotune scout")
        self._free: list[Courier] = []
        self._all = [self.scout]

    def take(self) -> Courier:
        """Return a courier that nobody else uses."""
        try:
            return self._free.pop()
        except IndexError:
            courier = Courier(
                lambda: self.scout.do(lambda connection: _cloned(connection), CONNECT_S),
                "dist_autotune courier",
            )
            self._all.append(courier)
            return courier

    def give(self, courier: Courier) -> None:
        self._free.append(courier)

    def close(self) -> None:
        """End all threads. Takes no lock: a garbage collector may call it."""
        for courier in list(self._all):
            courier.close()


_connections: weakref.WeakKeyDictionary[Any, Connections] = weakref.WeakKeyDictionary()


def connections() -> Connections:
    """Return this process's connections to the store of the default process group."""
    world = dist.group.WORLD
    if (known := _connections.get(world)) is None:
        made = Connections(dist.distributed_c10d._get_default_store())
        known = _connections.setdefault(world, made)  # another thread may have made them meanwhile
        if known is made:
            weakref.finalize(world, known.close).atexit = False
        else:
            made.close()
    return known


def _connected(store: Any) -> Any:
    store.check(["alive"])  # fails at once where clone() tries to connect for a minute
    return _cloned(store)


def _cloned(store: Any) -> Any:
    """Return a clone that waits for a day: a wait that times out prints on stderr."""
    clone = store.clone()
    if _is_tcp(clone):
        clone.set_timeout(datetime.timedelta(days=1))
    return clone


def await_values(store: Any, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys as soon as all of them stand in the store."""
    if not _is_tcp(store):  # others poll in steps of 10 ms, or fail in place of a time-out
        pauses = _pauses()
        while not store.check(list(keys)):
            time.sleep(next(pauses))
    elif len(keys) > 1:
        return [bytes(value) for value in store.multi_get(list(keys))]
    return [bytes(store.get(key)) for key in keys]


_made: collections.Counter[str] = collections.Counter()


def prefix_of(group: Any, ranks: Sequence[int]) -> str:
    """Return the prefix of a process group's keys.

    A group may end and begin again under its name: the n-th of that name on each rank belong together.
    """
    members = "-".join(map(str, ranks)) if len(ranks) < 17 else str(len(ranks))
    name = f"dist_autotune/{group.group_name}/{members}"
    _made[name] += 1
    return f"{name}/{_made[name]}"


def _hosts_of(store: Any) -> tuple[int, ...]:
    """Return the ranks whose end is the store's."""
    return (0,) if _is_tcp(store) and not settings.agent_has_store() else ()


def _name_of(store: Any) -> str:
    base = _base_of(store)
    if not _is_tcp(store):
        return f"the {type(base).__name__} of the process group"
    server = "rank 0" if _hosts_of(store) else "the launcher"
    return f"the TCPStore at {base.host}:{base.port}, which {server} serves"


def _base_of(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _is_tcp(store: Any) -> bool:
    return isinstance(_base_of(store), dist.TCPStore)


def _pauses() -> Iterator[float]:
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(1.2 * pause_s, LAST_PAUSE_S)
