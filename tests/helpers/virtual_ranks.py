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

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any
from unittest import mock

from dist_autotune.errors import AgreementTimeout, NoValidConfig, PeerFailed, PeerHasNoConfig
from dist_autotune.ranks.ballots import Ballot, BallotBox
from dist_autotune.ranks.exchange import Decide
from dist_autotune.ranks.wire import HubMessage
from dist_autotune.triton_api.interception import SessionTurn

HANG_S = 120.0  # of one program: ranks that take turns never wait, so only a defect of this file lasts

Watch = Callable[[int, "list[bytes]", "list[VirtualAgreement]"], None]  # sequence, payloads by rank, ranks


class EverybodysTurn(SessionTurn):
    """Nobody waits."""

    def __init__(self) -> None:
        self.lock = mock.Mock(**{"acquire.return_value": True, "_is_owned.return_value": False})


class Gone(BaseException):
    """This rank has left: nothing of it may be heard of again."""


class VirtualAgreement:
    """One rank's `RankGroup`."""

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.ranks = tuple(range(group.world_size))
        self.sequence = 0
        self.is_gone = False
        self.leaves_at = -1  # the exchange that this rank does not come to any more
        self.is_late_at = -1  # the one that it comes to when the others have given it up
        self.waits_for: int | None = None
        self.waits_until: Callable[[], Any] | None = None  # a word of the settled calls
        self.ballots: dict[str, VirtualBallot] = {}
        self.posted: deque[HubMessage] = deque()  # words on their way to the hub
        self.letters: deque[HubMessage] = deque()  # on their way from it
        self.turn = threading.Semaphore(0)
        self.has_ended = False

    def exchange(self, payload: bytes, decide: Decide, timeout_s: float, what: str) -> bytes:
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
        raise end(self.rank, what)

    def fail(self, error: BaseException) -> None:
        if self.is_gone:
            return
        sequence, self.sequence = self.sequence, self.sequence + 1
        end = self.group.ends.setdefault(sequence, _failure(self.rank, error))
        if isinstance(end, bytes):
            self.fail(error)  # the others have gone on

    def leave(self) -> None:
        pass

    def ballot(self, name: str, timeout_s: float, last: Ballot | None) -> VirtualBallot:
        if last is not None:
            self.ballots.pop(last.name, None)
        ballot = self.ballots[name] = VirtualBallot(self, name, timeout_s)
        return ballot

    def post(self, op: str, ballot: str, call: int, **word: Any) -> bool:
        self.posted.append({"op": op, "ballot": ballot, "call": call, "rank": self.rank, **word})
        return True

    @property
    def next_letter(self) -> HubMessage | None:
        """Return the first letter of a ballot that this rank has begun."""
        return next((letter for letter in self.letters if letter["ballot"] in self.ballots), None)

    def take_letter(self) -> None:
        """Do what the rank's thread does with a letter."""
        letter = self.next_letter
        assert letter is not None
        self.letters.remove(letter)
        self.ballots[letter["ballot"]].take(letter)

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    def running(self, *about: Any) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def can_go_on(self) -> bool:
        if self.waits_until is not None:
            return bool(self.waits_until())
        return self.waits_for is None or self.waits_for in self.group.ends


class VirtualBallot(Ballot):
    """One rank's real `Ballot`: its words and letters travel when ranks take turns."""

    def __init__(self, agreement: VirtualAgreement, name: str, timeout_s: float) -> None:
        super().__init__(name, agreement.post, timeout_s)
        self._changed = VirtualCondition(agreement)


class VirtualCondition(threading.Condition):
    """A wait of one rank that ends when its condition holds, or when nobody can go on any more."""

    def __init__(self, agreement: VirtualAgreement) -> None:
        super().__init__()
        self._agreement = agreement

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        agreement = self._agreement
        agreement.waits_until = predicate
        self.release()  # other ranks' turns bring the letters
        try:
            agreement.group.pass_on(agreement)
        finally:
            self.acquire()
        return predicate()


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
        self.broken: BaseException | None = None
        self._box = BallotBox(range(world_size))
        self._read = [0] * world_size  # letters, by rank
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
        assert self._all_ended.wait(HANG_S), "the virtual ranks hang: a defect of virtual_ranks.py"
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
        alive = [a for a in self.agreements if not a.has_ended]
        if not alive:
            self._all_ended.set()
            return
        if self.broken is not None:
            alive[0].turn.release()
            return
        while self._random.random() < 0.7 and self._bring_a_word():
            pass
        while not (ready := [a for a in alive if a.can_go_on]) and self._bring_a_word():
            pass
        if not ready:
            ready = [a for a in alive if a.waits_until is not None][:1]  # its time is up
        if not ready:
            self.give_up(alive)
            if self.broken is not None:
                alive[0].turn.release()
                return
            ready = [a for a in alive if a.can_go_on]
        chosen = self.chosen(ready)
        chosen.waits_for = chosen.waits_until = None
        chosen.turn.release()

    def _bring_a_word(self) -> bool:
        """Bring one word to the hub or a letter to its rank, drawn at random; say whether one was there."""
        there = [a for a in self.agreements if not a.is_gone]
        for agreement in there:
            for ballot in agreement.ballots.values():
                ballot.tell()
        moves = [(a, a.posted) for a in there if a.posted]
        moves += [(a, a.letters) for a in there if a.next_letter is not None]
        if not moves:
            return False
        agreement, chosen = moves[self._random.randrange(len(moves))]
        if chosen is agreement.letters:
            agreement.take_letter()
        else:
            self._box.handle(chosen.popleft(), lambda reply: None)
            for rank in range(self.world_size):
                self._box.handle(
                    {"op": "listen", "rank": rank, "ballot": "", "call": self._read[rank], "id": 0},
                    functools.partial(self._deliver, rank),
                )
        return True

    def _deliver(self, rank: int, reply: HubMessage) -> None:
        self.agreements[rank].letters.extend(reply["letters"])
        self._read[rank] = reply["read"]

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
        if len(posted) == self.world_size and sequence not in self.ends:
            payloads = [posted[rank] for rank in range(self.world_size)]
            try:
                if self._watch is not None:
                    self._watch(sequence, payloads, self.agreements)
                self.ends[sequence] = decide(dict(enumerate(payloads)))
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
