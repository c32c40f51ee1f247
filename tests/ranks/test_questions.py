"""New keys of settled calls: all ranks tune them in one call, or none does, and nobody waits for long."""

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kernels_for_tests import Bench, Mine, launch, numbers
from operation_runs import on_ranks
from rank_programs import ending, run_until_settled, settled_step, tune, wait_for

from dist_autotune.ranks import questions
from ranks import assert_all_ok, meet, run_ranks

WAIT_S = questions.ANSWER_S + 1.0  # for an answer, on a busy machine


@pytest.fixture
def short_answers(monkeypatch):
    """Let ranks wait less for an answer: what a busy machine adds is far below WAIT_S then."""
    monkeypatch.setattr(questions, "ANSWER_S", 0.5)


@pytest.fixture
def asked(monkeypatch):
    """Return a list that grows by one with each question of this rank."""
    asked, genuine = [], questions.CallCount.ask
    monkeypatch.setattr(
        questions.CallCount, "ask", lambda *args, **begins: asked.append(1) or genuine(*args, **begins)
    )
    return asked


def timed(call):
    """Return how long a call took."""
    began = time.monotonic()
    call()
    return time.monotonic() - began


def sizes_of(untuned):
    return sorted(key[0] for _, key, _ in untuned)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mode", ["replay", "online"])
def test_keys_that_all_ranks_meet_in_one_call_are_tuned_there(world, mode):
    def program(rank):
        step, bench, sizes = settled_step(mode=mode)
        sizes.append(8 + rank)  # of local sizes
        step()
        has_opened = not step.settled
        run_until_settled(step)
        return has_opened, sorted(set(bench.blocks(n=8 + rank))), step.untuned

    for ended in assert_all_ok(run_ranks(program, world)):
        assert ended == (mode == "online", [16, 32], ())


@pytest.mark.usefixtures("short_answers")
@on_ranks(2)
def test_a_key_that_one_rank_meets_keeps_its_config_and_is_told_as_untuned(rank):
    step, bench, sizes = settled_step()
    if rank == 1:
        sizes.append(8)
    took_s = [timed(step) for _ in range(5)]
    untuned = step.untuned
    dist.barrier()  # until then both are there to answer
    assert step.settled
    assert max(took_s) < WAIT_S
    assert set(bench.blocks(n=8)) <= {32}
    if rank == 1:
        assert [(kernel, key[0]) for kernel, key, _ in untuned] == [("add", 8)]
        assert untuned[0][2].startswith(("rank 0 has not met it", "rank 0 gave no answer"))
    else:
        assert untuned == ()


def test_a_key_is_asked_about_in_three_calls_at_most_and_retune_tunes_it(asked):
    def program(rank):
        step, bench, sizes = settled_step()
        if rank == 1:
            sizes.append(8)
        for _ in range(6):
            step()
            dist.barrier()
        asks, untuned = len(asked), sizes_of(step.untuned)
        step.retune()
        step()
        return asks, untuned, step.untuned, sorted(set(bench.blocks(n=8)))

    assert assert_all_ok(run_ranks(program, 2)) == [(0, [], (), []), (3, [8], (), [16, 32])]


@pytest.mark.usefixtures("short_answers")
def test_after_one_extra_call_of_a_rank_new_keys_are_tuned_or_told_and_nobody_waits_long():
    def program(rank):
        step, bench, sizes = settled_step()
        if rank == 0:
            step()
        took_s = []
        for n in (8, 16, 24, 32):
            sizes.append(n)
            took_s += [timed(step) for _ in range(2)]
            dist.barrier()
        tuned = {key[0] for key in ((n,) for n in (8, 16, 24, 32)) if 16 in bench.blocks(n=key[0])}
        return max(took_s), tuned, set(sizes_of(step.untuned)), step.settled

    results = run_ranks(program, 2)
    for took_s, tuned, untuned, settled in assert_all_ok(results):
        assert took_s < WAIT_S
        assert tuned | untuned == {8, 16, 24, 32}
        assert not tuned & untuned
        assert settled
    told = [line for result in results for line in result.stderr.splitlines() if "Calls since" in line]
    assert told
    assert all("rank 0: " in line and "rank 1: " in line for line in told)


def test_a_settled_call_that_raises_counts_as_a_call():
    def program(rank):
        bench, sizes, raises = Bench(), [64], []
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def thunk():
            for n in sizes:
                launch(kernel, numbers(n))
            if raises:
                raise raises.pop()

        step = tune(bench, thunk)
        run_until_settled(step)
        if rank == 1:
            raises.append(Mine())
            with pytest.raises(Mine):
                step()
        else:
            step()
        sizes.append(8)
        step()
        return sorted(set(bench.blocks(n=8))), step.untuned  # asked about another call, it would be untuned

    assert assert_all_ok(run_ranks(program, 2)) == [([16, 32], ())] * 2


def test_a_rank_that_is_inside_the_call_for_long_is_waited_for():
    def program(rank):
        bench, late_s = Bench(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def thunk(n):
            meet()
            if late_s:
                time.sleep(late_s.pop())
            return launch(kernel, numbers(n))

        step = tune(bench, thunk)
        step(64)
        if rank == 0:
            late_s.append(questions.ANSWER_S + 1.0)
        y = step(8)
        return torch.equal(y, numbers(8) + 1), 16 in bench.blocks(n=8), step.untuned

    assert assert_all_ok(run_ranks(program, 2)) == [(True, True, ())] * 2


@pytest.mark.parametrize("retuning", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("meets", [False, True], ids=["alone", "with a collective"])
def test_retune_is_taken_up_by_all_ranks_in_one_call(retuning, meets):
    def program(rank):
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def thunk():
            if meets:
                dist.barrier()
            return launch(kernel, numbers())

        step = tune(bench, thunk)
        run_until_settled(step)
        bench.forget()
        if rank in retuning:
            step.retune()
        has_tuned = torch.zeros(1)
        for calls in range(1, 10):
            step()
            has_tuned[0] = 16 in bench.blocks() and step.settled
            dist.all_reduce(has_tuned, dist.ReduceOp.MIN)
            if has_tuned:
                return calls
        raise AssertionError("the retune was lost")

    calls = assert_all_ok(run_ranks(program, 2))
    assert calls[0] == calls[1]
    assert calls[0] == 1 or len(retuning) == 1


def test_a_rank_that_is_interrupted_while_it_asks_tunes_in_its_next_call_with_its_peers():
    def interrupted(self, letter, ended):
        self.do(lambda store: letter.arrive(store, ended))
        raise KeyboardInterrupt

    def program(rank):
        step, bench, _ = settled_step()
        if rank == 0:
            step.retune()
        else:
            wait_for(lambda: step._calls.state.call_count.is_called)
            with mock.patch.object(questions.Questions, "answer", interrupted):
                assert ending(step) == "KeyboardInterrupt: "
        step()
        return 16 in bench.blocks(), step.settled

    assert assert_all_ok(run_ranks(program, 2)) == [(True, True)] * 2


@pytest.mark.usefixtures("short_answers")
def test_a_peer_that_is_gone_costs_its_waits_only(asked):
    def program(rank):
        step, _, sizes = settled_step()
        meet()
        if rank == 1:
            os._exit(0)
        sizes.append(8)
        return [timed(step) for _ in range(5)], len(asked), step.untuned, step.settled

    took_s, asks, untuned, settled = run_ranks(program, 2)[0].value
    assert sum(took_s) < 3 * WAIT_S
    assert asks == 3
    assert settled
    assert untuned[0][2].startswith("rank 1 gave no answer within")


# ---- a rank that comes to the call, or to its end, while it reads a question about it


class Moving(questions.CallCount):
    """A count whose rank begins to ask, and goes on, between two looks at it."""

    looks = 0

    def place(self, _=None):
        self.looks += 1
        self.asks = {(1, False): None, (1, True): None} if self.looks > 1 else {}
        return int(self.looks > 1)


@pytest.mark.parametrize(("begins", "place"), [(False, "ended"), (True, "begun")])
def test_a_rank_that_begins_to_ask_while_a_letter_is_read_does_not_refuse(begins, place, monkeypatch):
    monkeypatch.setattr(Moving, place, property(Moving.place, lambda self, value: None), raising=False)
    store, letter = dist.HashStore(), questions.Letter("s", 1, 0, (0, 1), begins)
    count = Moving(mock.Mock(), "s", (0, 1), 1, mock.Mock(), mock.Mock())
    answering = questions._Listener({"s": count}, set(), 1)._answered(store, letter)
    for _ in answering:
        pass
    assert not any(store.check([letter.key(part)]) for part in ("", "/left"))
