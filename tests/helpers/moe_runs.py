"""What the tests of `AllGatherMoE` and `MoEReduceScatter` share: choices, right results, runs on a rank."""

from __future__ import annotations

import abc
import math
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import GraphCall, kept_from_replays_among_eager_calls
from operation_runs import device, seed_and_leave_one, synchronize, tuned_in_context

from dist_autotune.kernels.exchange.flags import ARRIVED

HALF = torch.float16

GIVEN_OTHERS = "rank 0 was given other tokens= than the ranks have, or one of them called route(). Close it"

SHAPES = {  # tokens of each rank, K, N, experts, topk
    "whole tiles": ((32, 32), 32, 32, 2, 2),
    "ragged tokens, K, N and experts": ((13, 20), 24, 40, 5, 3),
    "a rank without tokens": ((0, 9), 16, 16, 3, 2),
    "no tokens anywhere": ((0, 0), 16, 16, 3, 2),
    "more experts than choices": ((2, 1), 16, 24, 17, 2),
    "one choice, one expert, one column": ((5, 4), 16, 1, 1, 1),
    "rows that TMA cannot address": ((7, 11), 7, 21, 4, 2),
}


# ---- one of the two operations


class ExpertRuns(abc.ABC):
    """What is done with one of the operations on a rank.

    A call multiplies by weights [experts, N, K]. One of N and K is the operation's, the other the call's:
    `sizes` says which.
    """

    name: str
    kernel: Any
    candidates: list[Any]
    can_be_in_place = False
    choices_copied = 1  # how many copies to a peer are those of the choices
    lost_push: str  # what a rank says of rank 0's part when a push does not come

    def begin(self, rank: int, candidate: int | None = None) -> None:
        """Seed this rank and leave its kernel one candidate: by default another one on each rank."""
        seed_and_leave_one(rank, self.kernel, self.candidates, candidate)

    @abc.abstractmethod
    def sizes(self, k: int, n: int) -> tuple[int, int]:
        """Return the size that the operation is opened with, and that of a call."""

    @abc.abstractmethod
    def open(self, tokens_per_rank: int, size: int, *options: Any, **named: Any) -> Any:
        """Return the operation; collective."""

    @abc.abstractmethod
    def buffers(self, op: Any) -> tuple[torch.Tensor, ...]:
        """Return what is written before it is read."""

    @abc.abstractmethod
    def operands(
        self,
        op: Any,
        tokens: Sequence[int],
        size: int,
        experts: int,
        topk: int,
        kind: str = "any",
        group=None,
    ) -> tuple[torch.Tensor, ...]:
        """Return fresh inputs of a call, in its order."""

    @abc.abstractmethod
    def new_out(self, op: Any, tokens: Sequence[int], operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return an output for that call, full of NaN."""

    @abc.abstractmethod
    def error_ratio(self, out: torch.Tensor, *operands: torch.Tensor, group=None) -> float:
        """Return the relative error against float32 as a multiple of what the arithmetic explains."""

    @abc.abstractmethod
    def fresh_call(self, op: Any, tokens: Sequence[int], *, told=True, topk=2, ids=None) -> None:
        """Call with fresh inputs and three experts; `ids` are this rank's choices."""

    def poison(self, op: Any) -> None:
        """Fill the buffers with NaN, so that whatever is read before it arrives shows."""
        for buffer in self.buffers(op):
            buffer.fill_(float("nan"))
        synchronize()

    def call_and_compare(
        self, op: Any, tokens: Sequence[int], size: int, experts: int, topk: int,
        *, kind: str = "any", told: bool = False, in_place: bool = False, group=None,
    ) -> float:  # fmt: skip
        """Return the error of one call with fresh inputs and an output full of NaN."""
        operands = self.operands(op, tokens, size, experts, topk, kind, group)
        out = self.new_out(op, tokens, operands)
        given = self.given(op, operands, told=told, in_place=in_place)
        assert op(*given, out, tokens=list(tokens) if told else None) is out
        return self.error_ratio(out, *operands, group=group)

    def given(
        self, op: Any, operands: tuple[torch.Tensor, ...], *, told: bool, in_place: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the operands as the call is given them."""
        return operands


# ---- on a rank


def three_calls(rank, runs, tokens, k, n, experts, topk, dtype=HALF, kind="any", **options):
    """Let the host ask for the tokens, then be told, then (where that is possible) call in place."""
    runs.begin(rank)
    of_operation, of_call = runs.sizes(k, n)
    with runs.open(max(*tokens, 1), of_operation, dtype, **options) as op:
        runs.poison(op)
        return [
            runs.call_and_compare(
                op, tokens_of_call(tokens, call), of_call, experts, topk,
                kind=kind, told=call == 1, in_place=call == 2 and runs.can_be_in_place,
            )
            for call in range(3 if runs.can_be_in_place else 2)
        ]  # fmt: skip


def many_calls(rank, runs, delays):
    """Keep every result until the end; no rank waits for another between calls, save the hosts for counts."""
    runs.begin(rank)
    world, kept = dist.get_world_size(), []
    with runs.open(24, runs.sizes(16, 33)[0], HALF) as op:
        runs.poison(op)
        for call in range(6):
            tokens = [(24, 7, 0, 5)[(p + call) % 4] for p in range(world)]
            experts, topk, size = (3, 5)[call % 2], (2, 1, 3)[call % 3], (24, 16)[call % 2]
            operands = runs.operands(op, tokens, size, experts, topk)
            if delays == "one" and rank == call % world:
                time.sleep(0.1)
            if delays == "random":
                time.sleep(random.random() / 20)
            out = op(*operands, tokens=None if call == 3 else tokens)
            kept.append((out, *operands))
        op.check()
    return [runs.error_ratio(*one) for one in kept]


def tuned_with_other_token_counts(rank, runs):
    """Return the errors of all runs, the config, how many runs it took, and what is known after one more."""
    runs.begin(rank)
    runs.kernel.configs = runs.candidates
    (of_operation, of_call), tokens = runs.sizes(32, 48), [40, 31]
    with runs.open(64, of_operation, HALF, collective=False) as op:
        step, errors = tuned_in_context(lambda: runs.call_and_compare(op, tokens, of_call, 3, 2))
        step()
        (context,) = step.report.contexts
        taken = step.report.runs
        tokens[1] += 1  # another number of rows, to be run as it was tuned
        step()
        return errors, str(context.config), taken, step.settled, len(step.report.contexts)


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


def tokens_of_call(tokens: Sequence[int], call: int) -> list[int]:
    """Return the numbers of tokens, moved on by a rank in each call."""
    return [tokens[(rank + call) % len(tokens)] for rank in range(len(tokens))]


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


def graph_call(runs, op, tokens, size, topk):
    operands = runs.operands(op, tokens, size, 8, topk)
    out = runs.new_out(op, tokens, operands)

    def refresh():
        for operand in operands:
            operand.normal_() if operand.is_floating_point() else operand.random_(-1, 8)

    return GraphCall(lambda: op(*operands, out, tokens=tokens), refresh, (out, *operands))


def replays_among_eager_calls(rank, runs, backend, **options):
    runs.begin(rank)
    of_operation, of_call = runs.sizes(128, 200)
    with runs.open(256, of_operation, HALF, backend=backend, timeout_s=60.0, **options) as op:
        calls = [
            graph_call(runs, op, tokens, of_call, topk) for tokens, topk in (([256, 200], 2), ([70, 0], 3))
        ]
        kept = kept_from_replays_among_eager_calls(rank, op, calls, lambda: runs.poison(op))
        return [runs.error_ratio(*one) for one in kept]
