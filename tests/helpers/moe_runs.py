"""What the tests of `AllGatherMoE` and `MoEReduceScatter` share: choices, right results, runs on a rank."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from operation_runs import device
from operations import HALF, Runs

from dist_autotune.kernels.exchange.flags import ARRIVED

GIVEN_OTHERS = "rank 0 was given other tokens= than the ranks have, or one of them called route(). Close it"

# ---- one of the two operations


class ExpertRuns(Runs):
    """An operation whose weight is one of experts: [experts, N, K]."""

    @abc.abstractmethod
    def fresh_call(self, op: Any, tokens: Sequence[int], *, told=True, topk=2, ids=None) -> None:
        """Call with fresh inputs and three experts; `ids` are this rank's choices."""

    def call(self, op, operands, out, rows, *, told=True):
        assert op(*operands, out, tokens=list(rows) if told else None) is out
        return out


def delay_pushes(op: Any, delay_s: float) -> None:
    """Let this rank's side stream, a thread, sleep before it pushes rows to rank 0 and before it says so."""
    arrived = op._flags.peers[0][ARRIVED.value, op.rank]
    copy, write_signal = op._memory.copy, op._memory.write_signal

    def copy_late(dst, src, stream):
        if dst.dim() == 2 and dst.dtype.is_floating_point:
            stream.enqueue(lambda: time.sleep(delay_s))
        copy(dst, src, stream)

    def write_late(word, value, stream):
        if word.data_ptr() == arrived.data_ptr():
            stream.enqueue(lambda: time.sleep(delay_s))
        write_signal(word, value, stream)

    op._memory.copy, op._memory.write_signal = copy_late, write_late


# ---- inputs and right results


def random_choices(tokens: int, experts: int, topk: int, kind: str = "any") -> torch.Tensor:
    """Return fresh ids [tokens, topk]: of "any" or none, all of "one", a token's the "same", "none"."""
    if kind == "one":
        return torch.full((tokens, topk), experts - 1, device=device())
    if kind == "same":
        return torch.randint(0, experts, (tokens, 1), device=device()).expand(-1, topk)
    if kind == "none":
        return torch.full((tokens, topk), -1, device=device())
    return torch.randint(-1, experts, (tokens, topk), device=device())


def randoms(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, device=device()).to(dtype)


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank of the group, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    value = value.cpu() if isinstance(value, torch.Tensor) else value
    dist.all_gather_object(values, value, group=group)
    return [each.to(device()) if isinstance(each, torch.Tensor) else each for each in values]


def products(rows: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return in float32, for each choice, its row times its expert's weight.T; zeros where there is none."""
    found = torch.zeros(len(rows), weight.shape[1], device=rows.device)
    for expert in range(weight.shape[0]):
        chosen = ids == expert
        found[chosen] = rows[chosen].float() @ weight[expert].float().T
    return found


def relative_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the error; inf for NaN, which `max` would pass over, and for zeros that are not exactly that."""
    if not wanted.any():
        return 0.0 if torch.equal(out.float(), wanted) else math.inf
    error = float((out.float() - wanted).norm() / wanted.norm())
    return math.inf if math.isnan(error) else error


def explained_error(dtype: torch.dtype, roundings: int, inner: int) -> float:
    """Return what the arithmetic explains: a rounding to the type costs at most its eps (the interpreter
    truncates bfloat16), products of halves are exact in float32, and adding `inner` of them there costs about
    the root of that many float32 eps."""
    return roundings * torch.finfo(dtype).eps + inner**0.5 * torch.finfo(torch.float32).eps
