"""One trial per call: plans stay equal whatever each rank measures and meets."""

import pytest
import torch
import torch.distributed as dist
from kernels_for_tests import Bench, ScriptedClock, launch, numbers, records
from operation_runs import on_ranks
from rank_programs import Boom, blocks_of, ending, settled_step, tune, tuned_step

from dist_autotune.logs.records import Note
from dist_autotune.timing.samples import READ_WITHIN_RUNS
from dist_autotune.tuner import function_state, rank_run, session
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


@pytest.mark.parametrize("mode", ["online", "replay"])
def test_without_watch_new_keys_keep_the_config_of_the_nearest_key_and_are_told_as_untuned(mode):
    def program(rank):
        step, bench, sizes = settled_step(mode=mode, watch=False)
        before = len(exchanges(rank))
        if rank == 1:
            sizes.append(8)
        for _ in range(3):
            step()
        notes = [event.text for event in records(rank=rank) if event.event == "note"]
        untuned = [(kernel, key[0], reason) for kernel, key, reason in step.untuned]
        return step.settled, bench.blocks(n=8), len(exchanges(rank)) - before, untuned, notes

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == (True, [], 0, [], [])
    assert one[:4] == (True, [32, 32, 32], 0, [("add", 8, "watch=False")])
    (note,) = one[4]
    assert note.startswith("add[8, ")
    assert "keeps its config: watch=False" in note


def test_a_key_that_is_launched_seldom_takes_its_result_from_disk_and_waits_for_nothing():
    def evaluation(rank):
        tuned_step({16: 3.0, 32: 1.0}, cache="cache")[0](96)

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


class PretendedTime:
    """Time that passes in steps alone."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s

    perf_counter = monotonic


def test_training_costs_no_more_than_the_overhead_while_it_is_tuned_and_is_bit_equal(monkeypatch):
    ms = {16: 24.0, **{16 + 16 * n: 5.0 + (37 * n) % 30 for n in range(1, 16)}}

    def train(rank, wrap, steps):
        time, bench, weight, losses, ended_s = PretendedTime(), Bench(), torch.ones(64), [], [100.0]
        for module in (function_state, rank_run, session):
            monkeypatch.setattr(module, "time", time)
        kernel = bench.kernel(ms)

        def thunk(n):
            gradient = launch(kernel, weight) * (1 + rank)
            time.now_s += 0.02 + 1e-3 * ms[kernel.best_config.kwargs["BLOCK"]]
            dist.all_reduce(gradient)
            weight.sub_(1e-3 * gradient)
            losses.append(weight.square().sum().item())
            ended_s.append(time.now_s)

        step = wrap(bench, thunk, kernel)
        while len(losses) < steps(step, len(losses)):
            step(len(losses))
        return losses, bench.blocks(), ended_s

    def program(rank):
        settled_at = []

        def steps(step, made):
            if step.settled and not settled_at:
                settled_at.append(made)
            return settled_at[0] + 1 if settled_at else made + 1

        options = {"mode": "online", "overhead": 0.15, "n_repeat": None, "n_warmup": None}
        losses, blocks, ended_s = train(
            rank, lambda bench, thunk, kernel: tune(bench, thunk, **options), steps
        )

        def pinned(bench, thunk, kernel):
            def step(n):
                config = next(each for each in kernel.configs if each.kwargs["BLOCK"] == blocks[n])
                kernel.cache[(64, "torch.float32", "torch.float32")] = config
                thunk(n)

            return step

        bare, _, _ = train(rank, pinned, lambda step, made: len(losses))
        (made,) = settled_at
        mean_s, settled_s = (ended_s[made] - ended_s[0]) / made, ended_s[-1] - ended_s[-2]
        return losses == bare, blocks, mean_s / settled_s

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    is_equal, blocks, cost = zero
    assert (is_equal, blocks[-1]) == (True, min(ms, key=ms.__getitem__))
    assert cost <= 1.15
    assert len(blocks) < 400


@on_ranks(2)
def test_a_rank_that_raises_in_a_run_without_an_exchange_goes_on_with_its_peers(rank):
    bench, x, apart = Bench(), numbers(), []
    kernel = bench.kernel({16: 3.0, 32: 1.0 + rank, 64: 2.0})

    def thunk():
        launch(kernel, x)
        if step._calls._session._run.apart and not apart:
            apart.append(1)
            if rank == 1:
                raise ArithmeticError

    step = tune(bench, thunk, mode="online", overhead=0.15)
    another, ended = tune(bench, lambda: launch(kernel, numbers(8))), []
    while not step.settled:
        try:
            step()
        except Exception as error:
            ended.append(type(error).__name__)
        if apart and not another.settled:
            another()  # its exchanges are no matter of what has failed
        assert len(bench.blocks()) < 5000
    assert ended == (["ArithmeticError"] if rank else ["PeerFailed"])
    assert apart
    assert blocks_of(step) == {"add64": 32}


@pytest.mark.parametrize("has_raised", [False, True])
@on_ranks(2)
def test_a_retune_of_one_rank_amid_a_session_is_taken_up_by_all_behind_their_next_trial(rank, has_raised):
    bench, x, opened = Bench(), numbers(), []
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

    def thunk():
        launch(kernel, x)
        dist.all_reduce(torch.ones(1))  # a rank that asked its peers before its step would wait for them
        if rank == 1 and has_raised and len(opened) == 29:
            raise Boom

    step = tune(bench, thunk, mode="online", overhead=0.02, timeout_s=20)
    for number in range(60):
        if rank == 1 and number == 30:
            assert not step.settled
            step.retune()
        assert ending(step).startswith(("returned", "Boom", "PeerFailed: rank 1 failed"))
        opened.append(sum(event.event == "session_opened" for event in records(rank=rank)))
    assert (opened[29], opened[-1]) == (1, 2)
    assert bench.blocks()[opened.index(2)] == 16  # tuned anew, from the first config


@on_ranks(2)
def test_a_key_that_only_a_step_without_an_exchange_launches_is_a_part_of_the_session(rank):
    bench, sizes, met = Bench(), [64], []
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    step = tune(bench, lambda: [launch(kernel, numbers(n)) for n in sizes], mode="online", overhead=0.02)
    while not step.settled:
        session = step._calls and step._calls._session
        is_apart = not met and session is not None and session._run.apart > 0
        sizes[1:], met[:] = [8] * is_apart, met or [8] * is_apart
        step()
    found = {context.key[0]: context.status for context in step.report.contexts}
    assert found == {64: "tuned", 8: "starved"}
    assert step.untuned == ()
    sizes[1:] = [8]
    for _ in range(200):
        step()
    assert bench.blocks(n=8)[-1] == 32  # its next launches ask for a session
