"""Ranks as threads of one process that take turns, so that thousands of sessions run in minutes.

    group = VirtualGroup(4, random.Random(7))
    endings = group.run(program)                 # program(agreement) on each of the four ranks

Each rank runs the whole tuner: decorator, session, launches, protocol. Only what lies between ranks is
replaced: a `VirtualAgreement` keeps the promises of `ProcessGroup` (one end for each exchange, the same
for all; a failing rank tells its peers; whoever is missing is named) without a socket or a clock. One
rank runs at a time, and which one goes on after an exchange is drawn from the seed. A wait ends at once
when nobody can go on any more: that is the moment at which a real rank's time would be up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any
from unittest import mock

from dist_autotune.errors import AgreementTimeout, NoValidConfig, PeerFailed, PeerHasNoConfig
from dist_autotune.ranks.exchange import Decide, ExchangeWait

HANG_S = 120.0  # of one turn: ranks that take turns never wait, so only a defect of this file lasts

Watch = Callable[[int, "list[bytes]", "list[VirtualAgreement]"], None]  # sequence, payloads by rank, ranks


def everybodys_turn() -> mock.Mock:
    """Return a lock of sessions for which nobody waits."""
    return mock.Mock(**{"acquire.return_value": True, "_is_owned.return_value": False})


class Gone(BaseException):
    """This rank has left: nothing of it may be heard of again."""


class VirtualAgreement:
    """One rank's `RankGroup`."""

    asks_for_trials = False
    turns = None  # everybody has them

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.ranks = tuple(range(group.world_size))
        self.sequence = 0
        self.is_gone = False
        self.leaves_at = -1  # the exchange that this rank does not come to any more
        self.is_late_at = -1  # the one that it comes to when the others have given it up
        self.waits_for: int | None = None
        self.turn = threading.Semaphore(0)
        self.has_ended = False

    def exchange(self, payload: bytes, decide: Decide, wait: ExchangeWait) -> bytes:
        sequence, self.sequence = self.sequence, self.sequence + 1
        if sequence == self.leaves_at:
            self.is_gone = True
            raise Gone
        if sequence == self.is_late_at:
            self.waits_for = sequence
            self.group.pass_on(self)
        end = self.group.take_part(self, sequence, payload, decide)
        if isinstance(end, bytes):
            return end
        raise end(self.rank, wait.what)

    def fail(self, error: BaseException) -> None:
        if self.is_gone:
            return
        sequence, self.sequence = self.sequence, self.sequence + 1
        end = self.group.ends.setdefault(sequence, _failure(self.rank, error))
        if isinstance(end, bytes):
            self.fail(error)  # the others have gone on

    def mark_idle(self, *, between_calls: bool) -> None:
        pass

    def leave(self) -> None:
        pass

    @property
    def shared(self) -> VirtualAgreement:
        return self

    def of_function(self, function: object, name: str) -> VirtualAgreement:
        return self

    def call_count(self, session: str, watch: Any) -> None:
        """Nobody asks about settled calls."""

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    def running(self, *about: Any) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def can_go_on(self) -> bool:
        return self.waits_for is None or self.waits_for in self.group.ends


class VirtualGroup:
    """The ranks of one program, and how each of their exchanges ended."""

    def __init__(self, world_size: int, random: Random, watch: Watch | None = None) -> None:
        self.world_size = world_size
        self.ends: dict[int, bytes | Callable[[int, str], Exception]] = {}
        self.missing: dict[int, tuple[int, ...]] = {}  # exchange -> ranks that did not come to it
        self.agreements = [self.make_agreement(rank) for rank in range(world_size)]
        self._random = random
        self._watch = watch
        self._posted: dict[int, dict[int, bytes]] = {}
        self._decides: dict[int, Decide] = {}
        self.broken: BaseException | None = None
        self._turns = 0  # so far
        self._all_ended = threading.Event()

    def run(self, program: Callable[[VirtualAgreement], Any]) -> list[Any]:
        """Return what `program` returned on each rank; None of one that left. Raises what a check raised."""
        values: list[Any] = [None] * self.world_size

        def main(agreement: VirtualAgreement) -> None:
            agreement.turn.acquire()
            try:
                if self.broken is None:
                    values[agreement.rank] = program(agreement)
            except Gone:
                pass
            except BaseException as error:
                self.broken = self.broken or error
            agreement.has_ended = True
            self._hand_over()

        threads = [threading.Thread(target=main, args=(a,), daemon=True) for a in self.agreements]
        for thread in threads:
            thread.start()
        self._hand_over()
        turns = -1
        while not self._all_ended.wait(HANG_S):
            assert self._turns > turns, "the virtual ranks hang: a defect of virtual_ranks.py"
            turns = self._turns
        for thread in threads:
            thread.join()
        if self.broken is not None:
            raise self.broken
        return values

    # -- taking turns --------------------------------------------------------------------------------------

    def pass_on(self, agreement: VirtualAgreement) -> None:
        """Let another rank run; return when it is this one's turn again."""
        self._hand_over()
        agreement.turn.acquire()
        if self.broken is not None:
            agreement.is_gone = True
            raise Gone

    def _hand_over(self) -> None:
        self._turns += 1
        alive = [a for a in self.agreements if not a.has_ended]
        if not alive:
            self._all_ended.set()
            return
        if self.broken is not None:
            alive[0].turn.release()
            return
        ready = [a for a in alive if a.can_go_on]
        if not ready:
            self.give_up(alive)
            if self.broken is not None:
                alive[0].turn.release()
                return
            ready = [a for a in alive if a.can_go_on]
        chosen = self.chosen(ready)
        chosen.waits_for = None
        chosen.turn.release()

    def make_agreement(self, rank: int) -> VirtualAgreement:
        return VirtualAgreement(self, rank)

    def chosen(self, ready: Sequence[VirtualAgreement]) -> VirtualAgreement:
        """Return the rank that goes on."""
        return ready[self._random.randrange(len(ready))]

    def give_up(self, alive: Sequence[VirtualAgreement]) -> None:
        """End the earliest exchange that somebody waits for: nobody else will come to it."""
        sequence = min(a.waits_for for a in alive if a.waits_for is not None)
        posted = self._posted.get(sequence, {})
        missing = tuple(rank for rank in range(self.world_size) if rank not in posted)
        self.missing[sequence] = missing
        self.ends[sequence] = lambda rank, what: AgreementTimeout(
            f"Rank {rank} waited for ranks {list(missing)} to agree on {what}.", missing
        )

    # -- exchanges -----------------------------------------------------------------------------------------

    def take_part(self, agreement: VirtualAgreement, sequence: int, payload: bytes, decide: Decide) -> Any:
        posted = self._posted.setdefault(sequence, {})
        posted[agreement.rank] = payload
        if agreement.rank == 0:
            self._decides[sequence] = decide
        if len(posted) == self.world_size and sequence not in self.ends:
            payloads = [posted[rank] for rank in range(self.world_size)]
            try:
                if self._watch is not None:
                    self._watch(sequence, payloads, self.agreements)
                self.ends[sequence] = self._decides[sequence](dict(enumerate(payloads)))
            except BaseException as error:  # of a check: not to be taken for a rank's own
                self.broken = error
        agreement.waits_for = sequence
        self.pass_on(agreement)
        return self.ends[sequence]


def _failure(by: int, error: BaseException) -> Callable[[int, str], Exception]:
    kind = PeerHasNoConfig if isinstance(error, NoValidConfig) else PeerFailed
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return lambda rank, what: kind(
        f"rank {by} failed, so this call ends on rank {rank} too: {text}", by, text
    )
