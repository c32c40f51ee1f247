"""One trial per call, and settled calls that vote: plans stay equal whatever each rank measures and meets."""

import contextlib
import math
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kernels_for_tests import Bench, ScriptedClock, launch, numbers, records
from operation_runs import on_ranks
from rank_programs import (
    SHORT_S,
    TIMEOUT_S,
    blocks_of,
    run_until_settled,
    set_patience,
    tune,
    tuned_step,
    wait_for,
)

from dist_autotune.logs.records import Note
from dist_autotune.ranks.ballots import Ballot
from dist_autotune.timing.samples import READ_WITHIN_RUNS
from dist_autotune.triton_api import interception
from ranks import assert_all_ok, run_ranks


def exchanges(rank):
    return [event for event in records(rank=rank) if event.event == "exchanged"]


class LateClock(ScriptedClock):
    """A clock whose device has done its work some looks later."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks
        self.looked_at = {}  # with the marks themselves: a later mark may get the id of one that is gone

    def ready(self, mark):
        _, looks = self.looked_at.get(id(mark), (mark, 0))
        self.looked_at[id(mark)] = mark, looks + 1
        return looks >= self.looks


@pytest.mark.parametrize("late", [(0, 2), (2, 0), (1, 1), (1, 9)], ids=str)
def test_a_trial_is_judged_when_the_last_rank_has_read_its_clock(late):
    def program(rank):
        bench, x = Bench(), numbers()
        bench.clock = LateClock(late[rank])
        bench.launches = bench.clock.launches
        kernel = bench.kernel({16: 3.0, 32: 1.0 + rank, 64: 2.5})
        step = tune(bench, lambda: launch(kernel, x), mode="online")
        while not step.settled:
            step()
            assert len(bench.blocks()) < 20
        return bench.blocks(), blocks_of(step), step.report.contexts[0].ms

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    blocks, winner, ms = zero
    assert (winner, ms) == ({"add64": 32}, 2.0)
    waits = min(max(late), READ_WITHIN_RUNS)
    assert len(blocks) == 3 * (1 + waits)
    assert [blocks[n * (1 + waits)] for n in range(3)] == [16, 32, 64]  # others are incumbents


def settled_step(**options):
    """Return a settled function of one kernel, its bench, and the sizes that it launches: one, so far."""
    bench, sizes = Bench(), [64]
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    step = tune(bench, lambda: [launch(kernel, numbers(n)) for n in sizes], **options)
    run_until_settled(step)
    return step, bench, sizes


def call_until_taken_up(step, calls=200):
    """Call until a session opens, with ranks never more than a call apart; return how many calls it took."""
    sessions = step.report.session
    for made in range(1, calls):
        step()
        dist.barrier()
        if step.report.session != sessions and step.settled:
            return made
    raise AssertionError(f"no session in {calls} calls")


@pytest.mark.parametrize("mode", ["online", "replay"])
def test_a_new_key_of_one_rank_is_taken_up_by_all_in_one_call(mode):
    def program(rank):
        step, bench, sizes = settled_step(mode=mode)
        if rank == 1:
            sizes.append(8)
        calls = call_until_taken_up(step)
        step()
        return calls, sorted(set(bench.blocks(n=8))), bench.blocks(n=8)[-1:]

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero[0] == one[0] >= 3
    assert (zero[1], one[1:]) == ([], ([16, 32], [32]))


def test_a_rank_that_is_late_in_a_settled_call_delays_learning_and_raises_nothing():
    def program(rank):
        bench, sizes, is_late = Bench(), [64], []
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def thunk():
            if is_late:
                time.sleep(is_late.pop())
            return [launch(kernel, numbers(n)) for n in sizes]

        step = tune(bench, thunk)
        step()
        set_patience(step, SHORT_S)
        step()  # its calls wait no longer than that for words
        set_patience(step, TIMEOUT_S)
        if rank == 0:
            is_late.append(2 * SHORT_S)
        else:
            sizes.append(8)
        began = time.monotonic()
        step()
        took_s = time.monotonic() - began
        dist.barrier()
        return took_s, call_until_taken_up(step), sorted(set(bench.blocks(n=8)))

    (zero_s, zero_calls, _), (_, one_calls, blocks) = assert_all_ok(run_ranks(program, 2))
    assert zero_s >= 2 * SHORT_S
    assert zero_calls == one_calls >= 2
    assert blocks == [16, 32]


@pytest.mark.parametrize("what", ["a new key", "retune"])
def test_a_rank_that_is_late_where_all_open_a_session_delays_it_and_raises_nothing(what):
    def program(rank):
        step, bench, sizes = settled_step()
        set_patience(step, SHORT_S)
        step()
        before, late_s = len(bench.blocks()), 2 * SHORT_S
        if rank == 1:
            step.retune() if what == "retune" else sizes.append(8)
        has_tuned = torch.zeros(1)
        for _ in range(40):
            step()
            has_tuned[0] = 16 in bench.blocks()[before:]
            dist.broadcast(has_tuned, src=1)
            if has_tuned:
                break
            ballot = step._calls.state.ballot
            if rank == 0 and late_s and ballot._limit < math.inf:  # it has promised to stop
                wait_for(lambda ballot=ballot: ballot._opens_at)
                if ballot._opens_at == ballot.begun + 1:
                    time.sleep(late_s)
                    late_s = 0
        notes = [event.text for event in records(rank=rank) if event.event == "note"]
        return bool(has_tuned), late_s == 0, any("go on with what is settled" in text for text in notes)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert (zero, one) == ((True, True, True), (True, False, True))


@pytest.mark.parametrize("mode", ["online", "replay"])
def test_retune_on_one_rank_is_taken_up_by_all_in_one_call(mode):
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def thunk():
            dist.barrier()  # a rank that waits for its peers' calls to end would keep them from ending
            return launch(kernel, x)

        step = tune(bench, thunk, mode=mode)
        run_until_settled(step)
        before = len(bench.blocks())
        if rank == 1:
            step.retune()
        return call_until_taken_up(step), sorted(set(bench.blocks()[before:])), blocks_of(step)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert zero[0] >= 3
    assert zero[1:] == ([16, 32], {"add64": 32})


def test_captured_calls_of_one_rank_do_not_count_where_ranks_take_up_together(monkeypatch):
    def program(rank):
        step, bench, _ = settled_step()
        step()
        before = len(bench.blocks())
        if rank == 0:
            with monkeypatch.context() as capturing:
                capturing.setattr(interception, "is_capturing", lambda: True)
                for _ in range(3):
                    step()
        captured = bench.blocks()[before:]
        dist.barrier()
        if rank == 1:
            step.retune()
        return captured, call_until_taken_up(step), sorted(set(bench.blocks()[before:]))

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == ([32] * 3, zero[1], [16, 32])
    assert one == ([], zero[1], [16, 32])


@pytest.mark.parametrize("trouble", ["a peer is late", "Ctrl-C before the peers are asked"])
def test_retune_outlasts_trouble_in_its_call(trouble, monkeypatch):
    def program(rank):
        step, bench, _ = settled_step()
        if trouble == "a peer is late":
            set_patience(step, SHORT_S)
            step.retune() if rank == 1 else time.sleep(2 * SHORT_S)
            step()
            set_patience(step, TIMEOUT_S)
        else:
            step()
            with monkeypatch.context() as interrupting, contextlib.suppress(KeyboardInterrupt):
                interrupting.setattr(Ballot, "_ask", mock.Mock(side_effect=KeyboardInterrupt))
                if rank == 1:
                    step.retune()
                    step()  # which is made again: the peer makes no call meanwhile
                    pytest.fail("it was not interrupted")
        dist.barrier()
        return call_until_taken_up(step), sorted(set(bench.blocks()))

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one == (zero[0], [16, 32])


@pytest.mark.parametrize("stopped", [0, 1], ids=["a peer", "who asks"])
def test_retune_outlasts_a_rank_that_is_stopped_between_its_promise_and_the_outcome(monkeypatch, stopped):
    def program(rank):
        step, bench = tuned_step({16: 3.0, 32: 1.0})
        run_until_settled(step)
        set_patience(step, SHORT_S)  # of the ballot that comes now, and of openings
        genuine, opens = Ballot.take, []

        def take_late(ballot, letter):
            opens.append(letter["about"] == "opens")
            if rank == stopped and opens.count(True) == 1 and opens[-1]:
                wait_for(lambda: ballot._limit == math.inf)  # the call has gone on
            genuine(ballot, letter)

        monkeypatch.setattr(Ballot, "take", take_late)
        before, has_tuned = len(bench.blocks()), torch.zeros(1)
        if rank == 1:
            step.retune()
        for _ in range(200):
            step()
            has_tuned[0] = 16 in bench.blocks()[before:] and step.settled
            dist.all_reduce(has_tuned, dist.ReduceOp.MIN)  # ranks are never more than a call apart
            if has_tuned:
                return opens.count(True)
        raise AssertionError("the retune was lost")

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one >= 2


@pytest.mark.parametrize("mode", ["online", "replay"])
def test_without_the_vote_new_keys_keep_the_config_of_the_nearest_key_and_are_logged(mode):
    def program(rank):
        step, bench, sizes = settled_step(mode=mode, watch=False)
        before = len(exchanges(rank))
        if rank == 1:
            sizes.append(8)
        for _ in range(3):
            step()
        notes = [event.text for event in records(rank=rank) if event.event == "note"]
        return step.settled, bench.blocks(n=8), len(exchanges(rank)) - before, notes

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == (True, [], 0, [])
    assert one[:3] == (True, [32, 32, 32], 0)
    (note,) = one[3]
    assert note.startswith("add[8, ")
    assert "keeps the config of the nearest tuned key" in note


def test_a_key_that_is_launched_seldom_takes_its_result_from_disk_and_waits_for_nothing():
    def evaluation(rank):
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        tune(bench, lambda: launch(kernel, numbers(96)), cache="cache")()

    def training(rank):
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        step = tune(
            bench, lambda sizes: [launch(kernel, numbers(n)) for n in sizes], mode="online", cache="cache"
        )
        for number in range(40):
            step([64, 96] if number % 10 == 9 else [64])
            dist.barrier()
        waits = [note.text for note in records(Note, rank=rank) if "waits for launches" in note.text]
        return bench.blocks(n=96)[1:], waits

    assert_all_ok(run_ranks(evaluation, 2))
    for ended in assert_all_ok(run_ranks(training, 2)):
        assert ended == ([32, 32, 32], [])


@on_ranks(2)
def test_a_sweep_over_shapes_tunes_every_shape_on_all_ranks(rank):
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0 + rank})
    step = tune(bench, lambda n: launch(kernel, numbers(n)))
    for n in (16, 24, 32, 40):
        step(n)
    assert (bench.blocks(), [config.kwargs["BLOCK"] for config in kernel.cache.values()]) == (
        [16, 32, 32] + [32, 32, 16, 32] * 3,
        [32] * 4,
    )


def test_training_is_bit_equal_to_the_same_configs_without_the_tuner():
    def train(rank, wrap, pick):
        torch.manual_seed(0)
        bench, weight, losses = Bench(), torch.randn(64), []
        kernel = bench.kernel({16: 3.0, 32: 1.0 + rank, 64: 2.0})

        def thunk():
            gradient = launch(kernel, weight) * kernel.best_config.kwargs["BLOCK"]
            dist.all_reduce(gradient)
            weight.sub_(0.001 * gradient + 0.01 * torch.randn(64))
            losses.append(weight.square().sum().item())

        step = wrap(bench, thunk, kernel)
        for n in range(8):
            pick(kernel, n)
            step()
        return losses, bench.blocks()

    def program(rank):
        tuned = train(
            rank, lambda bench, thunk, kernel: tune(bench, thunk, mode="online"), lambda kernel, n: None
        )

        def pin(kernel, n):
            chosen = next(config for config in kernel.configs if config.kwargs["BLOCK"] == tuned[1][n])
            kernel.cache[(64, "torch.float32", "torch.float32")] = chosen

        return tuned, train(rank, lambda bench, thunk, kernel: thunk, pin)

    (zero, zero_bare), (one, one_bare) = assert_all_ok(run_ranks(program, 2))
    assert zero[1] == one[1] == [16, 32, 64, *[32] * 5]
    assert zero == zero_bare
    assert one == one_bare


@on_ranks(2)
def test_one_run_and_one_exchange_a_call(rank):
    bench, x, counts = Bench(), numbers(), []
    kernel = bench.kernel({16: 1.0 + rank, 32: 1.5, 64: 9.0})
    step = tune(bench, lambda: launch(kernel, x), mode="online")
    for _ in range(6):
        assert torch.equal(step(), x + 1)
        counts.append((len(bench.blocks()), step.settled))
    counts, blocks, exchanged, runs = counts, bench.blocks(), len(exchanges(rank)), step.report.runs
    assert counts == [(1, False), (2, False), (3, True), (4, True), (5, True), (6, True)]
    assert blocks == [16, 32, 64, 32, 32, 32]
    assert (exchanged, runs) == (4, 3)  # the opening, then one for each trial
