"""What the tests of GemmAllReduce do on a rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from gemm_rs_runs import SCATTERING_SUMS
from operation_runs import device, seed_and_leave_one
from operations import HALF, DenseRuns, factors, sums_of_ranks

from dist_autotune.kernels.gemm_ar import GemmAllReduce, low_latency, pull
from dist_autotune.kernels.gemm_ar.ways import COLLECTIVE, LOW_LATENCY, OVERLAPPED, WAYS

EPS = 1e-5


KERNELS = {"add_rows": (pull.add_rows, pull.CANDIDATES)}
KERNELS |= {"exchange_rows": (low_latency.exchange_rows, low_latency.CANDIDATES)}


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
    return wanted, wanted.abs() + of_parts + of_products * torch.finfo(torch.float32).eps


def ratio(got: torch.Tensor, wanted: torch.Tensor, explained: torch.Tensor) -> float:
    found = float((got.float() - wanted).norm() / explained.norm())
    return found if math.isfinite(found) else math.inf  # max() may pass a NaN over


def error_ratio(out, a, weight, group=None) -> float:
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
    if not dist.is_initialized():
        return True
    mine = tensor.contiguous().view(torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    return all(torch.equal(each, mine) for each in all_of_them)


def call_and_compare(op: GemmAllReduce, m: int, k: int, *, group=None) -> float:
    """Return the error of one call with fresh inputs and an output full of NaN."""
    a, weight = factors(m, op._n, k, op._dtype)
    out = torch.full((m, op._n), float("nan"), dtype=op._dtype, device=a.device)
    assert op(a, weight, out) is out
    return error_ratio(out, a, weight, group)


def call_with_norm(op: GemmAllReduce, m: int, k: int) -> float:
    """Return the error of one call with a residual and a norm."""
    a, weight = factors(m, op._n, k, op._dtype)
    residual, norm_weight = of_all(m, op._n, op._dtype, m + k)
    out = torch.full((m, op._n), float("nan"), dtype=op._dtype, device=a.device)
    pair = op(a, weight, out, residual, norm_weight, EPS)
    assert pair[0] is out
    return norm_error_ratio(pair, a, weight, residual, norm_weight)


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
            kinds: dict[int, list] = {}  # of sums; of norms, one for each number of warps
            for each in candidates:
                kinds.setdefault(0 if each.kwargs["BLOCK_N"] else each.num_warps, []).append(each)
            place = rank if candidate is None else candidate
            kernel.configs = [kind[place % len(kind)] for kind in kinds.values()]

    def poison(self, op):
        if op._mail is not None:  # NaN in each type, stamped by no call that is near
            op._mail.mail.fill_((1 << 60) - 1)
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
        return op._parts.local, op._sums.local

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
        of_sum = error_ratio(out[0], a, weight, group)
        return max(of_sum, norm_error_ratio((out[1], out[2]), a, weight, residual, norm_weight, group))

    def forsake(self, op, timeout_s):
        super().forsake(op, timeout_s)
        if op._scatter is not None:
            super().forsake(op._scatter, timeout_s)
        if self.way in (LOW_LATENCY, OVERLAPPED):
            op._ways._ballots.agree = lambda key, way, terms: way  # the peer is lost behind its ballot


REDUCING = {way: Reducing(way) for way in (None, *WAYS)}
