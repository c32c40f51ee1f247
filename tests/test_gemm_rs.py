"""That GemmReduceScatter computes the right sums, whatever its ranks do meanwhile.

Under pytest the ranks are CPU processes in Triton's interpreter; tests marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.candidates import CANDIDATES
from dist_autotune.kernels.gemm_rs.kernel import gemm_reduce_scatter
from dist_autotune.kernels.signals import polls
from operation_runs import GPU_BACKENDS, INTERPRETER, TWO, device, message_of, results, run_cases, values
from ranks import assert_all_ok, assert_killed, meet

pytestmark = INTERPRETER
HALF = torch.float16


def begin(rank: int, candidate: int | None = None) -> None:
    """Seed this rank and leave its kernel one candidate: by default another one on each rank."""
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    gemm_reduce_scatter.configs = [CANDIDATES[(rank if candidate is None else candidate) % len(CANDIDATES)]]


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fresh random a [m, k] and weight [n, k]."""
    return torch.randn(m, k, device=device()).to(dtype), torch.randn(n, k, device=device()).to(dtype)


def poison(op: GemmReduceScatter) -> None:
    """Fill the buffers with NaN, so that whatever is read before it arrives shows."""
    for buffer in (op._staged.local, op._partial):
        buffer.fill_(float("nan"))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def error_ratio(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, group=None) -> float:
    """Return the relative error against float32 as a multiple of what the arithmetic explains.

    Rounding each rank's part to the type costs at most its eps, and so does rounding the sum; products of
    halves are exact in float32, and adding all K of them there costs about sqrt(K) float32 eps.
    """
    total = a.float() @ weight.float().T
    inner = torch.tensor(float(a.shape[1]), device=a.device)
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
        dist.all_reduce(inner, group=group)
    world, rank = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
    wanted = total.chunk(world)[rank]
    explained = 2 * torch.finfo(out.dtype).eps + float(inner) ** 0.5 * torch.finfo(torch.float32).eps
    ratio = float((out.float() - wanted).norm() / wanted.norm() / explained)
    return ratio if math.isfinite(ratio) else math.inf  # max() may pass a NaN over


def call_and_compare(op: GemmReduceScatter, m: int, k: int, *, group=None) -> float:
    """Return the error of one call with fresh inputs and an output full of NaN."""
    a, weight = operands(m, op._n, k, op._dtype)
    out = torch.full((m // op.world_size, op._n), float("nan"), dtype=op._dtype, device=a.device)
    assert op(a, weight, out) is out
    return error_ratio(out, a, weight, group)


def three_calls(rank, m, n, k, dtype, most):
    begin(rank)
    with GemmReduceScatter(most, n, dtype) as op:
        poison(op)
        return [call_and_compare(op, m, k) for _ in range(3)]


SHAPES = {
    "whole tiles": (64, 64, 32, 64),
    "ragged chunks, N and K": (74, 40, 24, 74),
    "one row for each rank, one column": (2, 1, 16, 2),
    "M below m, m not divisible": (10, 70, 33, 65),
    "rows that TMA cannot address": (38, 21, 7, 40),
    "K of one": (6, 16, 1, 6),
}


@pytest.mark.parametrize(("m", "n", "k", "most"), SHAPES.values(), ids=SHAPES)
def test_the_sum_is_right(m, n, k, most):
    for errors in values(three_calls, 2, m, n, k, HALF, most):
        assert max(errors) < 1


@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_are_right_too(world):
    for errors in values(three_calls, world, 19 * world, 24, 16, HALF, 20 * world):
        assert max(errors) < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_types_are_right(dtype):
    for errors in values(three_calls, 2, 74, 40, 48, dtype, 80):
        assert max(errors) < 1


def unequal_inner_parts(rank):
    begin(rank)
    with GemmReduceScatter(38, 24, HALF) as op:
        return [call_and_compare(op, 38, 16 + 24 * rank) for _ in range(2)]


def test_ranks_may_hold_unequal_parts_of_the_inner_dimension():
    for errors in values(unequal_inner_parts, 3 - 1):
        assert max(errors) < 1


def one_candidate(rank, index_of_rank):
    begin(rank, index_of_rank[rank])
    with GemmReduceScatter(140, 72, HALF) as op:
        poison(op)
        return [call_and_compare(op, m, 40) for m in (140, 68)]


@pytest.mark.parametrize("index", range(len(CANDIDATES)), ids=[str(c.kwargs) for c in CANDIDATES])
def test_every_candidate_is_right(index):
    for errors in values(one_candidate, 2, [index] * 2):
        assert max(errors) < 1


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_may_run_different_candidates_in_one_call(world):
    for errors in values(one_candidate, world, range(world)):
        assert max(errors) < 1


def many_calls(rank, delays):
    """Keep every result until the end; no rank waits for another between calls."""
    begin(rank)
    world, kept = dist.get_world_size(), []
    with GemmReduceScatter(24 * world, 33, HALF) as op:
        poison(op)
        for call in range(6):
            m, k = (24, 7, 24, 16)[call % 4] * world, (24, 16, 33)[call % 3]
            a, weight = operands(m, 33, k, HALF)
            if delays == "one" and rank == call % world:
                time.sleep(0.1)
            if delays == "random":
                time.sleep(random.random() / 20)
            kept.append((op(a, weight), a, weight))
        op.check()
    return [error_ratio(*one) for one in kept]


@pytest.mark.parametrize(("delays", "world"), [("none", 2), ("one", 3), ("random", 4)])
def test_calls_back_to_back_are_right_when_ranks_are_late(delays, world):
    for errors in values(many_calls, world, delays):
        assert max(errors) < 1


def late_pushes(rank):
    """Push late from rank 0: its peers' kernels are waiting for its sums by then."""
    begin(rank)
    with GemmReduceScatter(48, 16, torch.float32) as op:
        poison(op)
        if rank == 0:
            copy = op._memory.copy

            def copy_late(dst, src, stream):
                stream.enqueue(lambda: time.sleep(0.2))
                copy(dst, src, stream)

            op._memory.copy = copy_late
        return [call_and_compare(op, 48, 16) for _ in range(2)]


def test_the_kernel_waits_for_sums_that_come_late():
    for errors in values(late_pushes, 3):
        assert max(errors) < 1


def two_operations(rank):
    begin(rank)
    errors = []
    with GemmReduceScatter(32, 24, HALF) as first, GemmReduceScatter(80, 40, torch.bfloat16) as second:
        for _ in range(3):
            errors += [call_and_compare(first, 32, 16), call_and_compare(second, 66, 24)]
            errors.append(call_and_compare(second, 4, 8))
    return errors


def test_two_operations_do_not_disturb_each_other():
    for errors in values(two_operations, 2):
        assert max(errors) < 1


def strided_operands(rank):
    begin(rank)
    with GemmReduceScatter(32, 24, HALF) as op:
        a, weight = operands(32, 24, 64, HALF)
        a, weight = a[:, 3:35], weight[:, 5:37]  # rows that begin at odd addresses
        out = torch.full((32 // dist.get_world_size(), 50), float("nan"), dtype=HALF, device=device())
        op(a, weight, out[:, 1:25])
        untouched = out[:, 0].isnan().all() and out[:, 25:].isnan().all()
        return error_ratio(out[:, 1:25], a, weight), bool(untouched)


def test_operands_may_be_slices_and_nothing_beside_them_is_written():
    for error, untouched in values(strided_operands, 2):
        assert error < 1
        assert untouched


def in_a_subset(rank):
    begin(rank)
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    with GemmReduceScatter(18, 16, HALF, group) as op:
        return call_and_compare(op, 18, 16, group=group)


def test_the_group_may_be_a_subset():
    assert max(values(in_a_subset, 3)) < 1


def test_one_rank_needs_no_process_group():
    begin(0)
    with GemmReduceScatter(20, 24, HALF, backend="shm") as op:
        poison(op)
        assert call_and_compare(op, 20, 16) < 1


def outside_any_tuner(rank):
    begin(rank)
    gemm_reduce_scatter.configs, runs = CANDIDATES, []
    gemm_reduce_scatter.fn.add_pre_run_hook(lambda *args, **kwargs: runs.append(1))
    with GemmReduceScatter(128, 48, HALF) as op:
        poison(op)
        errors = [call_and_compare(op, m, 32) for m in (128, 96, 128)]
    return errors, len(runs)


def test_outside_a_tuned_function_a_call_is_one_launch_of_the_first_candidate():
    for errors, runs in values(outside_any_tuner, 2):
        assert max(errors) < 1
        assert runs == 3


def tuned_in_context(rank):
    from dist_autotune import contextual_autotune

    begin(rank)
    gemm_reduce_scatter.configs = CANDIDATES
    errors = []
    with GemmReduceScatter(128, 48, HALF) as op:

        @contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=None)
        def step():
            errors.append(call_and_compare(op, 128, 32))

        step()
        (context,) = step.report.contexts
    return errors, str(context.config), step.report.runs


def test_tuned_in_context_every_run_is_right_and_ranks_agree():
    (errors, config, runs), *others = values(tuned_in_context, 2)
    assert len(errors) == runs == len(CANDIDATES) + 1
    assert max(errors) < 1
    for other_errors, other_config, other_runs in others:
        assert max(other_errors) < 1
        assert (other_config, other_runs) == (config, runs)


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

    def call():
        op(*operands(4 if rank == 0 else 8, 16, 16, HALF))
        op.check()

    first = message_of(call)
    return first, message_of(call) == first, message_of(op.close) == first


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
    op._budget = polls(1.0, op.device.type)

    def call():
        op(*operands(8 * op.world_size, 16, 16, HALF))
        op.check()

    message = message_of(call)
    return message, message_of(call) == message, message_of(op.close) == message


@pytest.mark.parametrize("world", [2, 3, *TWO[1:]])
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
    op._budget = polls(1.0, op.device.type)
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


# ---- on GPUs


def replays_among_eager_calls(rank, backend):
    begin(rank)
    order, kept = random.Random(7), []
    with GemmReduceScatter(256, 200, HALF, backend=backend, timeout_s=60.0) as op:
        cases = []
        for m, k in ((256, 128), (140, 72)):
            a, weight = operands(m, 200, k, HALF)
            out = torch.empty(m // op.world_size, 200, dtype=HALF, device=device())
            op(a, weight, out)  # loads the kernel
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                op(a, weight, out)
            cases.append((a, weight, out, graph))
        poison(op)
        for _ in range(40):
            if order.randrange(4) == rank:
                torch.cuda._sleep(1_000_000)
            a, weight, out, graph = cases[order.randrange(2)]
            eager = order.random() < 0.5
            for tensor in (a, weight):
                tensor.normal_()
            out.fill_(float("nan"))
            op(a, weight, out) if eager else graph.replay()
            kept.append((out.clone(), a.clone(), weight.clone()))
        op.check()
        return [error_ratio(*one) for one in kept]


def cases_on_gpus(rank, backend):
    def shapes(m, n, k, dtype, most):
        begin(rank)
        with GemmReduceScatter(most, n, dtype, backend=backend, timeout_s=60.0) as op:
            poison(op)
            return [call_and_compare(op, m, k) for _ in range(3)]

    def candidate(index):
        begin(rank, index)
        with GemmReduceScatter(1000, 520, HALF, backend=backend, timeout_s=60.0) as op:
            poison(op)
            return [call_and_compare(op, m, 256) for m in (1000, 334)]

    cases = {
        f"{name}, {dtype}": lambda shape=shape, dtype=dtype: shapes(*shape[:3], dtype, shape[3])
        for name, shape in {**SHAPES, "large": (1998, 1024, 1024, 2000)}.items()
        for dtype in (HALF, torch.bfloat16)
    }
    cases |= {f"candidate {index}": lambda index=index: candidate(index) for index in range(len(CANDIDATES))}
    cases["different candidates"] = lambda: candidate(rank)
    cases["outside any tuner"] = lambda: outside_any_tuner(rank)[0]
    cases["late ranks"] = lambda: many_calls(rank, "random")
    cases["graphs among eager calls"] = lambda: replays_among_eager_calls(rank, backend)
    cases["tuned in context"] = lambda: tuned_in_context(rank)[0]
    return run_cases(cases)


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_sums_are_right_on_gpus(backend):
    assert values(cases_on_gpus, 2, backend, timeout_s=240) == [[], []]
