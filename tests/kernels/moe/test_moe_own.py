"""What AllGatherMoE and MoEReduceScatter each have of their own: hosts that wait, bits, programs that wait.

What both promise is in `test_moe_failures.py`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from expert_runs import GATHERING, SCATTERING, same_call_twice
from operation_runs import end_of, message_of, on_ranks
from operations import HALF, rows_of_call
from triton.runtime import interpreter

from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.exchange.operation import Operation
from dist_autotune.kernels.moe_rs import MoEReduceScatter
from dist_autotune.kernels.signals import as_patience


def share_errors(op: Operation) -> None:
    """Let children write the error records of an operation; to be called when it has been opened."""
    op._errors.share_memory_()
    op._error_records = op._errors.numpy()


@contextlib.contextmanager
def forked_programs(kernel: Any, programs: int, mapped: list[torch.Tensor]) -> Iterator[None]:
    """Run each launch of `kernel`, interpreted, as that many processes; `mapped` is shared memory already."""
    builder = interpreter.interpreter_builder
    execute, set_dim, set_idx = (
        interpreter.GridExecutor.__call__,
        builder.set_grid_dim,
        builder.set_grid_idx,
    )
    shared = {tensor.untyped_storage().data_ptr() for tensor in mapped}
    state: dict[str, Any] = {"forks": False, "children": [], "is_child": False}

    def set_grid_dim(*sizes: int) -> None:
        set_dim(*((programs, 1, 1) if state["forks"] else sizes))

    def set_grid_idx(x: int, y: int, z: int) -> None:
        if state["forks"]:
            assert (x, y, z) == (0, 0, 0), "the grid is to be one program"
            for program in range(1, programs):
                pid = os.fork()
                if pid == 0:
                    state["is_child"], x = True, program
                    break
                state["children"].append(pid)
        set_idx(x, y, z)

    def run(executor: Any, *args: Any, **kwargs: Any) -> None:
        if executor.fn.__name__ != kernel.fn.__name__:
            execute(executor, *args, **kwargs)
            return
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in shared:
                tensor.share_memory_()
        state.update(forks=True, children=[])
        try:
            execute(executor, *args, **kwargs)
        except BaseException:
            if state["is_child"]:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            raise
        finally:
            if state["is_child"]:
                os._exit(0)
            state["forks"] = False
            ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in state["children"]]
        assert ends == [0] * (programs - 1)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", run),
        mock.patch.object(builder, "set_grid_dim", set_grid_dim),
        mock.patch.object(builder, "set_grid_idx", set_grid_idx),
    ):
        yield


HOST_PATIENCE_S = 3.0  # where a host waits for one that does not come, and for others that do


# ---- AllGatherMoE


@on_ranks(2)
def test_different_numbers_of_choices_raise_on_every_rank(rank):
    GATHERING.begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    message = end_of(op, lambda: GATHERING.fresh_call(op, [4, 4], told=False, topk=2 + rank))
    told = f"rank {1 - rank} has {3 - rank} choices a token, not as many"
    assert message.startswith(f"ValueError: AllGatherMoE, rank {rank}: {told}")


@on_ranks(2)
def test_tokens_on_one_rank_only_are_told_on_both(rank):
    GATHERING.begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    op._patience_ticks = as_patience(1.0)
    op._tokens._hosts._timeout_s = HOST_PATIENCE_S
    told = message_of(lambda: GATHERING.fresh_call(op, [4, 4], told=rank == 0))
    at_close, name = message_of(op.close), f"AllGatherMoE, rank {rank}"
    if rank == 0:
        assert told.startswith(f"PeerTimeout: {name}: rank 1, or one that it waits for")
        assert at_close == told
    else:
        assert told.startswith(f"PeerTimeout: {name}: rank 0 did not come to eager call 1 within 3 s")
        assert "Pass tokens= on all ranks or on none" in told
        assert at_close.startswith(f"RuntimeError: {name}: call 1 was not carried out: PeerTimeout")


# ---- MoEReduceScatter


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_programs_of_a_launch_that_wait_for_each_other_are_right(rank, world):
    tokens = [33, 20][:world]
    with SCATTERING.opened(rank, 40, 40, timeout_s=60.0) as op:
        share_errors(op)
        op._sms = 1  # a grid of one program, each launch of which becomes several
        mapped = [op._staged.local, op._flags.local, op._weights.local, op._ids.local]
        with forked_programs(SCATTERING.kernel, 3, mapped):
            return [
                SCATTERING.call_and_compare(op, rows_of_call(tokens, call), 24, 3, 2) for call in range(3)
            ]


@on_ranks(2)
def test_bits_repeat(rank):
    return same_call_twice(rank)


@on_ranks(2)
def test_rows_that_do_not_fit_the_tokens_of_all_ranks_fail_that_call_on_both(rank):
    """Let rank 1 find, when the hosts have told each other their numbers, that its y has not as many rows."""
    SCATTERING.begin(rank)
    op = MoEReduceScatter(8, 16, HALF)
    told = message_of(lambda: SCATTERING.fresh_call(op, [4, 4], told=False, rows=(None, 14)[rank]))
    wrong = "ValueError: y has 14 rows; tokens [4, 4] of the ranks with topk=2 are 16 rows"
    assert told == wrong if rank == 1 else wrong in told
    SCATTERING.fresh_call(op, [4, 4], told=False)
    op.close()
