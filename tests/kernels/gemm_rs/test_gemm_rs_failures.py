"""What GemmReduceScatter tells when a call is wrong, ranks differ or one dies, and that every wait ends.

Cases marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from gemm_rs_runs import HALF, call_and_compare, operands
from operation_runs import INTERPRETER, TWO, ends, message_of, results, values

from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import gemm_reduce_scatter
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet

pytestmark = INTERPRETER

# ---- wrong arguments


@pytest.fixture
def alone():
    with GemmReduceScatter(8, 6, HALF, backend="shm") as op:
        yield op


WRONG = {
    "dtype": (lambda: operands(4, 6, 3, torch.float32), ValueError, "a is torch.float32 on cpu"),
    "too many rows": (lambda: operands(9, 6, 3, HALF), ValueError, "a has 9 rows; .* takes 1 to m=8"),
    "no rows": (lambda: operands(0, 6, 3, HALF), ValueError, "a has 0 rows"),
    "other n": (lambda: operands(4, 5, 3, HALF), ValueError, r"weight \[5, 3\] must be .* \[n=6, K\]"),
    "no K": (lambda: operands(4, 6, 0, HALF), ValueError, "the same K, at least 1"),
    "out": (
        lambda: (*operands(4, 6, 3, HALF), torch.ones(3, 6, dtype=HALF)), ValueError, r"out has .* \[3, 6\]"
    ),
    "no tensor": (lambda: (1, torch.ones(6, 3, dtype=HALF)), TypeError, "a is a int"),
    "three dimensions": (
        lambda: (torch.ones(1, 4, 3, dtype=HALF), torch.ones(6, 3, dtype=HALF)), ValueError, "two dimensions"
    ),
    "columns apart": (
        lambda: (torch.ones(3, 4, dtype=HALF).T, torch.ones(6, 3, dtype=HALF)), ValueError, "not contiguous"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_raises_with_its_values_and_the_operation_stays_usable(alone, arguments, kind, text):
    with pytest.raises(kind, match=text):
        alone(*arguments())
    assert call_and_compare(alone, 8, 16) < 1


@pytest.mark.parametrize(("m", "n"), [(0, 4), (4, 0)])
def test_an_empty_operation_is_refused(m, n):
    with pytest.raises(ValueError, match="both must be at least 1"):
        GemmReduceScatter(m, n, HALF, backend="shm")


def rows_that_do_not_divide(rank):
    with GemmReduceScatter(12, 8, HALF) as op:
        message = message_of(lambda: op(*operands(7, 8, 16, HALF)))
        return message, call_and_compare(op, 9, 16)


def test_rows_that_the_ranks_cannot_share_are_refused_on_every_rank():
    for message, error in values(rows_that_do_not_divide, 3):
        assert message == "ValueError: a has 7 rows, which 3 ranks cannot share evenly; pad it to 9"
        assert error < 1


def test_a_closed_operation_says_so():
    op = GemmReduceScatter(4, 4, HALF, backend="shm")
    op.close()
    op.close()
    with pytest.raises(RuntimeError, match="this GemmReduceScatter is closed; open another on all ranks"):
        op(*operands(4, 4, 4, HALF))


# ---- what goes wrong between ranks


def different_rows(rank):
    op = GemmReduceScatter(8, 16, HALF)
    return ends(op, lambda: op(*operands(4 if rank == 0 else 8, 16, 16, HALF)))


@pytest.mark.parametrize("world", TWO)
def test_different_rows_raise_on_every_rank(world):
    for rank, (message, again, at_close) in enumerate(values(different_rows, world)):
        peer, rows = (1, 4) if rank == 0 else (0, 2)
        assert message.startswith(
            f"ValueError: GemmReduceScatter, rank {rank}: rank {peer} has {rows} rows for each rank"
        )
        assert again
        assert at_close


def dead_peer(rank, last):
    op = GemmReduceScatter(8 * dist.get_world_size(), 16, HALF)
    call_and_compare(op, 8 * op.world_size, 16)
    meet()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    op._patience_ticks = as_patience(1.0)
    return ends(op, lambda: op(*operands(8 * op.world_size, 16, 16, HALF)))


@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_a_dead_peer_is_named_and_the_wait_ends(world):
    *survivors, dead = results(dead_peer, world, world - 1)
    assert_killed(dead)
    for rank, (message, again, at_close) in enumerate(assert_all_ok(survivors)):
        assert message.startswith(f"PeerTimeout: GemmReduceScatter, rank {rank}: ")
        assert f"rank {world - 1}, or one that it waits for, did not push its sums" in message
        assert again
        assert at_close


def failing_launch(rank):
    """Break rank 1's launch after its peers have heard of the call."""
    op = GemmReduceScatter(8, 16, HALF)
    op._patience_ticks = as_patience(1.0)
    if rank == 1:
        gemm_reduce_scatter.configs = []
    first = message_of(lambda: op(*operands(8, 16, 16, HALF)))
    return first, message_of(op.close)


def test_a_launch_that_fails_breaks_the_operation_and_nobody_hangs():
    peer, failed = values(failing_launch, 2)
    assert failed[0].startswith("IndexError")
    assert failed[1].startswith(
        "RuntimeError: GemmReduceScatter, rank 1: call 1 was not carried out: IndexError"
    )
    assert peer[0].startswith("PeerTimeout: GemmReduceScatter, rank 0: rank 1, or one that it waits for")
    assert peer[1] == peer[0]
