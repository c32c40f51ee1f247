"""What ranks share and what not: grids of groups, groups inside a call, the user's communicators."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from kernels_for_tests import Bench, double, launch, numbers, out_of_resources, records
from operation_runs import on_ranks
from rank_programs import (
    SHORT_S,
    TIMEOUT_S,
    blocks_of,
    failing_step,
    grid,
    run_until_settled,
    set_patience,
    tune,
    tuned_step,
)

from dist_autotune import AgreementTimeout, TuningError
from ranks import assert_all_ok, assert_killed, meet, run_ranks

MODES = pytest.mark.parametrize("mode", ["replay", "online"])


# ---- tensor-parallel rows, data-parallel columns


@MODES
def test_a_step_of_rows_and_columns_tunes_each_kernel_on_its_own_group(mode):
    # Rank r takes 1 + r ms with config 16; 32 takes 2.5 ms everywhere. The slowest rank of the group decides.
    def program(rank):
        row, column = grid(rank)
        forward, _ = tuned_step({16: 1.0 + rank, 32: 2.5}, group=row, mode=mode)
        optimizer, _ = tuned_step({16: 1.0 + rank, 32: 2.5}, double, group=column, mode=mode)
        for _ in range(5):  # a training loop: both are under way at once in online mode
            assert torch.equal(forward(), numbers() + 1)
            assert torch.equal(optimizer(), numbers() * 2)
        assert forward.settled
        assert optimizer.settled
        assert forward.report.world_size == optimizer.report.world_size == 2
        return *blocks_of(forward).values(), *blocks_of(optimizer).values()

    assert assert_all_ok(run_ranks(program, 4)) == [(16, 32), (16, 32), (32, 32), (32, 32)]


def test_a_rank_that_dies_is_named_in_its_row_and_in_its_column_and_missed_by_nobody_else():
    def program(rank):
        row, column = grid(rank)
        meet()  # all groups are connected
        # Impatient with rank 1 only, once it is gone: rank 0 comes to its column late.
        fails = {0: lambda: set_patience(forward, SHORT_S), 1: lambda: os.kill(os.getpid(), signal.SIGKILL)}
        forward, _, _ = failing_step(rank, fails=fails, at_run=1, group=row)
        of_column = SHORT_S if rank % 2 else TIMEOUT_S
        optimizer, _ = tuned_step({16: 3.0, 32: 1.0}, double, group=column, timeout_s=of_column)
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


@on_ranks(4)
def test_a_function_inside_a_call_agrees_on_the_group_of_the_call_or_is_refused(rank):
    row, column = grid(rank)
    inner, bench = tuned_step({16: 1.0 + rank, 32: 2.5}, group=row)
    outer = tune(bench, inner, name="outer")
    outer()
    exchanges = [record.run for record in records(rank=rank) if record.event == "exchanged"]
    # All ranks decide, not the rows; an exchange at the opening, and one after each run.
    assert (inner.report, list(blocks_of(outer).values()), exchanges) == (None, [32], [-1, 0, 1, 2])
    across = tune(bench, inner, group=column, name="across")
    with pytest.raises(TuningError, match=r"group=ranks \[.*\] was called inside across with group=ranks \["):
        across()


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
