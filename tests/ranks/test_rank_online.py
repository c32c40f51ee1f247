"""One trial per call: plans stay equal whatever each rank measures and meets."""

import pytest
import torch
import torch.distributed as dist
from kernels_for_tests import Bench, ScriptedClock, launch, numbers, records
from operation_runs import on_ranks
from rank_programs import (
    blocks_of,
    run_until_settled,
    tune,
)

from dist_autotune.logs.records import Note
from dist_autotune.timing.samples import READ_WITHIN_RUNS
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
