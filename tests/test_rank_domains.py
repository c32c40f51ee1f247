"""What ranks share and what not: grids of groups, the user's communicators, keys and clocks of some ranks."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from triton.runtime.autotuner import Autotuner

from dist_autotune import AgreementTimeout
from kernels_for_tests import Bench, double, launch, numbers, out_of_resources, records
from rank_programs import SHORT_S, TIMEOUT_S, blocks_of, ending, set_patience, statuses_of, tune
from ranks import assert_all_ok, assert_killed, meet, run_ranks

STOCK_RUN = Autotuner.run
MODES = pytest.mark.parametrize("mode", ["replay", "online"])


def run_until_settled(step, limit=40):
    """Call a tuned function until nothing is left to try; return the number of calls."""
    for calls in range(1, limit):
        step()
        if step.settled:
            return calls
    raise AssertionError(f"not settled after {limit} calls")


def grid(rank):
    """Return this rank's row, {0, 1} or {2, 3}, and its column, {0, 2} or {1, 3}, as groups."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return rows[rank // 2], columns[rank % 2]


# ---- tensor-parallel rows, data-parallel columns


@MODES
def test_a_step_of_rows_and_columns_tunes_each_kernel_on_its_own_group(mode):
    # Rank r takes 1 + r ms with config 16; 32 takes 2.5 ms everywhere. The slowest rank of the group decides.
    def program(rank):
        row, column = grid(rank)
        bench, x = Bench(), numbers()
        ms = {16: 1.0 + rank, 32: 2.5}
        linear, update = bench.kernel(ms), bench.kernel(ms, double)
        forward = tune(bench, lambda: launch(linear, x), group=row, mode=mode)
        optimizer = tune(bench, lambda: launch(update, x), group=column, mode=mode)
        for _ in range(5):  # a training loop: both are under way at once in online mode
            assert torch.equal(forward(), x + 1)
            assert torch.equal(optimizer(), x * 2)
        assert forward.settled
        assert optimizer.settled
        assert forward.report.world_size == optimizer.report.world_size == 2
        return *blocks_of(forward).values(), *blocks_of(optimizer).values()

    assert assert_all_ok(run_ranks(program, 4)) == [(16, 32), (16, 32), (32, 32), (32, 32)]


def test_a_failure_in_a_row_leaves_the_columns_and_the_other_row_alone():
    def program(rank):
        row, column = grid(rank)
        bench, x, runs = Bench(), numbers(), []
        linear, update = bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 2.0, 32: 1.0 + rank}, double)

        def forward_thunk():
            runs.append(None)
            if rank == 1 and len(runs) == 2:
                raise ValueError("boom")
            return launch(linear, x)

        forward = tune(bench, forward_thunk, group=row)
        optimizer = tune(bench, lambda: launch(update, x), group=column)
        first = ending(forward).partition(":")[0].partition("(")[0]
        optimizer()
        forward()
        return first, forward.settled, blocks_of(forward), blocks_of(optimizer)

    endings = ["PeerFailed", "ValueError", "returned tensor", "returned tensor"]
    by_column = [{"double64": 16}, {"double64": 16}] * 2  # the slower of a column takes 3 or 4 ms with 32
    for rank, result in enumerate(assert_all_ok(run_ranks(program, 4))):
        assert result == (endings[rank], True, {"add64": 32}, by_column[rank])


def test_a_rank_that_dies_is_named_in_its_row_and_in_its_column_and_missed_by_nobody_else():
    def program(rank):
        row, column = grid(rank)
        meet()  # all groups are connected
        bench, x = Bench(), numbers()
        linear, update = bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 3.0, 32: 1.0}, double)

        def forward_thunk():
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return launch(linear, x)

        # Impatient with rank 1 only: rank 0 comes to its column late, when it has given up its row.
        of_row, of_column = SHORT_S if rank < 2 else TIMEOUT_S, SHORT_S if rank % 2 else TIMEOUT_S
        forward = tune(bench, forward_thunk, group=row, timeout_s=of_row)
        optimizer = tune(bench, lambda: launch(update, x), group=column, timeout_s=of_column)
        endings = []
        for step in (forward, optimizer):
            try:
                step()
                endings.append("returned")
            except AgreementTimeout as error:
                endings.append(error.missing_ranks)
        return endings

    results = run_ranks(program, 4)
    assert_killed(results[1])
    zero, two, three = assert_all_ok([results[0], *results[2:]])
    assert zero == [(1,), "returned"]  # its row misses rank 1, its column {0, 2} is whole
    assert two == ["returned", "returned"]
    assert three == ["returned", (1,)]


def test_a_function_of_another_group_inside_a_call_agrees_on_the_group_of_the_call():
    def program(rank):
        row, column = grid(rank)
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0 + rank, 32: 2.5})
        inner = tune(bench, lambda: launch(kernel, x), group=row)
        outer = tune(bench, inner, group=column, name="outer")
        outer()
        return inner.report, list(blocks_of(outer).values()), outer.report.runs

    # The columns {0, 2} and {1, 3} decide, not the rows; and both make the same runs, so nothing waits.
    assert assert_all_ok(run_ranks(program, 4)) == [(None, [32], 3)] * 4


def test_a_function_inside_a_tuned_function_costs_no_exchange_of_its_own():
    def program(rank):
        bench, x = Bench(), numbers()
        one, other = bench.kernel({16: 1.0 + rank, 32: 1.5}), bench.kernel({16: 3.0, 32: 1.0}, double)
        inner = tune(bench, lambda: launch(one, x), name="inner")
        outer = tune(bench, lambda: (inner(), launch(other, x)), name="outer")
        outer()
        exchanges = [record.run for record in records(rank=rank) if record.event == "exchanged"]
        return outer.report.runs, exchanges, blocks_of(outer)

    expected = 3, [-1, 0, 1, 2], {"add64": 32, "double64": 32}  # the opening, and one after each run
    assert assert_all_ok(run_ranks(program, 2)) == [expected] * 2


# ---- the user's communicators


def sequence_numbers(*groups):
    return [group._get_sequence_number_for_group() for group in groups]


@MODES
@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_the_sequence_numbers_of_the_users_groups_do_not_change(mode, level, monkeypatch):
    # DETAIL wraps each group: every collective is compared between the ranks before it is made.
    def program(rank, directory):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
        dist.set_debug_level_from_env()
        store = dist.FileStore(str(directory / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0, 32: 2.0, 64: 0.5 + rank})
        if rank:
            kernel.fn.failures[32] = out_of_resources
        step = tune(bench, lambda: launch(kernel, x), mode=mode)
        mine = dist.new_group([0, 1])
        of_mine = tune(bench, lambda: launch(kernel, x), mode=mode, group=mine, share=False, name="mine")
        dist.barrier()
        before = sequence_numbers(dist.group.WORLD, mine)
        for tuned in (step, of_mine):
            run_until_settled(tuned)
            tuned()  # a settled call with its vote
        unchanged = sequence_numbers(dist.group.WORLD, mine) == before
        dist.barrier()  # in step all the same
        moved = sequence_numbers(dist.group.WORLD, mine) != before
        dist.barrier()
        return unchanged, moved, blocks_of(step) == blocks_of(of_mine)

    assert assert_all_ok(run_ranks(program, 2, Path.cwd(), init="none")) == [(True, True, True)] * 2


@MODES
def test_a_group_whose_collectives_carry_nothing_between_cpus_is_enough(mode):
    # As with NCCL alone there is no gloo group to talk through: collectives of "fake" return without a word.
    def program(rank):
        alone = torch.tensor(1.0)
        dist.all_reduce(alone)
        assert alone.item() == 1.0
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0 + rank, 32: 2.5, 64: 9.0})
        kernel.fn.failures.update({64: out_of_resources} if rank == 1 else {})
        step = tune(bench, lambda: launch(kernel, x), mode=mode)
        run_until_settled(step)
        step()
        (context,) = step.report.contexts
        return (
            dist.get_backend(),
            step.report.world_size,
            context.config.kwargs["BLOCK"],
            [*context.banned.values()],
        )

    for result in assert_all_ok(run_ranks(program, 3, backend="fake")):
        assert result[:3] == ("fake", 3, 32)
        assert result[3][0].startswith("rank 1: OutOfResources")


def test_a_failing_rank_of_such_a_group_is_told_to_the_others():
    def program(rank):
        bench, x, runs = Bench(), numbers(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def thunk():
            runs.append(None)
            if rank == 2 and len(runs) == 2:
                raise ValueError("boom")
            return launch(kernel, x)

        step = tune(bench, thunk)
        return ending(step), ending(step).partition("(")[0]

    for rank, (first, second) in enumerate(assert_all_ok(run_ranks(program, 3, backend="fake"))):
        assert first.startswith("ValueError: boom" if rank == 2 else "PeerFailed: Rank 2 failed")
        assert second == "returned tensor"


# ---- keys of some ranks


def test_what_fails_for_the_key_of_one_rank_is_not_banned_for_the_keys_of_others():
    def program(rank):
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
        run = kernel.fn.run

        def fails_for_8(x, y, n, **kwargs):
            if n == 8 and kwargs["BLOCK"] == 32:
                raise out_of_resources()
            return run(x, y, n, **kwargs)

        kernel.fn.run = fails_for_8
        sizes = (64, 8) if rank == 1 else (64,)
        step = tune(bench, lambda: [launch(kernel, numbers(n)) for n in sizes])
        assert all(torch.equal(y, numbers(n) + 1) for n, y in zip(sizes, step(), strict=True))
        banned = {context.key[0]: len(context.banned) for context in step.report.contexts}
        return step.report.runs, blocks_of(step), banned

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero == two == (4, {"add64": 32}, {64: 0})
    assert one == (4, {"add64": 32, "add8": 64}, {64: 0, 8: 1})


@MODES
def test_the_nth_context_is_agreed_among_the_ranks_that_have_so_many(mode):
    # Ranks 0 and 2 have two local sizes, rank 1 has one: the second pair agrees without it.
    def program(rank):
        sizes = [64 + rank] if rank == 1 else [64 + rank, 128 + rank]
        bench = Bench()
        slow = {64: {16: 1.0, 32: 2.0 + 3 * (rank == 1)}, 128: {16: 1.0 + 3 * (rank == 2), 32: 2.0}}
        by_size = lambda launch: slow[128 if launch.n >= 128 else 64][launch.block]  # noqa: E731
        kernel = bench.kernel({16: by_size, 32: by_size})
        step = tune(bench, lambda: [launch(kernel, numbers(n)) for n in sizes], mode=mode, agree="ordinal")
        run_until_settled(step)
        return list(blocks_of(step).values()) if rank == 1 else sorted(blocks_of(step).items())

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero == [("add128", 32), ("add64", 16)]
    assert one == [16]
    assert two == [("add130", 32), ("add66", 16)]


@pytest.mark.parametrize("agree", ["key", "ordinal"])
@MODES
def test_ranks_that_launch_nothing_keep_in_step(mode, agree):
    def program(rank):
        bench, runs = Bench(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0 + rank})

        def thunk():
            runs.append(None)
            return launch(kernel, numbers(64)) if rank == 1 else None

        step = tune(bench, thunk, mode=mode, agree=agree)
        run_until_settled(step)
        return len(runs), blocks_of(step)

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero == two == (one[0], {})
    assert one[1] == {"add64": 32}


@pytest.mark.parametrize(
    "values",
    [
        (64, 64.0, 64),
        (1, True, 1.0),
        (-0.0, False, 0),
        (np.int64(64),) * 3,
        (None,) * 3,
        (torch.float16,) * 3,
    ],
    ids=["sixty-four", "one", "zero", "numpy", "None", "dtype"],
)
def test_values_that_are_one_key_of_a_dict_are_one_key_of_all_ranks(values):
    # Not a numpy number beside a Python one: it has a dtype, which stock Triton takes into the key.
    def program(rank):
        bench = Bench()
        kernel = bench.kernel({16: 1.0 + rank, 32: 2.5})
        run = kernel.fn.run
        kernel.fn.run = lambda x, y, n, **kwargs: run(x, y, 64, **kwargs)
        step = tune(bench, lambda: kernel[(4,)](numbers(), torch.zeros(64), values[rank]))
        step()
        return step.report.runs, [context.config.kwargs["BLOCK"] for context in step.report.contexts]

    assert assert_all_ok(run_ranks(program, 3)) == [(3, [32])] * 3


# ---- failures that only some kinds of exception or signal make


def test_a_launch_that_runs_out_of_memory_on_one_rank_is_banned_on_all():
    def program(rank):
        bench, x, outputs = Bench(), numbers(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
        if rank == 1:
            kernel.fn.failures[32] = lambda: torch.OutOfMemoryError("CUDA out of memory")
        step = tune(bench, lambda: outputs.append(launch(kernel, x)))
        step()
        assert all(torch.equal(y, x + 1) for y in outputs)
        (context,) = step.report.contexts
        return step.report.runs, len(bench.blocks()), blocks_of(step), [*context.banned.values()]

    expected = 4, 4, {"add64": 64}, ["rank 1: OutOfMemoryError: CUDA out of memory"]
    assert assert_all_ok(run_ranks(program, 3)) == [expected] * 3


@pytest.mark.parametrize("handled", [False, True], ids=["default", "handler that exits"])
def test_a_rank_that_is_told_to_terminate_in_the_middle_of_a_run_releases_its_peers(handled):
    def program(rank):
        bench, x, runs = Bench(), numbers(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def leave(number, frame):
            raise SystemExit(143)

        def thunk():
            runs.append(None)
            y = launch(kernel, x)
            if rank != 1 and len(runs) == 2:
                set_patience(step, SHORT_S)
                meet(0, 2)
            if rank == 1 and len(runs) == 2:
                if handled:
                    signal.signal(signal.SIGTERM, leave)
                os.kill(os.getpid(), signal.SIGTERM)
            return y

        step = tune(bench, thunk)
        began = time.monotonic()
        try:
            end = ending(step)
        finally:
            assert Autotuner.run is STOCK_RUN
        return end, time.monotonic() - began

    results = run_ranks(program, 3)
    others = assert_all_ok([results[0], results[2]])
    if handled:
        ((end, _),) = assert_all_ok([results[1]])
        assert end == "SystemExit: 143"
    else:
        assert_killed(results[1], signal.SIGTERM)
    for end, waited_s in others:
        expected = "PeerFailed: Rank 1 failed" if handled else "AgreementTimeout: "
        assert end.startswith(expected)
        assert "ank 1" in end
        assert waited_s < SHORT_S + 10
    started = [record for record in records(rank=1) if record.event == "run_started"]
    assert [record.run for record in started] == [0, 1]  # what the rank was doing is on disk
    assert list(started[-1].plan.values()) == [1]


# ---- clocks


def test_wall_clocks_that_differ_by_hours_and_jump_have_no_effect(monkeypatch):
    real_s, reads = time.time, itertools.count()

    def program(rank):
        def jumping_s():  # an hour at every look: forwards, backwards, or to and fro
            n = next(reads)
            return real_s() + 3600 * n * [1, -1, (-1) ** n][rank]

        monkeypatch.setattr(time, "time", jumping_s)
        monkeypatch.setattr(time, "time_ns", lambda: int(jumping_s() * 1e9))
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0 + rank, 32: 1.5, 64: 3.0})

        def thunk():
            if rank == 1:
                time.sleep(0.05)  # so that its peers do wait
            launch(kernel, x)

        step = tune(bench, thunk, budget_s=3600.0, cache=f"cache-{rank}")
        step()
        step()
        (context,) = step.report.contexts
        again = tune(
            bench, lambda: launch(bench.kernel({16: 1.0, 32: 9.0, 64: 9.0}), x), cache=f"cache-{rank}"
        )
        again()
        return (
            context.timings,
            statuses_of(step),
            blocks_of(again),
            statuses_of(again),
        )

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero == one == two
    assert sorted(zero[0].values()) == [1.5, 3.0, 3.0]
    assert zero[1:] == ({"add64": "tuned"}, {"add64": 32}, {"add64": "cached"})
