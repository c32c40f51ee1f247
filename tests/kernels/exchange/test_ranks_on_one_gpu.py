"""Kernels of several ranks that store into each other's memory, at the same time on one GPU."""

from __future__ import annotations

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

pytestmark = pytest.mark.gpu(alone=True, seconds=20)
ROWS, N, K = 333, 520, 264  # of a chunk; ragged
SCATTERING = "specialized scatter"
KINDS = {"gather": AllGatherGemm, "scatter": GemmReduceScatter, SCATTERING: GemmReduceScatter}
TUNERS = {"gather": all_gather_gemm, "scatter": gemm_reduce_scatter, SCATTERING: specialized.tuned}


def call_again_and_again(
    ops: list[Any], a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, captured: bool
) -> list[torch.Tensor]:
    """Return what each of some calls leaves in `out`, by rank; inputs are new, and ranks launch in turns."""
    world, streams, found = len(ops), [torch.cuda.Stream() for _ in ops], []
    graphs = [torch.cuda.CUDAGraph() for _ in ops]
    for turn in range(4):
        for tensor in (a, weight):
            tensor.normal_()
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        for rank in range(world):
            rank = (rank + turn) % world
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay() if captured and turn else ops[rank](a[rank], weight[rank], out[rank])
        for op in ops:
            op.check()
        found.append((a.clone(), weight.clone(), out.clone()))
        for rank in range(world) if captured and not turn else ():
            options = {"stream": streams[rank], "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graphs[rank], **options):
                ops[rank](a[rank], weight[rank], out[rank])
    return found


def gathered(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return a.flatten(0, 1).float() @ weight.float().mT


def scattered(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (a.float() @ weight.float().mT).sum(0).unflatten(0, (len(a), -1))


def candidates_of(kind: str) -> list[triton.Config]:
    """Return those that calls of these sizes can take."""
    if kind != SCATTERING:
        return CANDIDATES
    args = {"M": 2 * ROWS, "N": N, "K": K, "WORLD": 2, "TENSOR_MEMORY": False, "TRANS_B": True}
    return prune_chunks(specialized.CANDIDATES, args)


def error(kind: str, world: int, index: int, *, captured: bool) -> float:
    """Return the largest relative error of some calls, with one of the candidates."""
    tuner = TUNERS[kind]
    tuner.configs, tuner.cache = [candidates_of(kind)[index]], {}
    if kind == "scatter":
        specialized.can_run = lambda *_: False
    of_rank, of_all = ROWS, world * ROWS
    rows, results = (of_rank, of_all) if kind == "gather" else (of_all, of_rank)
    sizes = (ROWS, K) if kind == "gather" else (of_all, N)
    wanted: Callable[..., torch.Tensor] = gathered if kind == "gather" else scattered
    a, weight, out = (
        torch.empty(world, *size, device=DEVICE, dtype=DTYPE) for size in ((rows, K), (N, K), (results, N))
    )
    with ranks_of(world, KINDS[kind], *sizes, DTYPE, by_stores=True, collective=False) as ops:
        calls = call_again_and_again(ops, a, weight, out, captured=captured)
        assert not any(op._pushes.here(peer, 0).any() for op in ops for peer in range(world))
    right = [(wanted(*given), got.float()) for *given, got in calls]
    return max(float((got - want).norm() / want.norm()) for want, got in right)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@on_one_gpu
def test_ranks_that_store_to_each_other_get_all_of_it(
    rank: int, kind: str, world: int, captured: bool
) -> None:
    candidates = candidates_of(kind)
    indices = (0, len(candidates) // 2) if captured else covering_indices(candidates)
    found = {str(candidates[index]): error(kind, world, index, captured=captured) for index in indices}
    assert {which: each for which, each in found.items() if not each < 0.01} == {}
