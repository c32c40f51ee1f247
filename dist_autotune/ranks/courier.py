"""Operations of torch's store, made by threads with connections of their own.

An operation of torch's stores can be neither interrupted nor bounded in time: Ctrl-C waits for its end, and a
stopped host blocks it for ever. It also locks its connection, and one that times out prints on stderr. A
thread that returns from one while the interpreter ends aborts the process: all threads are ended before.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import datetime
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from .. import settings

T = TypeVar("T")

CONNECT_S = 30.0  # the longest wait for a connection
OPERATION_S = 5.0  # a store that does not answer for so long is lost
EXIT_S = 2.0  # the process waits so long for its threads
_ABSENT = "dist_autotune: absent"  # the value of no key
FIRST_PAUSE_S, LAST_PAUSE_S = 50e-6, 10e-3  # between looks at a store that is polled


class StoreLost(Exception):
    """The store of the process group does not answer, or its host has gone."""


def has_ended(operation: Future[Any], limit_s: float) -> bool:
    """Return whether an operation has ended in time. Ctrl-C ends the wait at once."""
    with contextlib.suppress(TimeoutError):
        operation.exception(max(limit_s, 0))
    return operation.done()


def result_of(operation: Future[T], limit_s: float = OPERATION_S) -> T:
    """Return the result of an operation; raises StoreLost, also where it does not end in time."""
    try:
        return operation.result(limit_s)
    except TimeoutError:
        raise StoreLost(f"no answer in {limit_s:.3g} s") from None


class Courier:
    """Makes operations on a connection of its own, one after the other, on a thread of its own.

    release: ends an operation that waits for peers.
    """

    def __init__(self, connect: Callable[[], Any], name: str) -> None:
        self.release: Callable[[], None] = lambda: None
        self._asked: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._connection: Any = None
        self._has_ended = False
        self.thread = threading.Thread(target=self._serve, args=(connect,), daemon=True, name=name)
        _couriers.add(self)
        self.thread.start()
        self.start(lambda connection: None)  # connect now: later the host may have gone

    def start(self, operation: Callable[[Any], T]) -> Future[T]:
        """Queue `operation`: the thread calls it with its connection, after earlier ones.

        After `close` it fails at once.
        """
        future: Future[T] = Future()
        self._asked.put((operation, future))
        if self._has_ended:
            self._refuse_left()
        return future

    def do(self, operation: Callable[[Any], T], limit_s: float = OPERATION_S) -> T:
        """Return the result of the operation; raises StoreLost where it does not end in time."""
        if self._connection is None:  # the store's host may ask a name server who it is that connects
            limit_s = max(limit_s, CONNECT_S)
        return result_of(self.start(operation), limit_s)

    def close(self) -> None:
        """End the thread after its last operation. Takes no lock: a garbage collector may call it."""
        self._asked.put(None)

    def _serve(self, connect: Callable[[], Any] | None) -> None:
        while (asked := self._asked.get()) is not None:
            operation, future = asked
            try:
                if self._connection is None:
                    assert connect is not None
                    self._connection = connect()
                    connect = None  # the store's process can end it only while nobody else holds it
                future.set_result(operation(self._connection))
            except Exception as error:
                future.set_exception(StoreLost(str(error)))
            del asked, operation, future  # and what they carry
        self._connection = None
        self._has_ended = True  # before what has come after the end is refused: nobody waits for it
        self._refuse_left()
        _couriers.discard(self)

    def _refuse_left(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (asked := self._asked.get_nowait()) is not None:
                    asked[1].set_exception(StoreLost("the connection has been closed"))


_couriers: set[Courier] = set()  # whose threads have not ended


def _close(couriers: Iterable[Courier]) -> None:
    for courier in couriers:
        courier.release()  # by an operation of another one
    for courier in couriers:
        courier.close()


def _end_all() -> None:
    """End all threads before the interpreter ends."""
    alive = [courier for courier in tuple(_couriers) if courier.thread.is_alive()]  # in a forked child: none
    _close(alive)
    until = time.monotonic() + EXIT_S
    for courier in alive:
        courier.thread.join(max(until - time.monotonic(), 0))


class Connections:
    """This process's connections to one store, which all groups and functions share.

    scout: for operations that end at once. One that waits for peers takes a courier, and gives it back.
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
            courier = Courier(lambda: self.scout.do(_cloned, CONNECT_S), "dist_autotune courier")
            self._all.append(courier)
            return courier

    def give(self, courier: Courier) -> None:
        self._free.append(courier)

    def close(self) -> None:
        """End all threads. Takes no lock: a garbage collector may call it."""
        _close(tuple(self._all))


_connections: weakref.WeakKeyDictionary[Any, Connections] = weakref.WeakKeyDictionary()


def connections() -> Connections:
    """Return this process's connections to the store of the default process group."""
    world = dist.group.WORLD
    if (known := _connections.get(world)) is None:
        made = Connections(dist.distributed_c10d._get_default_store())
        known = _connections.setdefault(world, made)  # another thread may have made them meanwhile
        if known is made:
            weakref.finalize(world, known.close).atexit = False
            atexit.unregister(_end_all)
            atexit.register(_end_all)
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


def peek(store: Any, key: str) -> bytes:
    """Return a key's value; b"": it has none. `get` would wait for one that a peer deletes meanwhile.

    `compare_set` changes nothing then, but wakes who waits for a key that is not there: it would read b"".
    """
    if not store.check([key]):
        return b""
    value = bytes(store.compare_set(key, _ABSENT, _ABSENT))
    return b"" if value == _ABSENT.encode() else value


def await_values(store: Any, keys: Sequence[str]) -> list[bytes]:
    """Return the values of keys as soon as all of them stand in the store."""
    if not _is_tcp(store):  # others poll in steps of 10 ms, or fail in place of a time-out
        for pause_s in pauses():
            if store.check(list(keys)):
                break
            time.sleep(pause_s)
    elif len(keys) > 1:
        return [bytes(value) for value in store.multi_get(list(keys))]
    return [bytes(store.get(key)) for key in keys]


def pauses(first_s: float = FIRST_PAUSE_S) -> Iterator[float]:
    """Yield pauses between looks at the store, which grow."""
    while True:
        yield first_s
        first_s = min(1.2 * first_s, LAST_PAUSE_S)


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
    """Return the ranks that host the store: it ends with them."""
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
