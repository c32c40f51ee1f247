"""The keys of a group in torch.distributed's default store.

They hold the address of the group's hub, and what must outlive the hub: which ranks have come to an exchange,
and how one ended that could not end through the hub. An operation of torch's stores can be neither
interrupted nor bounded in time (a stopped host blocks it for ever), so each runs on a thread of its own.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from .hub import Address
from .wire import End

T = TypeVar("T")

OPERATION_S = 10.0  # the longest wait for one operation


class StoreLost(Exception):
    """The default store does not answer."""


class Store:
    """The keys of one group. Create it on all ranks; no method waits for a peer."""

    def __init__(self, group: Any, ranks: tuple[int, ...], rank: int) -> None:
        members = "-".join(map(str, ranks)) if len(ranks) < 17 else str(len(ranks))
        self._name = f"dist_autotune/{group.group_name}/{members}"
        self._ranks, self._rank = ranks, rank
        self._mark = os.urandom(8).hex()  # of this object
        self._known_keys: Any = None
        self._is_closed = False

    @property
    def host(self) -> str:
        """Return who serves the default store, if it is a TCP store."""
        base = dist.distributed_c10d._get_default_store()
        while isinstance(base, dist.PrefixStore):
            base = base.underlying_store
        return base.host if isinstance(base, dist.TCPStore) else ""

    def close(self) -> None:
        """Let go of the default store: the process that serves it must be able to end it."""
        self._known_keys, self._is_closed = None, True

    def publish_address(self, address: Address) -> None:
        self._run(lambda: self._keys.set("address", json.dumps(vars(address))))

    def read_address(self, limit_s: float = OPERATION_S) -> Address | None:
        """Return the hub's address, if it stands here yet."""
        found = self._run(lambda: self._read("address"), limit_s)
        return None if found is None else msgspec.convert(found, Address)

    def request_access(self, host: str) -> None:
        """Ask the hub to listen on the interface towards `host`."""
        self._run(lambda: self._keys.set("outside", json.dumps(host)))

    def requested_access(self, limit_s: float = OPERATION_S) -> str | None:
        """Return the host towards which the hub is asked to listen; None: nobody has asked."""
        return self._run(lambda: self._read("outside"), limit_s)  # type: ignore[no-any-return]

    def publish_end(self, sequence: int, end: End, limit_s: float = OPERATION_S) -> None:
        """Store how an exchange ended, unless an end is stored."""
        self._run(lambda: self._keys.compare_set(f"{sequence}/end", "", json.dumps(end)), limit_s)

    def read_end(self, sequence: int, limit_s: float = OPERATION_S) -> End | None:
        """Return how an exchange ended, if that is stored."""
        return self._run(lambda: self._read(f"{sequence}/end"), limit_s)  # type: ignore[no-any-return]

    def record_arrival(self, sequence: int, limit_s: float = OPERATION_S) -> None:
        """Store that this rank has come to an exchange."""
        self._run(lambda: self._keys.set(f"here/{self._rank}", str(sequence)), limit_s)

    def absent_ranks(self, sequence: int, limit_s: float = OPERATION_S) -> list[int]:
        """Return the ranks that have recorded no arrival at this exchange or a later one."""
        latest = self._run(lambda: [(rank, self._read(f"here/{rank}")) for rank in self._ranks], limit_s)
        return [rank for rank, arrival in latest if arrival is None or int(arrival) < sequence]

    def _read(self, key: str) -> Any:
        return json.loads(self._keys.get(key)) if self._keys.check([key]) else None

    @property
    def _keys(self) -> Any:
        if self._is_closed:
            raise StoreLost("the process group has ended")
        if self._known_keys is None:
            default = dist.distributed_c10d._get_default_store()
            self._known_keys = dist.PrefixStore(f"{self._name}/{self._count(default)}", default)
        return self._known_keys

    def _count(self, default: Any) -> int:
        """Return which store of this name it is on this rank: the n-th of all ranks belong together.

        It takes its number by its mark: asking again, where an answer was slow or lost, gives the same one.
        """
        for count in itertools.count(1):
            key = f"{self._name}/counts/{self._rank}/{count}"
            if default.compare_set(key, "", self._mark).decode() == self._mark:
                return count
        raise AssertionError

    def _run(self, operation: Callable[[], T], limit_s: float = OPERATION_S) -> T:
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                result.set_result(operation())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, name="dist_autotune store", daemon=True).start()
        try:
            return result.result(limit_s)
        except TimeoutError:
            raise StoreLost(f"no answer in {limit_s:.3g} s") from None
        except dist.DistError as error:
            raise StoreLost(str(error)) from None
