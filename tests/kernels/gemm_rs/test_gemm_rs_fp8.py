"""`GemmReduceScatter` in fp8: each rank scales its product by rows and columns, then rounds and sends it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from epilogue_runs import quantized
from gemm_rs_runs import SCATTERING_SUMS, begin, poison
from operation_runs import (
    GPU_BACKENDS,
    assert_cases,
    device,
)

from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import CANDIDATES

FP8 = torch.float8_e4m3fn


def error_ratio(out: torch.Tensor, product: torch.Tensor, of_products: torch.Tensor, k: int) -> float:
    """Return the largest error against float64 as a multiple of what the arithmetic explains.

    product: this rank's part of the sum, scaled; of_products: the same of absolute values. Each part is
    rounded once, by eps of the result's type, and so is the sum. Sums of K products, which are exact, are off
    by sqrt(K) float32 eps of what they are of; Hopper's tensor cores cut off what is behind 13 bits, at each
    of K / 32 instructions.
    """
    everywhere = torch.stack([product, product.abs(), of_products])
    if dist.is_initialized():
        dist.all_reduce(everywhere)
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    wanted, of_parts, of_all = everywhere.chunk(world, dim=1)[rank]
    explained = torch.finfo(out.dtype).eps * (wanted.abs() + of_parts)
    explained += (4 + k**0.5) * torch.finfo(torch.float32).eps * of_all
    if out.device.type == "cuda":
        explained += -(-k // 32) * 2**-13 * of_all
    return float(((out.double() - wanted).abs() / explained).nan_to_num(nan=torch.inf).amax())


def compared(
    op: GemmReduceScatter, m: int, k: int, *, by_rows: bool = True, by_columns: bool = True, in_steps=False
) -> float:
    """Return the error of a call with fresh inputs and an output full of NaN."""
    (a, scale_a), (weight, scale_weight) = quantized(m, k, device()), quantized(op._n, k, device())
    scales = (scale_a if by_rows else None, scale_weight[:, 0] if by_columns else None)
    out = torch.full((m // op.world_size, op._n), float("nan"), dtype=op._out_dtype, device=device())
    with mock.patch.object(op, "_in_steps", return_value=in_steps):
        assert op(a, weight, out, scale_a=scales[0], scale_weight=scales[1]) is out
    of_rows = scale_a.double() if by_rows else 1.0
    of_columns = scale_weight.double().T if by_columns else 1.0
    left, right = a.double(), weight.double().T
    sums = (left @ right, left.abs() @ right.abs())
    return error_ratio(out, *(each * of_rows * of_columns for each in sums), k)


def every_call(rank, candidate, backend="auto"):
    """Call with ragged rows and columns, K of this rank's own, with and without each scale."""
    begin(rank, candidate)
    k = 48 + 16 * rank
    with GemmReduceScatter(78, 40, FP8, backend=backend, timeout_s=60.0) as op:
        poison(op)
        return [
            compared(op, 74, k),
            compared(op, 38, k, by_columns=False),
            compared(op, 38, k, by_rows=False),
            compared(op, 74, 16, in_steps=device() == "cpu"),
        ]


def of_each_candidate(rank):
    cases = {f"candidate {i}": lambda i=i: every_call(rank, i) for i in range(len(CANDIDATES))}
    return cases | {"different candidates": lambda: every_call(rank, None)}


def test_each_rank_scales_its_product_before_it_is_rounded_and_sent():
    assert_cases(of_each_candidate, 2)


# ---- one rank, in this process


def test_results_are_bf16():
    a, weight = torch.ones(16, 32).to(FP8), torch.ones(20, 32).to(FP8)
    with SCATTERING_SUMS.alone(16, 20, FP8) as op:
        assert torch.equal(op(a, weight), torch.full((16, 20), 32.0, dtype=torch.bfloat16))


# ---- on GPUs


def calls_on_gpus(rank, backend):
    return {
        f"candidate {index}": lambda index=index: every_call(rank, index, backend)
        for index in range(len(CANDIDATES))
    }


@pytest.mark.gpu(devices=2, seconds=40)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_every_candidate_multiplies_fp8_on_gpus(backend):
    assert_cases(calls_on_gpus, 2, backend, timeout_s=240)
