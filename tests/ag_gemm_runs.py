"""What the tests of AllGatherGemm do on a rank, and how they start ranks."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import random
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_autotune.kernels.ag_gemm import AllGatherGemm, specialized
from dist_autotune.kernels.ag_gemm.candidates import CANDIDATES
from dist_autotune.kernels.ag_gemm.choices import Choice
from dist_autotune.kernels.ag_gemm.plain import all_gather_gemm
from rank_programs import wait_for
from ranks import Result, assert_all_ok, run_ranks

ON_GPUS = os.environ.get("DIST_AUTOTUNE_TEST_GPU") == "1"
TWO = [2, pytest.param(2, marks=pytest.mark.gpu(devices=2), id="2 GPUs")]
# There a skip is a failure; that nvshmem4py is missing is told by test_symm.
GPU_BACKENDS = ["torch", "nvshmem"] if importlib.util.find_spec("nvshmem") or not ON_GPUS else ["torch"]
# Triton 3.6 turns one-element arrays into loop bounds the way NumPy 1.25 deprecated.
INTERPRETER = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


def device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def tensors(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fresh random a_shard [m, k] and weight [n, k]."""
    return torch.randn(m, k, device=device()).to(dtype), torch.randn(n, k, device=device()).to(dtype)


def gathered_by_torch(a_shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    parts = [torch.empty_like(a_shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, a_shard.contiguous(), group=group)
    return torch.cat(parts)


def error_ratio(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the relative error against float32 as a multiple of what the arithmetic explains.

    Rounding the result to its type costs at most eps (the interpreter truncates bfloat16). Products of
    halves are exact in float32, and adding K of them there costs about sqrt(K) float32 eps.
    """
    wanted = a.float() @ weight.float().T
    explained = torch.finfo(out.dtype).eps + a.shape[1] ** 0.5 * torch.finfo(torch.float32).eps
    ratio = float((out.float() - wanted).norm() / wanted.norm() / explained)
    return ratio if math.isfinite(ratio) else math.inf  # max() may pass a NaN over


def poison(op: AllGatherGemm) -> None:
    """Fill the gather buffer with NaN, so that whatever is read before it arrives shows."""
    op._gather.local.fill_(float("nan"))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def call_in_lane(op: AllGatherGemm, a_shard: torch.Tensor, weight: torch.Tensor, out=None) -> torch.Tensor:
    """Do eagerly what a captured call does at each replay."""
    return op._call(a_shard, weight, out, in_lane=True)


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


def force(op: AllGatherGemm, **chosen: Any) -> None:
    """Let this rank's calls take these of the choices, whatever its peers take."""
    choose = op._choose
    op._choose = lambda *shape: dataclasses.replace(choose(*shape), **chosen)


def choose_at_random(op: AllGatherGemm, seed: object) -> None:
    """Let each call of this rank take choices at random, whatever its peers take."""
    order = random.Random(str(seed))
    op._choose = lambda *shape: Choice(
        order.choice(("plain", "matmul")), order.choice((1, 2, 3, 4)), order.choice((1, 2, 3))
    )


def message_of(call) -> str:
    """Return what `call` raises, as "Type: message"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def delay_copies(op: AllGatherGemm, delay: Callable[[], None]) -> None:
    """Run `delay` on the CPU's side stream before each copy."""
    copy = op._memory.copy

    def copy_late(dst, src, stream):
        stream.enqueue(delay)
        copy(dst, src, stream)

    op._memory.copy = copy_late


def hold_launch(op: AllGatherGemm, until: Callable[[], Any]) -> None:
    """Let each launch wait on the host for `until`; what a call does before its launch is not held up.

    A kernel's patience is a number of polls: hold it until the peers that are to come have come, or one
    that the machine has no time for is given up too.
    """
    launch = op._launch

    def launch_then(*args, **kwargs):
        wait_for(until, 100.0)
        launch(*args, **kwargs)

    op._launch = launch_then


def run_cases(cases: dict[str, Callable[[], Any]]) -> list[str]:
    """Run the cases in turn, all in this one process; return what was wrong, the same on all ranks.

    A case is right when it returns what is true, or errors that are all below 1. After one that raises, on
    any rank, the ranks may be apart and the rest is not run.
    """
    failed: list[str] = []
    for name, case in cases.items():
        text, raised = "", False
        try:
            value = case()
            right = value if isinstance(value, bool) else max(value) < 1 and not math.isnan(sum(value))
            text = "" if right else f"returned {value}"
        except Exception:
            text, raised = traceback.format_exc(), True
        ends: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ends, (text, raised))
        failed += [f"{name}, rank {rank}: {text}" for rank, (text, _) in enumerate(ends) if text]
        if any(raised for _, raised in ends):
            return [*failed, f"not run: all behind {name}"]
    return failed


# ---- in pytest


def results(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0) -> list[Result]:
    """Return how fn(rank, *args) ended on each of `world` ranks."""
    return run_ranks(
        fn, world, *args, timeout_s=timeout_s, backend="cpu:gloo,cuda:nccl" if ON_GPUS else "gloo"
    )


def values(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Return what fn(rank, *args) returned on each of `world` ranks, all of which must end well."""
    return assert_all_ok(results(fn, world, *args, timeout_s=timeout_s))
