"""The notice board of a group: its keys in torch.distributed's default store.

There stand the address of the group's hub, and what must outlive the hub: who is there, and how an
exchange ended that could not end through the hub. An operation of torch's stores can be neither
interrupted nor bounded in time (a stopped host blocks it for ever), so each runs on a thread of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

End = dict[str, Any]  # how an exchange ended: "merged", "failed" or "missing", and what belongs to it

PATIENCE_S = 10.0  # for one operation


class StoreLost(Exception):
    """The default store does not answer."""


@dataclass(frozen=True)
class Address:
    """Where a hub listens.

    token: twice `TOKEN_BYTES`. Whoever connects shows the first half, and is answered the second.
    """

    host: str  # as `hosts.this_host` names it
    port: int  # for ranks on the same host
    outside: tuple[tuple[str, int], ...]  # (name, port) for ranks on other hosts, once one has asked
    token: str

    def ways(self, from_host: str) -> list[tuple[str, int]]:
        """Return what a rank on a host can connect to; nothing: it has to ask."""
        return [("127.0.0.1", self.port)] if from_host == self.host else list(self.outside)


class Store:
    """The keys of one group. Create it on all ranks; no method waits for a peer."""

    def __init__(self, group: Any, ranks: tuple[int, ...], rank: int) -> None:
        self._group_name = str(group.group_name)
        self._ranks = ranks
        self._rank = rank
        self._mark = os.urandom(8).hex()  # of this board
        self._known_store: Any = None
        self._is_closed = False

    @property
    def host(self) -> tuple[str, int] | None:
        """Return who serves the default store, if it is a TCP store."""
        base = dist.distributed_c10d._get_default_store()
        while isinstance(base, dist.PrefixStore):
            base = base.underlying_store
        return (base.host, base.port) if isinstance(base, dist.TCPStore) else None

    def close(self) -> None:
        """Let go of the store: the process that serves it must be able to end it."""
        self._known_store = None
        self._is_closed = True

    def put_address(self, address: Address) -> None:
        self._do(lambda: self._store.set("address", json.dumps(asdict(address))))

    def address(self, patience_s: float = PATIENCE_S) -> Address | None:
        """Return the hub's address, if it stands here yet."""
        found = self._do(lambda: self._read("address"), patience_s)
        if found is None:
            return None
        outside = tuple((name, port) for name, port in found.pop("outside"))
        return Address(outside=outside, **found)

    def ask_in(self, host: str) -> None:
        """Ask the hub to listen on the interface towards `host`."""

        def ask() -> None:
            number = self._store.add("asked", 1)
            self._store.set(f"asked/{number}", json.dumps(host))

        self._do(ask)

    def askers(self, known: int, patience_s: float = PATIENCE_S) -> list[str]:
        """Return the hosts that have asked since the first `known`."""

        def read() -> list[str]:
            hosts = (self._read(f"asked/{number}") for number in itertools.count(known + 1))
            return list(itertools.takewhile(lambda host: host is not None, hosts))

        return self._do(read, patience_s)

    def publish(self, sequence: int, end: End, patience_s: float = PATIENCE_S) -> None:
        """Let `end` stand unless there is one."""
        self._do(lambda: self._store.compare_set(f"{sequence}/end", "", json.dumps(end)), patience_s)

    def end(self, sequence: int, patience_s: float = PATIENCE_S) -> End | None:
        """Return how the exchange ended, if it says so here."""
        found: End | None = self._do(lambda: self._read(f"{sequence}/end"), patience_s)
        return found

    def sign(self, sequence: int, patience_s: float = PATIENCE_S) -> None:
        """Say that this rank has come to an exchange."""
        self._do(lambda: self._store.set(f"here/{self._rank}", str(sequence)), patience_s)

    def absent(self, sequence: int, patience_s: float = PATIENCE_S) -> list[int]:
        """Return the ranks that have not signed for this exchange or a later one."""
        return self._do(lambda: [rank for rank in self._ranks if self._signed(rank) < sequence], patience_s)

    def _signed(self, rank: int) -> int:
        latest = self._read(f"here/{rank}")
        return -1 if latest is None else int(latest)

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    @property
    def _store(self) -> Any:
        if self._is_closed:
            raise StoreLost("the process group has ended")
        if self._known_store is None:
            default = dist.distributed_c10d._get_default_store()
            members = "-".join(map(str, self._ranks)) if len(self._ranks) < 17 else str(len(self._ranks))
            name = f"dist_autotune/{self._group_name}/{members}"
            self._known_store = dist.PrefixStore(f"{name}/{self._count(default, name)}", default)
        return self._known_store

    def _count(self, default: Any, name: str) -> int:
        """Return how many boards this rank has made for groups of this name, this one included.

        The n-th of one rank belongs with the n-th of the others. A board takes its number by its mark, so
        asking again gives the same number, also where the first answer was slow or lost.
        """
        for count in itertools.count(1):
            if (
                default.compare_set(f"{name}/boards/{self._rank}/{count}", "", self._mark).decode()
                == self._mark
            ):
                return count
        raise AssertionError

    def _do(self, operation: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(operation())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="dist_autotune board", daemon=True)
        thread.start()
        thread.join(patience_s)
        if results:
            return results[0]
        if not errors or isinstance(errors[0], (dist.DistError, StoreLost)):
            raise StoreLost(str(errors[0]) if errors else f"no answer in {patience_s:.3g} s")
        raise errors[0]
