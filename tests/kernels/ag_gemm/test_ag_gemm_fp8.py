"""`AllGatherGemm` in fp8: rows travel with their scales, on every way to the product.

The specialized consumer's source runs in the model, see `test_ag_gemm_model`, and on GPUs.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from ag_gemm_runs import LANES, WAYS, WAYS_ON_GPUS, begin, call_in_lane, gathered_by_torch, opened, poison
from fp8_runs import error_ratio, quantized
from operation_runs import GPU_BACKENDS, assert_cases, device, left_as_before, message_of

from dist_autotune.kernels.ag_gemm import AllGatherGemm, specialized
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from dist_autotune.kernels.epilogues import Epilogue

FP8 = torch.float8_e4m3fn


def compared(op: AllGatherGemm, m: int, n: int, lane: str, *, plainly: bool = False) -> float:
    """Return the error of a call with fresh inputs and an output full of NaN; plainly: without a bias."""
    k = op.shard.shape[1]
    (a_shard, scale_a), (weight, scale_weight) = quantized(m, k, device()), quantized(n, k, device())
    ending = (None, None) if plainly else (torch.randn(n, device=device()), "silu")
    full, scales = gathered_by_torch(a_shard), gathered_by_torch(scale_a)
    out = torch.full((full.shape[0], n), float("nan"), dtype=torch.bfloat16, device=device())
    assert call_in_lane(op, a_shard, weight, out, Epilogue(*ending, scale_a, scale_weight), lane) is out
    if lane != "as captured":
        assert torch.equal(op.gathered.view(torch.uint8), full.view(torch.uint8))
    return error_ratio(out, full, weight, Epilogue(*ending, scales, scale_weight.T))


def every_call(rank, way, lane):
    begin(rank)
    with opened(19, 48, FP8, lane, **WAYS[way]) as op:
        poison(op)
        return [compared(op, m, 20 + 8 * rank, lane, plainly=m == 7) for m in (19, 7, 19)]


def every_way(rank):
    ways = itertools.product(WAYS, LANES)
    return {f"{way}, {lane}": lambda way=way, lane=lane: every_call(rank, way, lane) for way, lane in ways}


def test_every_way_multiplies_rows_and_columns_by_their_scales():
    assert_cases(every_way, 2)


def without_scales(rank, way):
    """Rank 1 passes no scales, and again none behind a call with them: its rows count as they are."""
    begin(rank)
    errors = []
    with opened(16, 32, FP8, "pull", **WAYS[way]) as op:
        for passes in (False, True, False):
            (a_shard, scale_a), (weight, _) = quantized(16, 32, device()), quantized(20, 32, device())
            scale_a = scale_a if passes or rank == 0 else None
            out = op(a_shard, weight, scale_a=scale_a)
            scales = gathered_by_torch(torch.ones(16, 1) if scale_a is None else scale_a)
            errors.append(error_ratio(out, gathered_by_torch(a_shard), weight, Epilogue(scale_a=scales)))
    return errors


def without_scales_each_way(rank):
    return {way: lambda way=way: without_scales(rank, way) for way in WAYS}


def test_rows_of_a_rank_that_passes_no_scales_count_as_they_are():
    assert_cases(without_scales_each_way, 2)


# ---- one rank, in this process


@pytest.fixture
def op():
    with left_as_before(all_gather_gemm), opened(16, 32, FP8, "pull", consumer="plain") as opened_one:
        all_gather_gemm.configs = CANDIDATES[:1]
        yield opened_one


def test_the_shard_may_be_written_in_place(op):
    (a, scale_a), (weight, _) = quantized(16, 32, device()), quantized(20, 32, device())
    op.shard.copy_(a)
    assert op.shard.shape == (16, 32)
    assert torch.equal(op(op.shard, weight, scale_a=scale_a), op(a, weight, scale_a=scale_a[:, 0]))


def test_what_cannot_be_scaled_is_told_with_its_values(op):
    a, weight = torch.zeros(16, 32).to(FP8), torch.zeros(20, 32).to(FP8)
    scale = torch.ones(20)
    wrong = {
        "ValueError: scale_a has shape (20,); it must be (16,) or (16, 1)": {"scale_a": scale},
        "ValueError: scale_weight has shape (16,); it must be (20,) or (20, 1)": {"scale_weight": scale[:16]},
        "TypeError: scale_weight is torch.float64; it must be": {"scale_weight": scale.double()},
        "RuntimeError: AllGatherGemm has no backward": {"scale_weight": torch.ones(20, requires_grad=True)},
        "ValueError: out is torch.float16 on cpu; this operation": {"out": torch.zeros(16, 20).half()},
    }
    for text, options in wrong.items():
        assert message_of(lambda options=options: op(a, weight, **options)).startswith(text)
    by_columns = message_of(lambda: op(a, weight.T.contiguous().T))
    assert by_columns.startswith("ValueError: the rows of weight are not contiguous")
    assert op._calls == 0


def test_scales_are_for_fp8_alone_and_its_rows_are_whole_16_bytes():
    assert message_of(lambda: opened(16, 40, FP8, "pull")).startswith(
        "ValueError: k=40: rows of torch.float8_e4m3fn are whole 16 bytes; pad K to 48"
    )
    with AllGatherGemm(16, 32, torch.float16, timeout_s=60.0) as of_halves:
        a, weight = torch.zeros(16, 32).half(), torch.zeros(20, 32).half()
        text = message_of(lambda: of_halves(a, weight, scale_weight=torch.ones(20)))
    assert text.startswith("ValueError: scale_a and scale_weight are for torch.float8_e4m3fn")


# ---- on GPUs


def every_way_on_gpus(rank, backend):
    """Return what went wrong in calls of some rows, each rank with a candidate of its own."""
    torch.manual_seed(rank)
    specialized.tuned.configs = specialized.CANDIDATES[rank : rank + 1]
    all_gather_gemm.configs = CANDIDATES[rank : rank + 1]

    def errors(way: dict[str, object], lane: str) -> list[float]:
        with opened(333, 528, FP8, lane, backend=backend, **way) as op:
            return [compared(op, m, 272 + 128 * rank, lane, plainly=m == 256) for m in (333, 256)]

    return {
        f"{name}, {lane}": lambda way=way, lane=lane: errors(way, lane)
        for (name, way), lane in itertools.product(WAYS_ON_GPUS.items(), LANES)
    }


@pytest.mark.gpu(devices=2, seconds=35)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_every_way_multiplies_fp8_on_gpus(backend):
    assert_cases(every_way_on_gpus, 2, backend, timeout_s=300)
