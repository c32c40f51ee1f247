"""Kernels of several ranks that store into each other's memory, at the same time on one GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import covering_indices
from host_as_peer import DEVICE, DTYPE, on_one_gpu
from ranks_on_one_gpu import ranks_of

from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import CANDIDATES, gemm_reduce_scatter

pytestmark = pytest.mark.gpu(alone=True, seconds=20)
ROWS, N, K = 333, 520, 264  # of a chunk; ragged


def sums_of_calls(world: int, index: int, *, captured: bool) -> float:
    """Return the largest relative error of some calls, whose inputs are new; ranks launch in turns."""
    gemm_reduce_scatter.configs, gemm_reduce_scatter.cache = [CANDIDATES[index]], {}
    worst, options = 0.0, {"device": DEVICE, "dtype": DTYPE}
    fixed = {"by_stores": True, "collective": False}
    with ranks_of(world, GemmReduceScatter, world * ROWS, N, DTYPE, **fixed) as ops:
        streams = [torch.cuda.Stream() for _ in ops]
        a, weight = torch.empty(world, world * ROWS, K, **options), torch.empty(world, N, K, **options)
        out, graphs = torch.empty(world * ROWS, N, **options), [torch.cuda.CUDAGraph() for _ in ops]

        def call(rank: int) -> None:
            ops[rank](a[rank], weight[rank], out.chunk(world)[rank])

        for turn in range(4):
            a.normal_()
            weight.normal_()
            out.fill_(float("nan"))
            for op in ops:
                op._staged.local.fill_(float("nan"))
            torch.cuda.synchronize()
            for rank in range(world):
                rank = (rank + turn) % world
                with torch.cuda.stream(streams[rank]):
                    graphs[rank].replay() if captured and turn else call(rank)
            for op in ops:
                op.check()
            wanted = (a.float() @ weight.float().mT).sum(0)
            worst = max(worst, float((out.float() - wanted).norm() / wanted.norm()))
            if captured and not turn:
                for rank in range(world):
                    with torch.cuda.graph(
                        graphs[rank], stream=streams[rank], capture_error_mode="thread_local"
                    ):
                        call(rank)
        assert not any(op._flags.local.any() for op in ops)
    return worst


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("world", [2, 4])
@on_one_gpu
def test_ranks_that_store_their_sums_to_each_other_get_all_of_them(
    rank: int, world: int, captured: bool
) -> None:
    indices = (0, 8) if captured else covering_indices(CANDIDATES)
    found = {str(CANDIDATES[index]): sums_of_calls(world, index, captured=captured) for index in indices}
    assert {which: error for which, error in found.items() if not error < 0.01} == {}
