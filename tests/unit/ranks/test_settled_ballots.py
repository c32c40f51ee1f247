"""The vote that nobody waits for, as a model: ranks and letters take steps in any order."""

from __future__ import annotations

import math
import random
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from rank_programs import SOON_S, wait_for

from dist_autotune.ranks.ballots import STOPS_AFTER, Ballot, BallotBox

CALLS = 12


class Rank:
    """One rank: it makes its calls, waits for words, and opens a session where its ballot says so."""

    def __init__(self, rank: int, world: World) -> None:
        self.rank, self.world = rank, world
        self.new_in, self.raises_in, self.retunes_in = (
            each[rank] if each else set() for each in (world.new_in, world.raises_in, world.retunes_in)
        )
        self.ballot = Ballot("session", self.post, timeout_s=0)
        self.ballot._answer = lambda call, timeout_s: self.ballot._answers.get(call)  # the model waits
        self.sent: deque[dict[str, Any]] = deque()
        self.read = 0
        self.state = "between calls"
        self.opened: list[tuple[str, int]] = []
        self.waited_in: list[int] = []

    def post(self, op: str, ballot: str, call: int, *, waits: bool) -> bool:
        self.sent.append({"op": op, "rank": self.rank, "ballot": ballot, "call": call, "waits": waits})
        return True

    @property
    def can_go_on(self) -> bool:
        ballot = self.ballot
        if self.opened or (ballot.begun >= CALLS and self.state == "between calls"):
            return False
        if self.state == "stopped":
            return ballot._opens_at is not None
        return not self.is_waiting or ballot.begun in ballot._answers

    @property
    def is_waiting(self) -> bool:
        return self.state in ("waiting", "waiting to begin")

    def go_on(self) -> None:
        ballot = self.ballot
        asks, posted = ballot.begun + (self.state == "between calls") in self.retunes_in, len(self.sent)
        if self.state == "between calls" and ballot.begun + 1 >= ballot._limit:
            if asks:
                ballot._posted_in = ballot.begun + 1
            ballot.begun += 1  # as `begin` does before it waits for the outcome
            self.state = "stopped"
        elif self.state == "between calls":
            self.state = "in a call"
            if ballot.begin(asks=asks):
                assert self.world.interrupts  # it was told before it made the call again
                self.opened.append(("at once", ballot.begun))
            elif len(self.sent) > posted:
                self._wait_in_the_model()
                self.state = "waiting to begin"
        elif self.state == "stopped":
            self.state = "in a call"
            if ballot._opens(ballot.begun):
                self.opened.append(("together", ballot.begun))
            elif asks and not ballot._ask("begins", ballot.begun):
                self._wait_in_the_model()
                self.state = "waiting to begin"
        elif self.state == "in a call":
            call = ballot.begun
            if call in self.new_in:
                ballot.end(has_new_key=True, waits=call not in self.raises_in)
            else:
                ballot.end(has_new_key=False)
            is_waiting = call in self.new_in and call not in self.raises_in
            self.state = "waiting" if is_waiting else "between calls"
            if is_waiting:
                self._wait_in_the_model()
                self.waited_in.append(call)
        else:
            if ballot._answers[ballot.begun]:
                self.opened.append(("at once", ballot.begun))
            self.state = "between calls" if self.state == "waiting" else "in a call"

    @property
    def has_a_word(self) -> bool:
        """Return whether `tell` would say something now."""
        letter = self.ballot._asked
        return letter is not None and self.ballot._has_reached(letter)

    def _wait_in_the_model(self) -> None:
        """Take back what a rank says that does not wait for an answer: it says that when it gives up."""
        if self.sent[-1]["op"] == "finished":
            self.sent.pop()
        ballot = self.ballot
        if ballot.begun not in ballot._answers:  # `_ask` has left its word to the thread
            ballot._posted_in = ballot.begun

    def give_up(self) -> None:
        """Go on without the words of the peers: `timeout_s` is over."""
        call = self.ballot.begun
        self.post("finished", "session", call, waits=False)

    def interrupt(self) -> None:
        """End the wait before a call by a Ctrl-C, as `begin` does: the call is made again."""
        if self.state == "waiting to begin":
            self.ballot._leave_to_thread(self.ballot.begun)
        self.ballot.begun -= 1
        self.state = "between calls"


@dataclass
class World:
    """The hub, and ranks whose steps and messages come in an order that a seed draws."""

    seed: int
    size: int
    new_in: list[set[int]]
    raises_in: list[set[int]] = field(default_factory=list)
    retunes_in: list[set[int]] = field(default_factory=list)
    gives_up: bool = False
    interrupts: bool = False

    def run(self) -> list[Rank]:
        draw, box = random.Random(self.seed), BallotBox(range(self.size))
        ranks = [Rank(n, self) for n in range(self.size)]
        given_up: set[tuple[int, int]] = set()
        interrupted: set[tuple[int, int]] = set()
        while True:
            steps: list[Any] = [rank.go_on for rank in ranks if rank.can_go_on]
            steps += [lambda rank=rank: box.handle(rank.sent.popleft(), None) for rank in ranks if rank.sent]
            steps += [lambda rank=rank: self.deliver(box, rank) for rank in ranks if self.has_post(box, rank)]
            steps += [rank.ballot.tell for rank in ranks if rank.has_a_word]
            if self.gives_up:
                waiting = [r for r in ranks if r.is_waiting and (r.rank, r.ballot.begun) not in given_up]
                for rank in waiting:
                    given_up.add((rank.rank, rank.ballot.begun))
                    steps.append(rank.give_up)
            if self.interrupts:
                before = [r for r in ranks if r.state in ("stopped", "waiting to begin") and not r.opened]
                for rank in before:
                    if (rank.rank, rank.ballot.begun) not in interrupted:
                        interrupted.add((rank.rank, rank.ballot.begun))
                        steps.append(rank.interrupt)
            if not steps:
                return ranks
            draw.choice(steps)()

    @staticmethod
    def has_post(box: BallotBox, rank: Rank) -> bool:
        return box._sent[rank.rank] > rank.read

    @staticmethod
    def deliver(box: BallotBox, rank: Rank) -> None:
        answers: list[dict[str, Any]] = []
        asking = {"op": "listen", "rank": rank.rank, "ballot": "", "call": rank.read, "id": 1}
        box.handle(asking, answers.append)
        (answer,) = answers
        rank.read = answer["read"]
        for letter in answer["letters"]:
            rank.ballot.take(letter)


SEEDS = range(300)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_whatever_the_order_all_open_a_session_in_one_call_or_none_does(size):
    opened = 0
    for seed in SEEDS:
        draw = random.Random(seed)
        new_in = [{call for call in range(1, 6) if draw.random() < 0.2} for _ in range(size)]
        raises_in = [{call for call in each if draw.random() < 0.3} for each in new_in]
        ranks = World(seed, size, new_in, raises_in, gives_up=draw.random() < 0.5).run()
        assert len({tuple(rank.opened) for rank in ranks}) == 1, (seed, [rank.opened for rank in ranks])
        assert all(rank.opened or rank.ballot.ended == CALLS for rank in ranks), seed  # nobody is stuck
        is_due = ranks[0].ballot._opens_at is not None  # in a call that the model does not make any more
        assert any(new_in) == bool(ranks[0].opened or is_due), (seed, new_in)  # every new key is taken up
        opened += bool(ranks[0].opened)
    assert opened > 200


def test_a_key_that_is_new_to_all_is_tuned_in_its_call():
    for seed in range(50):
        ranks = World(seed, 3, [{4}] * 3).run()
        assert [rank.opened for rank in ranks] == [[("at once", 4)]] * 3


def test_a_key_of_one_rank_is_taken_up_by_all_two_calls_after_the_last_has_heard():
    for seed in range(50):
        ranks = World(seed, 3, [{4}, set(), set()]).run()
        # Ranks that have made all calls of the model before know the call, and do not make it.
        calls = {rank.opened[0][1] if rank.opened else rank.ballot._opens_at for rank in ranks}
        assert len(calls) == 1
        assert min(calls) >= 4 + STOPS_AFTER
        assert {how for rank in ranks for how, _ in rank.opened} <= {"together"}


@pytest.mark.parametrize("interrupts", [False, True], ids=["", "with Ctrl-C"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_whichever_ranks_are_to_tune_anew_nobody_waits_for_a_call_to_end_that_waits_for_it(size, interrupts):
    opened = 0
    for seed in SEEDS:
        draw = random.Random(seed)
        new_in, retunes_in = (
            [{call for call in range(1, 6) if draw.random() < 0.2} for _ in range(size)] for _ in range(2)
        )
        ranks = World(seed, size, new_in, retunes_in=retunes_in, interrupts=interrupts).run()
        assert len({tuple(call for _, call in rank.opened) for rank in ranks}) == 1, seed
        assert all(rank.opened or rank.ballot.ended == CALLS for rank in ranks), seed
        opened += bool(ranks[0].opened)
    assert opened > 200


def test_calls_without_new_keys_send_nothing():
    ranks = World(0, 4, [set()] * 4).run()
    assert [rank.read for rank in ranks] == [0] * 4
    assert all(rank.ballot.ended == CALLS for rank in ranks)


def test_a_rank_that_does_not_hear_the_outcome_in_time_goes_on():
    ballot = Ballot("b", lambda *word, waits: True, timeout_s=0.01)
    ballot.begin(), ballot.end(has_new_key=False)
    ballot.take({"about": "stop", "call": 1})
    ballot.tell()
    assert [ballot.begin() for _ in range(4)] == [False] * 4
    ballot.take({"about": "opens", "call": 3})  # too late: the call has been made
    assert [ballot.begin() for _ in range(3)] == [False] * 3


@pytest.mark.parametrize("outcome", ["none in time", "too late"])
def test_a_rank_that_has_gone_on_without_an_opening_says_so_until_it_asks_again(outcome):
    ballot = Ballot("b", lambda *word, waits: True, timeout_s=0)
    ballot.begin(asks=True), ballot.end(has_new_key=False)
    ballot.take({"about": "stop", "call": 1})
    ballot.tell()
    ballot.begin()
    assert not ballot.has_missed_opening
    if outcome == "too late":
        ballot._limit = math.inf
        ballot.take({"about": "opens", "call": 2})
    else:
        ballot.begin()
    assert ballot.has_missed_opening
    ballot.begin(asks=True)
    assert not ballot.has_missed_opening


@pytest.mark.parametrize("failures", [{1: 2}, {1: 2, 2: 4}, {2: 4, 1: 2}], ids=["one", "by call", "by turns"])
def test_failures_are_told_in_each_call_that_may_wait_for_a_peer_however_early_they_are_heard(failures):
    ballot = Ballot("session", lambda *word, **waits: True, timeout_s=0)

    def told_in_the_next_call():
        ballot.begin()
        told = ballot.peer_failure(), ballot.peer_failure()
        ballot.end(has_new_key=False)
        return [reason for _, reason in filter(None, told)]

    for rank, call in failures.items():
        ballot.take({"ballot": "session", "about": "raised", "call": call, "rank": rank, "error": "Boom"})
    assert ballot.peer_failure() is None  # it is in no call
    first, second = ["rank 1 has failed (Boom)"], ["rank 2 has failed (Boom)"] * (2 in failures)
    assert [told_in_the_next_call() for _ in range(5)] == [first, first, second, second, []]


class Line:
    """The way to the hub, which is broken for a while, or interrupted by a Ctrl-C."""

    def __init__(self, *troubles):
        self.troubles, self.sent = list(troubles), []

    def __call__(self, op, ballot, call, **word):
        trouble = self.troubles.pop(0) if self.troubles else None
        if isinstance(trouble, BaseException):
            raise trouble
        if trouble is None:
            self.sent.append((op, call))
        return trouble is None


@pytest.mark.parametrize("letter_is_first", [True, False], ids=["asked before", "asked behind"])
def test_a_word_that_could_not_be_sent_is_told_when_the_line_stands_again(letter_is_first):
    line = Line("broken", "broken")
    ballot = Ballot("session", line, timeout_s=0)
    asked = {"about": "asked", "call": 1, "is_begun_enough": False}
    ballot.begin()
    if letter_is_first:
        ballot.take(asked)
    assert not ballot.end(has_new_key=True)
    if not letter_is_first:
        ballot.take(asked)
    assert line.sent == []
    ballot.tell()  # broken again
    assert line.sent == []
    ballot.tell()
    assert line.sent == [("finished", 1)]
    assert not ballot.is_asked


def test_a_promise_that_could_not_be_sent_is_given_when_the_line_stands_again():
    line = Line("broken")
    ballot = Ballot("session", line, timeout_s=0)
    ballot.begin(), ballot.end(has_new_key=False)
    ballot.take({"about": "stop", "call": 1})
    ballot.tell()
    assert line.sent == []
    ballot.tell()
    assert line.sent == [("stops", 1 + STOPS_AFTER)]
    assert not ballot.is_asked


@pytest.mark.parametrize("asks", [True, False], ids=["before the call", "behind it"])
def test_a_rank_that_is_interrupted_while_it_waits_for_words_is_in_no_call_and_waits_no_more(asks):
    line = Line()
    ballot = Ballot("session", line, timeout_s=60)
    ballot._changed.wait_for = mock.Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        assert ballot.begin(asks=asks) or ballot.end(has_new_key=True)
    assert not ballot.is_in(1)
    assert ballot.begun == (0 if asks else 1)  # as the peers count it
    ballot.tell()
    assert line.sent == [("begins" if asks else "met", 1), ("finished", 1)]


@pytest.mark.parametrize("is_all", [True, False])
@pytest.mark.parametrize("is_early", [True, False], ids=["words come at once", "words come later"])
def test_a_rank_that_is_interrupted_as_words_come_joins_its_peers_in_its_next_call(is_all, is_early):
    ballot = Ballot("session", Line(), timeout_s=60)
    words = {"about": "words", "call": 1, "all": is_all}

    def interrupted(*_):
        if is_early:
            ballot.take(words)
        raise KeyboardInterrupt

    ballot.begin()
    with mock.patch.object(ballot._changed, "wait_for", interrupted), pytest.raises(KeyboardInterrupt):
        ballot.end(has_new_key=True)
    with ThreadPoolExecutor(1) as threads:
        opens = threads.submit(ballot.begin)
        if not is_early:
            wait_for(lambda: ballot._changed._waiters)
            ballot.take(words)
        assert opens.result(SOON_S) is is_all
    assert ballot.begun == 2


def test_a_call_that_is_interrupted_before_it_begins_is_made_again_under_its_number():
    ballot = Ballot("session", Line(), timeout_s=60)
    ballot.take({"about": "stop", "call": 0})
    ballot.tell()
    ballot.begin(), ballot.end(has_new_key=False)
    interrupted = mock.patch.object(ballot._changed, "wait_for", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        ballot.begin()
    ballot.take({"about": "opens", "call": 2})
    assert ballot.begin()


def test_a_rank_that_says_twice_that_it_waits_is_not_told_that_nobody_does():
    box, letters = BallotBox(range(2)), []
    word = {"op": "begins", "ballot": "session", "call": 1, "waits": True}
    for rank in (0, 0, 1):  # the first connection of rank 0 has broken, or a Ctrl-C ended its wait
        box.handle({**word, "rank": rank}, None)
    box.handle({"op": "listen", "rank": 0, "ballot": "", "call": 0, "id": 1}, letters.append)
    assert [each["all"] for each in letters[0]["letters"] if each["about"] == "words"] == [True]


def test_a_retune_that_the_hub_could_not_be_told_of_is_asked_for_again():
    line = Line("broken", "broken")
    ballot = Ballot("session", line, timeout_s=0)
    assert not ballot.begin(asks=True)
    ballot.tell()  # broken again
    assert not ballot.has_missed_opening
    ballot.tell()
    assert ballot.has_missed_opening
    ballot.begin(asks=True)
    assert line.sent == [("finished", 1), ("begins", 2), ("finished", 2)]
    assert not ballot.has_missed_opening


def test_calls_on_two_threads_that_wait_for_the_outcome_are_both_told_it():
    ballot = Ballot("session", Line(), timeout_s=60)
    ballot.take({"about": "stop", "call": 0})
    ballot.tell()
    ballot.begin()
    with ThreadPoolExecutor(2) as threads:
        opens = [threads.submit(ballot.begin)]
        wait_for(lambda: ballot.begun == 2)
        opens.append(threads.submit(ballot.begin))
        wait_for(lambda: ballot.begun == 3 and len(ballot._changed._waiters) == 2)
        ballot.take({"about": "opens", "call": 2})
        assert sorted(each.result(SOON_S) for each in opens) == [False, True]
