"""Tensors that kernels change in place, on several ranks: each rank's call ends as one run of it does."""

import pytest
import torch
from kernels_for_tests import Bench, accumulate, launch, numbers
from rank_programs import blocks_of, tune

from ranks import assert_all_ok, run_ranks

MS = {16: 3.0, 32: 1.0, 64: 2.0}


def in_place(bench: Bench):
    return bench.kernel(MS, accumulate, restore_value=["y_ptr"])


@pytest.mark.parametrize("objective", ["kernel", "thunk"])
def test_each_rank_s_tensor_is_changed_once(objective):
    def program(rank):
        bench, y = Bench(), torch.full((64,), float(rank))
        kernel = in_place(bench)
        step = tune(bench, lambda: launch(kernel, numbers(), y), objective=objective)
        step()
        assert torch.equal(y, rank + numbers())
        step()
        assert torch.equal(y, rank + 2 * numbers())
        return blocks_of(step), step.report.runs

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert zero[0] == {"accumulate64": 32}


def test_undeclared_work_in_place_on_one_rank_ends_the_call_with_its_first_run_on_all():
    def program(rank):
        bench, y = Bench(), torch.zeros(64)
        kernel = bench.kernel(MS, accumulate)

        def thunk():
            if rank == 0:
                y.zero_()
            launch(kernel, numbers(), y)

        step = tune(bench, thunk, n_warmup=None, n_repeat=None)
        with pytest.warns(UserWarning, match="changes argument y_ptr of accumulate, of shape"):
            step()
        assert torch.equal(y, numbers())
        assert step.settled
        step()
        return bench.blocks(), [reason for _, _, reason in step.untuned]

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert (zero[0], len(zero[1])) == ([16, 16, 16], 1)
