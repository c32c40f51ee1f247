"""What the tests of AllGatherGemm do on a rank."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.distributed as dist
from operation_runs import device

from dist_autotune.kernels.ag_gemm import AllGatherGemm, specialized
from dist_autotune.kernels.ag_gemm.call import GatherLayout
from dist_autotune.kernels.ag_gemm.choices import Choice
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from dist_autotune.kernels.configs import take_first
from dist_autotune.kernels.epilogues import ONLY_SUMS, Epilogue


def tensors(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fresh random a_shard [m, k] and weight [n, k]."""
    return torch.randn(m, k, device=device()).to(dtype), torch.randn(n, k, device=device()).to(dtype)


def gathered_by_torch(a_shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    parts = [torch.empty_like(a_shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, a_shard.contiguous(), group=group)
    return torch.cat(parts)


def error_ratio(
    out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue = ONLY_SUMS
) -> float:
    """Return the relative error against float32 as a multiple of what the arithmetic explains.

    Rounding the result to its type costs at most eps (the interpreter truncates bfloat16). Products of
    halves are exact in float32, and adding K of them there costs about sqrt(K) float32 eps.
    """
    wanted = epilogue.of(a.float() @ weight.float().T)
    explained = torch.finfo(out.dtype).eps + a.shape[1] ** 0.5 * torch.finfo(torch.float32).eps
    ratio = float((out.float() - wanted).norm() / wanted.norm() / explained)
    return ratio if math.isfinite(ratio) else math.inf  # max() may pass a NaN over


def poison(op: AllGatherGemm) -> None:
    """Fill the gather buffer with NaN, so that whatever is read before it arrives shows."""
    op._gather.local.fill_(float("nan"))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def call_pushed(op: AllGatherGemm, a_shard: torch.Tensor, weight: torch.Tensor, out=None) -> torch.Tensor:
    """Do eagerly what a captured call does at each replay."""
    return op._call(a_shard, weight, out, pushed=True)


def call_and_compare(
    op: AllGatherGemm, m: int, n: int, *, in_place: bool = False, group=None, call=AllGatherGemm.__call__
) -> float:
    """Return the error of one call with fresh inputs and an output full of NaN."""
    k, dtype = op.shard.shape[1], op.shard.dtype
    a_shard, weight = tensors(m, n, k, dtype)
    full = gathered_by_torch(a_shard, group)
    out = torch.full((full.shape[0], n), float("nan"), dtype=dtype, device=a_shard.device)
    if in_place:
        op.shard[:m].copy_(a_shard)
        a_shard = op.shard[:m]
    returned = call(op, a_shard, weight, out)
    assert returned is out
    assert torch.equal(op.gathered, full)
    return error_ratio(out, full, weight)


def begin(rank: int, candidate: int | None = None) -> None:
    """Seed this rank and leave its kernel one candidate: by default another one on each rank.

    The kernel is that in plain Triton: the other one, which a Hopper GPU would take, has tests of its own.
    """
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    specialized.can_run = lambda *args: False
    all_gather_gemm.configs = [CANDIDATES[(rank if candidate is None else candidate) % len(CANDIDATES)]]
    take_first.configs_not_timed()  # nothing is told of a job before this one, whose launch failed


def operands_of(op: AllGatherGemm, weight: torch.Tensor, out: torch.Tensor, rows: int) -> GatherLayout:
    """Return what a call with these tensors is chosen by."""
    return op._new_layout(weight, out, rows)


def force(op: AllGatherGemm, **chosen: Any) -> None:
    """Let this rank's calls take these of the choices, whatever its peers take."""
    choose = op._choose
    op._choose = lambda *shape: choose(*shape)._replace(**chosen)


def choose_at_random(op: AllGatherGemm, seed: object) -> None:
    """Let each call of this rank take choices at random, whatever its peers take."""
    order = random.Random(str(seed))
    op._choose = lambda *shape: Choice(
        order.choice(("plain", "matmul")), order.choice((1, 2, 3, 4)), order.choice((1, 2, 3))
    )
