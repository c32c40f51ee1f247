"""What the tests of AllGatherGemm do on a rank."""

from __future__ import annotations

import math
import random
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from operation_runs import device, seed_and_leave_one
from operations import HALF, DenseRuns, factors

from dist_autotune.kernels.ag_gemm import AllGatherGemm, specialized
from dist_autotune.kernels.ag_gemm.call import GatherLayout
from dist_autotune.kernels.ag_gemm.choices import Choice
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from dist_autotune.kernels.configs import take_first
from dist_autotune.kernels.epilogues import ONLY_SUMS, Epilogue
from dist_autotune.kernels.gemm.pruning import prune_chunks


def gathered_by_torch(a_shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    if not dist.is_initialized():
        return a_shard
    mine = a_shard.contiguous().view(torch.uint8)  # gloo knows no fp8
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat(parts).view(a_shard.dtype)


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
    gathered = op._gather.local  # in fp8, elements and scales
    gathered.fill_(255 if gathered.dtype == torch.uint8 else float("nan"))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def call_as_captured(op: AllGatherGemm, *args: Any, **options: Any) -> torch.Tensor:
    """Do on the CPU what a captured call enqueues; GPUs capture graphs."""
    if op._on_gpu:
        return op(*args, **options)
    with mock.patch.object(op, "_is_capturing", return_value=True):
        return op(*args, **options)


def call_and_compare(
    op: AllGatherGemm, m: int, n: int, *, in_place: bool = False, group=None, call=AllGatherGemm.__call__
) -> float:
    """Return the error of one call with fresh inputs and an output full of NaN."""
    k, dtype = op.shard.shape[1], op.shard.dtype
    a_shard, weight = factors(m, n, k, dtype)
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


WAYS = {
    "plain": {"consumer": "plain"},
    "matmul": {"consumer": "matmul"},
    "collective": {"collective": True},
}
WAYS_ON_GPUS = {"specialized": {"consumer": "specialized"}, **WAYS}
LANES = ("eager", "as captured")


def opened(m: int, k: int, dtype: torch.dtype, **options: Any) -> AllGatherGemm:
    return AllGatherGemm(m, k, dtype, timeout_s=60.0, **options)


def call_in_lane(
    op: AllGatherGemm,
    a_shard: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None,
    epilogue: Epilogue,
    lane: str = "eager",
) -> torch.Tensor:
    bias, activation, scale_a, scale_weight = epilogue
    options = {"bias": bias, "activation": activation, "scale_a": scale_a, "scale_weight": scale_weight}
    call = call_as_captured if lane == "as captured" else AllGatherGemm.__call__
    return call(op, a_shard, weight, out, **options)


class GatheringRows(DenseRuns):
    """AllGatherGemm is opened with K and called with N."""

    name, kernel, candidates = "AllGatherGemm", all_gather_gemm, CANDIDATES
    can_be_in_place = True
    result_of_peer = slice(8, None)  # of calls with 8 rows
    begin = staticmethod(begin)

    def __init__(self, **options):
        self.options = options

    @contextmanager
    def begun(self):
        with mock.patch.object(specialized, "can_run", specialized.can_run), super().begun():
            yield

    def sizes(self, k, n):
        return k, n

    def open(self, rows, size, dtype=HALF, group=None, **named):
        return AllGatherGemm(rows, size, dtype, group, **self.options, **named)

    def buffers(self, op):
        return (op._gather.local,)

    def operands(self, op, rows, size, experts=3, topk=2, kind="any", group=None):
        return factors(self.rows_of(rows), size, op.shard.shape[1], op.shard.dtype)

    def new_out(self, op, rows, operands):
        a_shard, weight = operands
        shape = op.world_size * len(a_shard), len(weight)
        return torch.full(shape, float("nan"), dtype=a_shard.dtype, device=device())

    def given(self, op, operands, *, told, in_place):
        a_shard, weight = operands
        return op.shard[: len(a_shard)].copy_(a_shard) if in_place else a_shard, weight

    def call_as_captured(self, op, operands, out, rows):
        return call_as_captured(op, *operands, out)

    def error_ratio(self, out, a_shard, weight, group=None):
        return error_ratio(out, gathered_by_torch(a_shard, group), weight)

    def call_and_compare(self, op, rows, size, *shape, in_place=False, group=None, **options):
        return call_and_compare(op, self.rows_of(rows), size, in_place=in_place, group=group)


GATHERING_ROWS = GatheringRows()


class OfSpecializedKernel(GatheringRows):
    """Calls of the warp-specialised kernel, on GPUs; chunks are as high as its lowest tile."""

    kernel = specialized.tuned
    can_run = staticmethod(specialized.can_run)
    shapes = {  # noqa: RUF012 - as of all operations
        "whole tiles": ((512, 512), 1024, 1024, 1, 1),
        "a ragged chunk": ((200, 200), 512, 1792, 1, 1),
        "the fewest rows": ((64, 64), 256, 512, 1, 1),
        "ragged everywhere": ((333, 333), 520, 1000, 1, 1),
        "K below a block": ((128, 128), 8, 256, 1, 1),
        "one tile": ((128, 128), 4096, 128, 1, 1),
    }

    @property
    def candidates(self):
        """Return those that a large call can take on this device."""
        args = {"M": 1400, "N": 520, "K": 256, "WORLD": 2, "TENSOR_MEMORY": False}
        return prune_chunks(specialized.CANDIDATES, args)

    def begin(self, rank, candidate=None):
        specialized.can_run, specialized.tuned.cache = self.can_run, {}
        seed_and_leave_one(rank, self.kernel, self.candidates, candidate)
        if candidate is None:  # the first that suits the call
            self.kernel.configs = specialized.CANDIDATES


OF_SPECIALIZED_KERNEL = OfSpecializedKernel(consumer="specialized", collective=False)
