"""What the tests of `AllGatherMoE` and `MoEReduceScatter` share: tokens, choices, and the right results."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dist_autotune.kernels.operation import Operation
from operation_runs import device, message_of

HALF = torch.float16

GIVEN_OTHERS = "rank 0 was given other tokens= than the ranks have. Close it"

SHAPES = {  # tokens of each rank, K, N, experts, topk
    "whole tiles": ((32, 32), 32, 32, 2, 2),
    "ragged tokens, K, N and experts": ((13, 20), 24, 40, 5, 3),
    "a rank without tokens": ((0, 9), 16, 16, 3, 2),
    "no tokens anywhere": ((0, 0), 16, 16, 3, 2),
    "more experts than choices": ((2, 1), 16, 24, 17, 2),
    "one choice, one expert, one column": ((5, 4), 16, 1, 1, 1),
    "rows that TMA cannot address": ((7, 11), 7, 21, 4, 2),
}


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


def tokens_of_call(tokens: Sequence[int], call: int) -> list[int]:
    """Return the numbers of tokens, moved on by a rank in each call."""
    return [tokens[(rank + call) % len(tokens)] for rank in range(len(tokens))]


def delay_pushes(op: Operation, arrived: torch.Tensor, delay_s: float) -> None:
    """Let this rank's side stream, a thread, sleep before it pushes rows and before it says so."""
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


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def ends(op: Operation, call) -> tuple[str, bool, bool]:
    """Return how the call ended, and whether the next one and `close` end the same way."""

    def checked():
        call()
        op.check()

    first = message_of(checked)
    return first, message_of(checked) == first, message_of(op.close) == first
