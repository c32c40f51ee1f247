"""What GemmAllReduce tells when a call is wrong, ranks differ or one dies, and that every wait ends.

Cases marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
from gemm_ar_runs import HALF, begin, call_and_compare, call_with_norm, of_all, operands
from operation_runs import INTERPRETER, TWO, device, ends, message_of, results, values

from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.gemm_ar.low_latency import exchange_rows
from dist_autotune.kernels.gemm_ar.pull import add_rows
from dist_autotune.kernels.gemm_ar.ways import COLLECTIVE, LOW_LATENCY, ONE_SHOT, TWO_SHOT, WAYS
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet

pytestmark = INTERPRETER

# ---- wrong arguments


@pytest.fixture
def alone():
    with GemmAllReduce(8, 6, HALF, backend="shm") as op:
        yield op


def ones(*shape, dtype=HALF):
    return torch.ones(shape, dtype=dtype)


FACTORS = ones(4, 3), ones(6, 3)
WRONG = {
    "dtype": ((ones(4, 3, dtype=torch.float32), ones(6, 3)), ValueError, "a is torch.float32 on cpu"),
    "too many rows": ((ones(9, 3), ones(6, 3)), ValueError, "a has 9 rows; .* takes 1 to m=8"),
    "no rows": ((ones(0, 3), ones(6, 3)), ValueError, "a has 0 rows"),
    "other n": ((ones(4, 3), ones(5, 3)), ValueError, r"weight \[5, 3\] must be .* \[n=6, K\]"),
    "no K": ((ones(4, 0), ones(6, 0)), ValueError, "the same K, at least 1"),
    "out": ((*FACTORS, ones(3, 6)), ValueError, r"out has shape \[3, 6\]; the result has \[4, 6\]"),
    "no tensor": ((1, ones(6, 3)), TypeError, "a is a int"),
    "three dimensions": ((ones(1, 4, 3), ones(6, 3)), ValueError, "two dimensions"),
    "columns apart": ((ones(3, 4).T, ones(6, 3)), ValueError, "rows of a are not contiguous"),
    "residual alone": (
        (*FACTORS, None, ones(4, 6)), ValueError, "residual is given and norm_weight is not; pass both"
    ),
    "weight of a norm alone": (
        (*FACTORS, None, None, ones(6)), ValueError, "norm_weight is given and residual is not; pass both"
    ),
    "rows of the residual": (
        (*FACTORS, None, ones(3, 6), ones(6)), ValueError, r"residual has shape \[3, 6\]; it must be \[4, 6\]"
    ),
    "type of the residual": (
        (*FACTORS, None, ones(4, 6, dtype=torch.float32), ones(6)), ValueError, "residual is torch.float32"
    ),
    "size of the norm": (
        (*FACTORS, None, ones(4, 6), ones(5)), ValueError, r"norm_weight has shape \[5\]; it must be \[6\]"
    ),
    "dimensions of the norm": (
        (*FACTORS, None, ones(4, 6), ones(1, 6)), ValueError, "norm_weight has .*; one dimension is needed"
    ),
    "gradient": (
        (ones(4, 3), ones(6, 3).requires_grad_()), RuntimeError, "GemmAllReduce has no backward, .* weight:"
    ),
    "gradient of the norm": (
        (*FACTORS, None, ones(4, 6), ones(6).requires_grad_()), RuntimeError, "required by norm_weight"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_raises_with_its_values_and_the_operation_stays_usable(alone, arguments, kind, text):
    with pytest.raises(kind, match=text):
        alone(*arguments)
    assert call_and_compare(alone, 8, 16) < 1


def test_wrong_parts_of_sums_without_a_product_are_refused(alone):
    with pytest.raises(ValueError, match=r"part has shape \[4, 5\]; it must be \[M, n=6\]"):
        alone.all_reduce(ones(4, 5))
    with pytest.raises(ValueError, match="part has 9 rows"):
        alone.all_reduce_rms_norm(ones(9, 6), ones(9, 6), ones(6))
    with pytest.raises(ValueError, match=r"part overlaps op.part .*; pass op.part\[:M\]"):
        alone.all_reduce(alone.part[2:4])
    assert torch.equal(alone.all_reduce(ones(4, 6)), ones(4, 6))


OPENED_WRONGLY = {
    "no rows": ({"m": 0}, "both must be at least 1"),
    "no columns": ({"n": 0}, "both must be at least 1"),
    "too many rows": ({"m": 2**24}, "m=16777216 rows; it must be 16777215 or less"),
    "no such way": (
        {"way": "three-shot"},
        "way is 'three-shot'; it is one of one-shot, two-shot, collective, low-latency",
    ),
}


@pytest.mark.parametrize(("changed", "text"), OPENED_WRONGLY.values(), ids=OPENED_WRONGLY)
def test_an_operation_that_cannot_be_is_refused(changed, text):
    given = {"m": 4, "n": 4, "dtype": HALF, "backend": "shm"} | changed
    with pytest.raises(ValueError, match=text):
        GemmAllReduce(**given)


def test_more_columns_than_a_norm_takes_are_refused():
    op = GemmAllReduce(1, 32769, HALF, backend="shm")
    with pytest.raises(ValueError, match="n=32769: the norm takes up to 32768 columns"), op:
        op(ones(1, 1), ones(32769, 1), None, ones(1, 32769), ones(32769))


def test_a_closed_operation_says_so():
    op = GemmAllReduce(4, 4, HALF, backend="shm")
    op.close()
    op.close()
    with pytest.raises(RuntimeError, match="this GemmAllReduce is closed; open another on all ranks"):
        op(*operands(4, 4, 4, HALF))


# ---- what goes wrong between ranks


def other_way(rank):
    return message_of(lambda: GemmAllReduce(4, 4, HALF, way=WAYS[rank]))


def test_ranks_that_fix_different_ways_are_refused():
    for text in values(other_way, 2):
        assert text.startswith(
            "ValueError: the ranks pass different values of way: rank 0: 'one-shot'; rank 1"
        )


def different_rows(rank, way):
    op = GemmAllReduce(8, 16, HALF, way=way)
    rows = 4 if rank == 0 else 8
    out = torch.zeros(rows, 16, dtype=HALF, device=device())
    told = ends(op, lambda: op(*operands(rows, 16, 16, HALF), out))
    return told, bool(out.isnan().all())


@pytest.mark.parametrize("way", [None, ONE_SHOT, TWO_SHOT, LOW_LATENCY])
@pytest.mark.parametrize("world", TWO)
def test_different_rows_raise_on_every_rank(world, way):
    for rank, ((message, again, at_close), is_nan) in enumerate(values(different_rows, world, way)):
        peer, rows = (1, 8) if rank == 0 else (0, 4)
        assert message.startswith(
            f"ValueError: GemmAllReduce, rank {rank}: rank {peer} has {rows} rows, not as many as this rank. "
            "Every rank must pass as many rows. Close it on all ranks"
        )
        assert again
        assert at_close
        assert is_nan or way == TWO_SHOT  # whose first launch has raised on the CPU


def dead_peer(rank, last, way):
    op = GemmAllReduce(8, 16, HALF, way=way)
    begin(rank)
    call_with_norm(op, 8, 16)
    meet()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    op._patience_ticks = as_patience(1.0)
    if way == LOW_LATENCY:
        op._ways._ballots.agree = lambda key, way, terms: way  # the peer dies behind its ballot
    out = torch.zeros(8, 16, dtype=HALF, device=device())
    more = of_all(8, 16, HALF, 0)
    told = ends(op, lambda: op(*operands(8, 16, 16, HALF), out, *more))
    return told, bool(out.isnan().all())


@pytest.mark.parametrize("way", [ONE_SHOT, TWO_SHOT, LOW_LATENCY])
@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_a_dead_peer_is_named_the_wait_ends_and_no_row_passes_for_a_sum(world, way):
    *survivors, dead = results(dead_peer, world, world - 1, way)
    assert_killed(dead)
    for rank, ((message, again, at_close), is_nan) in enumerate(assert_all_ok(survivors)):
        assert message.startswith(f"PeerTimeout: GemmAllReduce, rank {rank}: ")
        verb = "send" if way == LOW_LATENCY else "offer"
        assert f"rank {world - 1}, or one that it waits for, did not {verb} its rows in time" in message
        assert again
        assert at_close
        assert is_nan


def absent_host(rank):
    """Have rank 1 stay away from a call that rank 0 would make by a collective."""
    op = GemmAllReduce(8, 16, HALF, way=COLLECTIVE, timeout_s=1.5)
    text = message_of(lambda: call_and_compare(op, 8, 16)) if rank == 0 else ""
    meet()
    op.abandon()
    return text


def test_a_host_that_does_not_come_is_named_before_a_collective():
    text, _ = values(absent_host, 2)
    assert text.startswith(
        "PeerTimeout: GemmAllReduce, rank 0: rank 1 did not come to eager call 1 within 1.5 s"
    )


def failing_launch(rank):
    """Break rank 1's launch: its peer waits for rows."""
    op = GemmAllReduce(8, 16, HALF)
    op._patience_ticks = as_patience(1.0)
    if rank == 1:
        add_rows.configs = exchange_rows.configs = []
    first = message_of(lambda: op(*operands(8, 16, 16, HALF)))
    return first, message_of(op.close)


def test_a_launch_that_fails_breaks_the_operation_and_nobody_hangs():
    peer, failed = values(failing_launch, 2)
    assert "call 1 was not carried out" in failed[1]
    assert failed[1].startswith("RuntimeError: GemmAllReduce, rank 1: ")
    assert peer[0].startswith("PeerTimeout: GemmAllReduce, rank 0: rank 1, or one that it waits for")
    assert peer[1] == peer[0]
