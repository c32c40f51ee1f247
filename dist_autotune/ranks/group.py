"""The ranks of a session: a process group, or one rank alone. The lowest rank decides.

No collective of the user's is touched; every wait has a limit.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import os
import threading
import weakref
from threading import get_ident
from typing import Any, TypeAlias

import torch.distributed as dist

from .. import settings
from ..errors import AgreementTimeout, InvalidOption, PutAside, RankMismatch, TuningError
from .courier import StoreLost, connections, peek, prefix_of
from .exchange import Decide, Exchanges, ExchangeWait
from .questions import CallCount, questions
from .turns import LocalTurn, Turns
from .watchdog import Watch, Watchdog

Block: TypeAlias = contextlib.AbstractContextManager[None]


_tuning_threads: set[int] = set()  # of this process, which have asked for a turn


class RankGroup:
    """The ranks of a session. This base class is one rank alone: it decides on its own report."""

    asks_for_trials = False  # all ranks take the turn for each trial of mode="online"
    turns: Turns | None = None  # asks for those of the function; None: a rank alone asks nobody
    _shared: RankGroup | None = None

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank  # global, for names of logs and in messages
        self.ranks: tuple[int, ...] = (rank,)  # of the group, global
        self._watchdog = Watchdog(rank)

    @property
    def shared(self) -> RankGroup:
        """The ranks that functions share: see `of_function`."""
        return self._shared or self

    def of_function(self, function: object, name: str) -> RankGroup:
        """Return these ranks as one function has them: its exchanges and failures are no other function's."""
        return self

    def exchange(self, report: bytes, decide: Decide, wait: ExchangeWait) -> bytes:
        """Send `report`, return the order that `decide` makes of all reports on the deciding rank.

        Raises AgreementTimeout or PeerFailed; an error of `decide` is raised on the deciding rank, and as
        PeerFailed on the others; PutAside after `wait.patience_s` if all missing peers are in no call of it.
        """
        return decide({self.rank: report})

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this rank does not reach the exchange it is due at."""

    def mark_idle(self, *, between_calls: bool) -> None:
        """Let the peers know while this rank is between calls of a session, or before an agreed one."""

    def leave(self) -> None:
        """Delete the keys that the last exchange left in the store; all ranks call it after a session."""

    def take_turn(self, turn: LocalTurn, wait: ExchangeWait) -> bool:
        """Take the turn of sessions on all ranks; return False where all go on without a session.

        Raises as `exchange`, and RankMismatch where ranks ask for different functions.
        """
        raise NotImplementedError

    def call_count(self, session: str, watch: Watch) -> CallCount | None:
        """Return the count of a function's calls after a session; None: nobody asks about them."""
        return None

    def busy(self) -> Block:
        """Keep peers from giving this rank up while the block compiles."""
        return self._watchdog.beating(lambda: None)

    def running(self, watch: Watch) -> Block:
        """Watch the block, which runs the user's code."""
        return contextlib.nullcontext() if watch.whereabouts is None else self._watchdog.watching(watch)


class ProcessGroup(RankGroup):
    """The ranks of one process group. Create it on all ranks of the group."""

    def __init__(self, group: Any) -> None:
        self.pid = os.getpid()
        self._group = weakref.ref(group)
        self.rank, self.ranks = dist.get_rank(), tuple(dist.get_process_group_ranks(group))
        self._connections, self._prefix = connections(), prefix_of(group, self.ranks)
        self._exchanges = self._new_exchanges(self._prefix)
        self._of: weakref.WeakKeyDictionary[Any, ProcessGroup] = weakref.WeakKeyDictionary()
        self._named: collections.Counter[str] = collections.Counter()  # functions, by name
        self._watchdog = Watchdog(self.rank)

    def _new_exchanges(self, prefix: str, idle_prefix: str = "") -> Exchanges:
        return Exchanges(self._connections, prefix, self.ranks, self.rank, idle_prefix)

    def of_function(self, function: object, name: str) -> ProcessGroup:
        if (known := self._of.get(function)) is not None:
            return known
        self._named[name] += 1  # of one name: the n-th of all ranks belong together
        number = self._named[name]
        place, title = f"{name}/{number}", name if number == 1 else f"{name} (number {number} of that name)"
        own = copy.copy(self)
        own._shared, sessions = self, f"{self._prefix}/sessions/{place}"
        own._exchanges = self._new_exchanges(sessions)
        asking = self._new_exchanges(f"{self._prefix}/turns/{place}", sessions)
        own.turns = Turns(title, asking, self.rank == self.ranks[0], own._exchanges.fail)
        weakref.finalize(own, _close, own._exchanges, self._watchdog).atexit = False
        return self._of.setdefault(function, own)

    def exchange(self, report: bytes, decide: Decide, wait: ExchangeWait) -> bytes:
        return self._exchanges.exchange(report, decide, wait)

    def fail(self, error: BaseException) -> None:
        group = self._group()
        if self.pid == os.getpid() and group is not None and not _has_ended(group):
            self._exchanges.fail(error)

    def mark_idle(self, *, between_calls: bool) -> None:
        self._watchdog.idle(self._exchanges.tell_idle, is_idle=between_calls)

    def leave(self) -> None:
        self.mark_idle(between_calls=False)
        self._exchanges.leave()

    def busy(self) -> Block:
        return self._watchdog.beating(self._exchanges.heartbeat)

    def take_turn(self, turn: LocalTurn, wait: ExchangeWait) -> bool:
        assert self.turns is not None
        turns = self.turns
        _tuning_threads.add(get_ident())
        scout, own = self._connections.scout, f"{self._prefix}/asks/{self.rank}"
        scout.start(lambda store: store.set(own, turns.name))
        try:
            has_turn = turns.take(turn, wait, on_threads=len(_tuning_threads) > 1)
        except PutAside:
            raise
        except AgreementTimeout as error:
            asked = self._asked_by(error.missing_ranks)
            if not {*asked.values()} - {turns.name}:  # a late rank finds that those before it have left
                raise
            asked = dict(sorted({**asked, self.rank: turns.name}.items()))
            names = "; ".join(f"rank {rank}: {name}" for rank, name in asked.items())
            raise RankMismatch(
                f"ranks differ in the tuned function: {names}. All ranks must run the same code with the "
                "same options, and call the same tuned functions."
            ) from None
        scout.start(lambda store: store.delete_key(own))
        self.shared.asks_for_trials |= turns.are_on_threads
        return has_turn

    def _asked_by(self, ranks: tuple[int, ...]) -> dict[int, str]:
        """Return the functions for which other ranks wait for the turn."""
        keys = {rank: f"{self._prefix}/asks/{rank}" for rank in ranks if rank != self.rank}

        def read(store: Any) -> dict[int, str]:
            found = {rank: peek(store, key).decode() for rank, key in keys.items()}
            return {rank: name for rank, name in found.items() if name}

        try:
            return self._connections.scout.do(read)
        except StoreLost:
            return {}

    def call_count(self, session: str, watch: Watch) -> CallCount | None:
        known = questions()
        return known.count(CallCount(known, session, self.ranks, self.rank, watch, self._watchdog))

    def running(self, watch: Watch) -> Block:
        find_failure = functools.partial(self._exchanges.find_failure, self._exchanges.number)
        return self._watchdog.watching(watch, find_failure)

    def close(self) -> None:
        """End all that was started for the group: it has ended. Takes no lock: a collector may call it."""
        self._watchdog.close()
        for each in (self, *self._of.values()):
            each._exchanges.close()


class Groups:
    """The rank groups of this process, one per process group, shared by all tuned functions."""

    def __init__(self) -> None:
        self._by_group: weakref.WeakKeyDictionary[Any, ProcessGroup] = weakref.WeakKeyDictionary()
        self._single: dict[int, RankGroup] = {}
        self._making: dict[int, threading.Lock] = {}  # by process: a fork may leave its parent's taken

    def single(self) -> RankGroup:
        """Return this process as a group of its own."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else settings.process_rank()
        if rank not in self._single:
            self._single[rank] = RankGroup(rank)
        return self._single[rank]

    def of(self, group: Any) -> RankGroup:
        """Return the ranks of `group` (None: the default group); `single()` for one rank, or a fork."""
        if not (dist.is_available() and dist.is_initialized()):
            return self.single()
        if group is None:
            group = dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER or _rank_in(group) < 0:
            raise TuningError(
                f"Rank {dist.get_rank()} called a tuned function whose group= it is not a member of. "
                "Call it on members only, or give each rank its own group."
            )
        known = self._by_group.get(group)
        if dist.get_world_size(group) == 1 or (known is not None and known.pid != os.getpid()):
            return self.single()
        return self._made(group) if known is None else known

    def _made(self, group: Any) -> RankGroup:
        # Ranks count those that they make, so no thread makes one again.
        with self._making.setdefault(os.getpid(), threading.Lock()):
            if (known := self._by_group.get(group)) is None:
                self._close_ended()
                known = self._by_group[group] = ProcessGroup(group)
                weakref.finalize(group, known.close).atexit = False
            return known

    def _close_ended(self) -> None:
        """Close groups that were destroyed while the program still holds them."""
        for group, known in list(self._by_group.items()):
            if known.pid == os.getpid() and _has_ended(group):
                known.close()
                del self._by_group[group]


def _close(exchanges: Exchanges, watchdog: Watchdog) -> None:
    """End what was started for a function that has gone. Takes no lock: a collector may call it."""
    watchdog.forget(exchanges.tell_idle)
    exchanges.close()


def _has_ended(group: Any) -> bool:
    try:
        return dist.get_rank(group) < 0
    except (ValueError, RuntimeError):  # destroyed, or all of them were
        return True


def _rank_in(group: Any) -> int:
    """Return this process's rank in a process group, below 0 if it is no member; InvalidOption: no group."""
    try:
        return dist.get_rank(group)
    except ValueError as error:  # never made, or destroyed
        raise InvalidOption(f"group={group!r}: {error}") from None


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a process group that this process is a member of; raises InvalidOption."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidOption(
            f"rank {dist.get_rank()} is no member of the process group that it was given: call it on members"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidOption(
            f"among={group!r}: give a process group, as torch.distributed.new_group returns it"
        )
    try:  # Torch forgets a group that is destroyed. `get_rank` would tell the same in three times the time.
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        raise InvalidOption(f"among={group!r} was destroyed: give a group that is in use") from None


GROUPS = Groups()
