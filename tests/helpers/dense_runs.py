"""What the tests of AllGatherGemm, GemmReduceScatter and GemmAllReduce do on a rank."""

import math
import random
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from operation_runs import device, seed_and_leave_one
from operations import HALF, DenseRuns, factors, sums_of_ranks

from dist_autotune.kernels.ag_gemm import AllGatherGemm, by_mail, specialized
from dist_autotune.kernels.ag_gemm.call import GatherLayout
from dist_autotune.kernels.ag_gemm.choices import STORING, Choice
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from dist_autotune.kernels.configs import take_first
from dist_autotune.kernels.epilogues import ONLY_SUMS, Epilogue
from dist_autotune.kernels.gemm.pruning import prune_chunks
from dist_autotune.kernels.gemm_ar import GemmAllReduce, low_latency, pull, sending
from dist_autotune.kernels.gemm_ar.ways import COLLECTIVE, LOW_LATENCY, OVERLAPPED
from dist_autotune.kernels.gemm_ar.ways import WAYS as WAYS_OF_REDUCING
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs import plain as of_sums

EPS_32 = torch.finfo(torch.float32).eps


def ratio(got: torch.Tensor, wanted: torch.Tensor, explained: torch.Tensor) -> float:
    """Return the error as a multiple of what is explained; inf for NaN, which max() may pass over."""
    found = float((got.float() - wanted).norm() / explained.norm())
    return found if math.isfinite(found) else math.inf


# ---- AllGatherGemm


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
    return ratio(out, wanted, (torch.finfo(out.dtype).eps + a.shape[1] ** 0.5 * EPS_32) * wanted)


def call_as_captured(op: AllGatherGemm, *args: Any, **options: Any) -> torch.Tensor:
    """Do on the CPU what a captured call enqueues; GPUs capture graphs."""
    if op._facts.is_gpu:
        return op(*args, **options)
    with mock.patch.object(op, "_is_capturing", return_value=True):
        return op(*args, **options)


OF_GATHERING = ((all_gather_gemm, CANDIDATES), (by_mail.exchange_shards, by_mail.CANDIDATES))


def begin(rank: int, candidate: int | None = None) -> None:
    """Seed this rank and leave its kernels one candidate: by default another one on each rank.

    The GEMM is that in plain Triton: the other one, which a Hopper GPU would take, has tests of its own.
    """
    specialized.can_run = lambda *args: False
    for kernel, candidates in OF_GATHERING:
        seed_and_leave_one(rank, kernel, candidates, candidate)
    take_first.configs_not_timed()  # nothing is told of a job before this one, whose launch failed


def operands_of(op: AllGatherGemm, weight: torch.Tensor, out: torch.Tensor, rows: int) -> GatherLayout:
    """Return what a call with these tensors is chosen by."""
    return op._new_layout(weight, out, rows, ONLY_SUMS)


def force(op: AllGatherGemm, **chosen: Any) -> None:
    """Let this rank's calls take these of the choices, whatever its peers take."""
    choose = op._choose
    op._choose = lambda *shape: choose(*shape)._replace(**chosen)


def choose_at_random(op: AllGatherGemm, seed: object) -> None:
    """Let each call of this rank take choices at random, whatever its peers take."""
    order = random.Random(str(seed))
    consumers = ("plain", "plain", *STORING)
    op._choose = lambda *shape: Choice(*(order.choice(each) for each in (consumers, (1, 2, 3, 4), (1, 2, 3))))


WAYS = {
    "plain": {"consumer": "plain"},
    "collective": {"collective": True},
    "low-latency": {"low_latency": True},
    "by stores": {"by_stores": True},
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

    @property
    def kernels(self):
        return [*super().kernels, (by_mail.exchange_shards, by_mail.CANDIDATES)]

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
        operands = a_shard, weight = self.operands(op, rows, size)
        full, out = gathered_by_torch(a_shard, group), self.new_out(op, rows, operands)
        assert op(*self.given(op, operands, told=True, in_place=in_place), out) is out
        assert torch.equal(op.gathered, full)
        return error_ratio(out, full, weight)


GATHERING_ROWS = GatheringRows()
GATHERING_BY_STORES = GatheringRows(by_stores=True)


class GatheringByMail(GatheringRows):
    """Calls of few rows, which one launch gathers before cuBLAS."""

    def poison(self, op):
        if op._mail is not None:  # NaN in each type, stamped by no call that is near
            op._mail._memory.mail.fill_((1 << 60) - 1)
        super().poison(op)


GATHERING_BY_MAIL = GatheringByMail(low_latency=True)


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


# ---- GemmReduceScatter


class ScatteringSums(DenseRuns):
    """GemmReduceScatter is opened with N and called with K."""

    name, kernel, candidates = "GemmReduceScatter", of_sums.gemm_reduce_scatter, of_sums.CANDIDATES

    def __init__(self, **options):
        self.options = options

    def sizes(self, k, n):
        return n, k

    def open(self, rows, size, dtype=HALF, group=None, **named):
        world = dist.get_world_size(group) if dist.is_initialized() else 1
        return GemmReduceScatter(world * rows, size, dtype, group, **self.options, **named)

    def buffers(self, op):
        return op._held.staged, op._held.partial

    def operands(self, op, rows, size, experts=3, topk=2, kind="any", group=None):
        return factors(op.world_size * self.rows_of(rows), op._n, size, op._dtype)

    def new_out(self, op, rows, operands):
        shape = len(operands[0]) // op.world_size, op._n
        return torch.full(shape, float("nan"), dtype=op._dtype, device=device())

    def error_ratio(self, out, a, weight, group=None):
        """Rounding each rank's part to the type costs at most its eps, and so does rounding the sum, which
        may be much smaller than its parts; each product is added in float32."""
        world, rank = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
        wanted, of_parts, of_products = sums_of_ranks(a, weight, group).chunk(world, dim=1)[rank]
        rounded = torch.finfo(out.dtype).eps * (wanted.abs() + of_parts)
        return ratio(out, wanted, rounded + EPS_32 * of_products)


SCATTERING_SUMS = ScatteringSums()
STORING_SUMS = ScatteringSums(by_stores=True)


# ---- GemmAllReduce

EPS = 1e-5
KERNELS = {"add_rows": (pull.add_rows, pull.CANDIDATES)}
KERNELS |= {"exchange_rows": (low_latency.exchange_rows, low_latency.CANDIDATES)}
KERNELS |= {"multiply_and_send": (sending.multiply_and_send, sending.CANDIDATES)}


def kind_of(config) -> int:
    """Return what candidates share of which a call leaves one: of products; of sums; of norms."""
    return config.kwargs.get("BLOCK_M") or (0 if config.kwargs["BLOCK_N"] else config.num_warps)


def of_all(m: int, n: int, dtype: torch.dtype, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a residual [m, n] and the weight [n] of a norm, equal on all ranks."""
    order = torch.Generator().manual_seed(call)
    residual, weight = (torch.randn(size, generator=order) for size in ((m, n), (n,)))
    return residual.to(dtype).to(device()), weight.to(dtype).to(device())


def sum_of_ranks(a: torch.Tensor, weight: torch.Tensor, group=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum in float32, and the error that the arithmetic explains, a number of eps of the type.

    Each rank's part is rounded to the type, and so is the sum, which may be much smaller than its parts; each
    product is added in float32.
    """
    wanted, of_parts, of_products = sums_of_ranks(a, weight, group)
    return wanted, wanted.abs() + of_parts + of_products * EPS_32


def reduce_error_ratio(out, a, weight, group=None) -> float:
    """Return the error of a sum as a multiple of what the arithmetic explains; infinite if ranks differ."""
    wanted, magnitude = sum_of_ranks(a, weight, group)
    if not same_on_all_ranks(out, group):
        return math.inf
    return ratio(out, wanted, torch.finfo(out.dtype).eps * magnitude)


def norm_error_ratio(pair, a, weight, residual, norm_weight, group=None) -> float:
    """Return the larger of the errors of sum and norm; infinite if ranks differ.

    The norm is taken of the sum that was returned: its own error is one rounding to the type.
    """
    norm, sums = pair
    wanted, magnitude = sum_of_ranks(a, weight, group)
    if not (same_on_all_ranks(norm, group) and same_on_all_ranks(sums, group)):
        return math.inf
    eps = torch.finfo(sums.dtype).eps
    of_sum = ratio(sums, wanted + residual.float(), eps * (magnitude + residual.float().abs()))
    right = torch.nn.functional.rms_norm(sums.float(), sums.shape[-1:], norm_weight.float(), EPS)
    return max(of_sum, ratio(norm, right, eps * right.abs() + 1e-5 * right.abs()))


def same_on_all_ranks(tensor: torch.Tensor, group=None) -> bool:
    """Return whether all ranks have the same bits."""
    mine = tensor.contiguous().view(torch.uint8)
    every = gathered_by_torch(mine, group).chunk(dist.get_world_size(group) if dist.is_initialized() else 1)
    return all(torch.equal(each, mine) for each in every)


class Reducing(DenseRuns):
    """GemmAllReduce is opened with N and called with K; a call is one of a sum, and one of a sum's norm."""

    name, own_operands = "GemmAllReduce", 2
    result_of_peer = 0  # the sum: a call that raises makes no norm
    kernel, candidates = pull.add_rows, pull.CANDIDATES

    def begin(self, rank, candidate=None):
        """Leave its kernels one candidate of each kind."""
        SCATTERING_SUMS.begin(rank, candidate)
        for kernel, candidates in KERNELS.values():
            seed_and_leave_one(rank, kernel, candidates, candidate)
            kinds: dict[int, list] = {}
            for each in candidates:
                kinds.setdefault(kind_of(each), []).append(each)
            place = rank if candidate is None else candidate
            kernel.configs = [kind[place % len(kind)] for kind in kinds.values()]

    def poison(self, op):
        if op._rows.mail is not None:  # NaN in each type, stamped by no call that is near
            op._rows.mail.mail.fill_((1 << 60) - 1)
        super().poison(op)

    def __init__(self, way=None):
        self.way = way
        self.most_choices = 0 if way == COLLECTIVE else 2  # on the CPU: of sums two, of norms two

    @property
    def kernels(self):
        return [*KERNELS.values(), *SCATTERING_SUMS.kernels]

    def sizes(self, k, n):
        return n, k

    def open(self, rows, size, dtype=HALF, group=None, **named):
        return GemmAllReduce(rows, size, dtype, group, way=self.way, **named)

    def buffers(self, op):
        return op._parts, op._sums

    def operands(self, op, rows, size, experts=3, topk=2, kind="any", group=None):
        m = self.rows_of(rows)
        return *factors(m, op._n, size, op._dtype), *of_all(m, op._n, op._dtype, m)

    def new_out(self, op, rows, operands):
        """Return room for a sum, a norm and the sum that it is of."""
        return torch.full((3, len(operands[0]), op._n), float("nan"), dtype=op._dtype, device=device())

    def call(self, op, operands, out, rows, *, told=True):
        a, weight, residual, norm_weight = operands
        assert op(a, weight, out[0]).data_ptr() == out[0].data_ptr()
        out[2].copy_(op(a, weight, out[1], residual, norm_weight, EPS)[1])
        return out

    def error_ratio(self, out, a, weight, residual, norm_weight, group=None):
        of_sum = reduce_error_ratio(out[0], a, weight, group)
        return max(of_sum, norm_error_ratio((out[1], out[2]), a, weight, residual, norm_weight, group))

    def forsake(self, op, timeout_s):
        super().forsake(op, timeout_s)
        if op._scatter is not None:
            super().forsake(op._scatter, timeout_s)
        if self.way in (LOW_LATENCY, OVERLAPPED):
            op._collective._ballots.agree = lambda key, way, *_: way  # the peer is lost behind its ballot


class OneSum(Reducing):
    """One sum: of two a GPU's host may hear of the first alone, and its peer wait for the second."""

    def call(self, op, operands, out, rows, *, told=True):
        a, weight, *_ = operands
        op(a, weight, out[0])
        return out

    def error_ratio(self, out, a, weight, *others, group=None):
        return reduce_error_ratio(out[0], a, weight, group)

    def own_error_ratio(self, out, a, weight, *others):
        """Return the error of this rank's result, whether or not its peers have theirs."""
        wanted, magnitude = sum_of_ranks(a, weight)
        return ratio(out[0], wanted, torch.finfo(out[0].dtype).eps * magnitude)


REDUCING = {way: Reducing(way) for way in (None, *WAYS_OF_REDUCING)}
