"""Kernels of several ranks that store into each other's memory, at the same time on one GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from gpu_cases import covering_indices
from host_as_peer import DEVICE, DTYPE, on_one_gpu
from ranks_on_one_gpu import ranks_of

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.plain import all_gather_gemm
from dist_autotune.kernels.configs import CANDIDATES
from dist_autotune.kernels.gemm.pruning import prune_chunks
from dist_autotune.kernels.gemm_rs import GemmReduceScatter, specialized
from dist_autotune.kernels.gemm_rs.plain import gemm_reduce_scatter
from dist_autotune.kernels.tensors import FP8

pytestmark = pytest.mark.gpu(alone=True, seconds=20)
ROWS, N, K = 333, 520, 272  # of a chunk; ragged
SCATTERING, IN_FP8 = "specialized scatter", "specialized scatter in fp8"
TUNERS = {"gather": all_gather_gemm, "scatter": gemm_reduce_scatter}
TUNERS |= dict.fromkeys((SCATTERING, IN_FP8), specialized.tuned)


def call_again_and_again(
    ops: list[Any],
    a: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scales: tuple[torch.Tensor, ...],
    *,
    captured: bool,
) -> list[tuple[torch.Tensor, ...]]:
    """Return operands, scales and what each of some calls leaves in `out`, by rank.

    Inputs are new, and ranks launch in turns. scales: none, or those of rows of a and of the weight.
    """
    world, streams, found = len(ops), [torch.cuda.Stream() for _ in ops], []
    scaled = [dict(zip(("scale_a", "scale_weight"), each, strict=True)) for each in zip(*scales, strict=True)]
    options = scaled or [{}] * world
    graphs = [torch.cuda.CUDAGraph() for _ in ops]
    for turn in range(4):
        for tensor in (a, weight):
            tensor.copy_(torch.randn(tensor.shape, device=DEVICE))
        for scale in scales:
            scale.uniform_(0.5, 2.0)
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        for rank in range(world):
            rank = (rank + turn) % world
            with torch.cuda.stream(streams[rank]):
                call = functools.partial(ops[rank], a[rank], weight[rank], out[rank], **options[rank])
                graphs[rank].replay() if captured and turn else call()
        for op in ops:
            op.check()
        found.append(tuple(each.clone() for each in (a, weight, *scales, out)))
        for rank in range(world) if captured and not turn else ():
            with torch.cuda.graph(graphs[rank], stream=streams[rank], capture_error_mode="thread_local"):
                ops[rank](a[rank], weight[rank], out[rank], **options[rank])
    return found


def gathered(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return a.flatten(0, 1).float() @ weight.float().mT


def scattered(a: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    products = a.float() @ weight.float().mT
    if scales:
        products *= scales[0][:, :, None] * scales[1][:, None]
    return products.sum(0).unflatten(0, (len(a), -1))


def candidates_of(kind: str) -> list[triton.Config]:
    """Return those that calls of these sizes can take."""
    if kind not in (SCATTERING, IN_FP8):
        return CANDIDATES
    args = {"M": 2 * ROWS, "N": N, "K": K, "WORLD": 2, "TENSOR_MEMORY": False, "TRANS_B": True}
    return prune_chunks(specialized.CANDIDATES, args)


def error(kind: str, world: int, index: int, *, captured: bool) -> float:
    """Return the largest relative error of some calls, with one of the candidates."""
    tuner = TUNERS[kind]
    tuner.configs, tuner.cache = [candidates_of(kind)[index]], {}
    if kind == "scatter":
        specialized.can_run = lambda *_: False
    of_rank, of_all, dtype = ROWS, world * ROWS, FP8 if kind == IN_FP8 else DTYPE
    rows, results = (of_rank, of_all) if kind == "gather" else (of_all, of_rank)
    sizes = (ROWS, K) if kind == "gather" else (of_all, N)
    wanted: Callable[..., torch.Tensor] = gathered if kind == "gather" else scattered
    a, weight = (torch.empty(world, count, K, device=DEVICE, dtype=dtype) for count in (rows, N))
    out = torch.empty(world, results, N, device=DEVICE, dtype=DTYPE)
    scales = tuple(torch.empty(world, count, device=DEVICE) for count in (rows, N) if kind == IN_FP8)
    operation = AllGatherGemm if kind == "gather" else GemmReduceScatter
    with ranks_of(world, operation, *sizes, dtype, by_stores=True, collective=False) as ops:
        calls = call_again_and_again(ops, a, weight, out, scales, captured=captured)
        assert not any(op._pushes.here(peer, 0).any() for op in ops for peer in range(world))
    right = [(wanted(*given), got.float()) for *given, got in calls]
    return max(float((got - want).norm() / want.norm()) for want, got in right)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", TUNERS)
@on_one_gpu
def test_ranks_that_store_to_each_other_get_all_of_it(
    rank: int, kind: str, world: int, captured: bool
) -> None:
    candidates = candidates_of(kind)
    indices = (0, len(candidates) // 2) if captured else covering_indices(candidates)
    found = {str(candidates[index]): error(kind, world, index, captured=captured) for index in indices}
    assert {which: each for which, each in found.items() if not each < 0.01} == {}
