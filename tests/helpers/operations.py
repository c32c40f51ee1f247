"""One protocol for all operations over symmetric memory, and what tests of all of them do on a rank."""

import abc
import functools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from operation_runs import (
    ON_GPUS,
    delay_tasks,
    device,
    left_as_before,
    seed_and_leave_one,
    synchronize,
    tuned_in_context,
)

from dist_autotune.kernels.signals import as_patience

HALF = torch.float16
PATIENCE_S = 60.0  # less than a test has
SHORT_S = 1.5  # of waits that are to end
ALWAYS = {"collective": True, "timeout_s": PATIENCE_S}
Given = tuple[torch.Tensor, ...]


def factors(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fresh random rows [m, k] and a weight [n, k]."""
    return torch.randn(m, k, device=device()).to(dtype), torch.randn(n, k, device=device()).to(dtype)


def sums_of_ranks(a: torch.Tensor, weight: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return, in float32, what all ranks' products add up to, and so those of absolute values.

    Products of halves are exact in float32. Of absolute values the second is of ranks' parts, the third of
    all that is added up.
    """
    a, weight = a.float(), weight.float()
    part = a @ weight.T
    sums = torch.stack([part, part.abs(), a.abs() @ weight.abs().T])
    if dist.is_initialized():
        dist.all_reduce(sums, group=group)
    return sums


SHAPES = {  # rows, or tokens, of each rank, K, N, experts, topk
    "whole tiles": ((32, 32), 32, 32, 2, 2),
    "ragged tokens, K, N and experts": ((13, 20), 24, 40, 5, 3),
    "a rank without tokens": ((0, 9), 16, 16, 3, 2),
    "no tokens anywhere": ((0, 0), 16, 16, 3, 2),
    "more experts than choices": ((2, 1), 16, 24, 17, 2),
    "one choice, one expert, one column": ((5, 4), 16, 1, 1, 1),
    "rows that TMA cannot address": ((7, 11), 7, 21, 4, 2),
}

OF_EXPERTS_ALONE = ("no tokens anywhere", "more experts than choices")
DENSE_SHAPES = {name: shape for name, shape in SHAPES.items() if name not in OF_EXPERTS_ALONE}


class Runs(abc.ABC):
    """What is done with one of the operations on a rank.

    A call multiplies by weights [N, K], or [experts, N, K]. One of N and K is the operation's, the other the
    call's: `sizes` says which. `rows` are those of each rank; where all must pass as many, the first counts.
    """

    name: str
    kernel: Any
    candidates: list[Any]
    shapes = SHAPES
    can_be_in_place = False
    asks_for_rows = True  # those of its peers, where a call is not told them
    most_choices: int | None = None  # how many ranks or indices have candidates of their own; all
    own_operands: int | None = None  # so many differ from rank to rank; all
    result_of_peer: Any = slice(None)  # what of a result on rank 0 needs rank 1

    @property
    def kernels(self) -> list[tuple[Any, list[Any]]]:
        """Return what is tuned, each with its candidates."""
        return [(self.kernel, self.candidates)]

    def begin(self, rank: int, candidate: int | None = None) -> None:
        """Seed this rank and leave its kernels one candidate: by default another one on each rank."""
        seed_and_leave_one(rank, self.kernel, self.candidates, candidate)

    @abc.abstractmethod
    def sizes(self, k: int, n: int) -> tuple[int, int]:
        """Return the size that the operation is opened with, and that of a call."""

    @abc.abstractmethod
    def open(self, rows: int, size: int, dtype: torch.dtype = HALF, group: Any = None, **named: Any) -> Any:
        """Return the operation for up to so many rows of each rank; collective."""

    @abc.abstractmethod
    def buffers(self, op: Any) -> Sequence[torch.Tensor]:
        """Return what is written before it is read."""

    @abc.abstractmethod
    def operands(
        self,
        op: Any,
        rows: Sequence[int],
        size: int,
        experts: int = 3,
        topk: int = 2,
        kind: str = "any",
        group: Any = None,
    ) -> Given:
        """Return fresh inputs of a call, in its order; the weight is the second."""

    @abc.abstractmethod
    def new_out(self, op: Any, rows: Sequence[int], operands: Given) -> torch.Tensor:
        """Return an output for that call, full of NaN."""

    @abc.abstractmethod
    def error_ratio(self, out: torch.Tensor, *operands: torch.Tensor, group: Any = None) -> float:
        """Return the relative error against float32 as a multiple of what the arithmetic explains."""

    def call(
        self, op: Any, operands: Given, out: torch.Tensor, rows: Sequence[int], *, told: bool = True
    ) -> torch.Tensor:
        """Make the call; told: with the rows of each rank, where it takes them."""
        assert op(*operands, out) is out
        return out

    def call_as_captured(
        self, op: Any, operands: Given, out: torch.Tensor, rows: Sequence[int]
    ) -> torch.Tensor:
        """Do eagerly what a captured call does at each replay."""
        with mock.patch.object(op, "_in_steps", return_value=True):
            return self.call(op, operands, out, rows)

    def given(self, op: Any, operands: Given, *, told: bool, in_place: bool) -> Given:
        """Return the operands as the call is given them."""
        return operands

    def forsake(self, op: Any, timeout_s: float) -> None:
        """Let the next calls give up soon; those that are to succeed have had minutes."""
        op._patience_ticks = as_patience(timeout_s)

    def poison(self, op: Any) -> None:
        """Fill the buffers with NaN, so that whatever is read before it arrives shows."""
        for buffer in self.buffers(op):
            buffer.fill_(255 if buffer.dtype == torch.uint8 else float("nan"))  # of fp8 and its scales, too
        synchronize()

    @contextmanager
    def opened(
        self, rank: int, rows: int, size: int, *args: Any, candidate: int | None = None, **named: Any
    ) -> Iterator[Any]:
        """Begin and open it, on all ranks that there are; what is written before it is read is NaN."""
        self.begin(rank, candidate)
        with self.open(rows, size, *args, **named) as op:
            self.poison(op)
            yield op

    def fresh_call(self, op: Any, rows: Sequence[int], size: int = 16, *, told: bool = True) -> torch.Tensor:
        """Return the result of a call with fresh inputs, though the ranks may not agree on `rows`."""
        operands = self.operands(op, rows, size)
        return self.call(op, operands, self.new_out(op, rows, operands), rows, told=told)

    def call_and_compare(
        self, op: Any, rows: Sequence[int], size: int, experts: int = 3, topk: int = 2,
        *, kind: str = "any", told: bool = False, in_place: bool = False, group: Any = None,
    ) -> float:  # fmt: skip
        """Return the error of one call with fresh inputs and an output full of NaN."""
        operands = self.operands(op, rows, size, experts, topk, kind, group)
        out = self.new_out(op, rows, operands)
        self.call(op, self.given(op, operands, told=told, in_place=in_place), out, rows, told=told)
        return self.error_ratio(out, *operands, group=group)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Do as `begin` in this process, of which later ranks are forks; undo it at the end."""
        with ExitStack() as stack:
            for kernel, _ in self.kernels:
                stack.enter_context(left_as_before(kernel))
            self.begin(0)
            yield

    @contextmanager
    def alone(self, rows: int, size: int, dtype: torch.dtype = HALF, **named: Any) -> Iterator[Any]:
        """Open it for one rank, in this process."""
        with self.begun(), self.open(rows, size, dtype, backend="shm", **named) as op:
            yield op


class DenseRuns(Runs):
    """An operation whose weight is a matrix, and of which all ranks pass as many rows."""

    shapes, asks_for_rows = DENSE_SHAPES, False

    def rows_of(self, rows: Sequence[int]) -> int:
        return max(1, rows[0])


# ---- on a rank


def rows_of_call(rows: Sequence[int], call: int) -> list[int]:
    """Return the numbers of rows, moved on by a rank in each call."""
    return [rows[(rank + call) % len(rows)] for rank in range(len(rows))]


def three_calls(rank, runs, rows, k, n, experts, topk, dtype=HALF, kind="any", **options):
    """Let the host ask for the tokens, then be told, then (where that is possible) call in place.

    Where nobody asks, the second call is made on GPUs alone: other tests call again and again.
    """
    ways = [{"told": False}, *([{"told": True}] if runs.asks_for_rows or ON_GPUS else [])]
    ways += [{"in_place": True}] if runs.can_be_in_place else []
    of_operation, of_call = runs.sizes(k, n)
    with runs.opened(rank, max(*rows, 1), of_operation, dtype, **options) as op:
        return [
            runs.call_and_compare(op, rows_of_call(rows, call), of_call, experts, topk, kind=kind, **way)
            for call, way in enumerate(ways)
        ]


def many_calls(rank, runs, delays, **options):
    """Have each rank run another candidate and keep every result until the end.

    No rank waits for another between calls, save the hosts for counts.
    """
    world, kept = dist.get_world_size(), []
    of_operation, _ = runs.sizes(16, 33)
    with runs.opened(rank, 24, of_operation, **options) as op:
        for call in range(4):
            rows = [(24, 7, 0, 5)[(p + call) % 4] for p in range(world)]
            size = (24, 16)[call % 2]
            operands = runs.operands(op, rows, size, (3, 5)[call % 2], (2, 1, 3)[call % 3])
            if delays == "one" and rank == call % world:
                time.sleep(0.1)
            if delays == "random":
                time.sleep(random.random() / 20)
            out = runs.call(op, operands, runs.new_out(op, rows, operands), rows, told=call != 3)
            kept.append((out, *operands))
        op.check()
    return [runs.error_ratio(*one) for one in kept]


def one_candidate(rank, runs, index, rows=(34, 17), k=24, n=40, experts=3, **options):
    of_operation, of_call = runs.sizes(k, n)
    with runs.opened(rank, rows[0], of_operation, candidate=index, **options) as op:
        return [runs.call_and_compare(op, rows_of_call(rows, call), of_call, experts, 2) for call in range(2)]


def unequal_inner_parts(rank, runs):
    """Let each rank have a size of its own: of K, or where that is the operation's, of N."""
    with runs.opened(rank, 9, 16) as op:
        return [runs.call_and_compare(op, [9, 4], 8 + 30 * rank) for _ in range(2)]


def by_columns(rank, runs, index, k):
    rows, (of_operation, of_call) = [13, 20], runs.sizes(k, k)
    with runs.opened(rank, 20, of_operation, candidate=index) as op:
        operands = left, weight, *rest = runs.operands(op, rows, of_call, 5, 3)
        given = (left, weight.mT.contiguous().mT, *rest)
        return [runs.error_ratio(runs.call(op, given, runs.new_out(op, rows, operands), rows), *operands)]


def two_operations(rank, runs):
    runs.begin(rank)
    with runs.open(12, 24) as first, runs.open(20, 16, torch.bfloat16) as second:
        sizes = ((first, [12, 5], 16, 3, 2), (second, [3, 20], 24, 2, 3))
        return [runs.call_and_compare(*each) for each in sizes * 2]


def in_odd_places(rank, runs, **options):
    """Pass slices of larger tensors, whose rows begin at odd addresses; nothing beside `out` is written."""
    of_operation, of_call = runs.sizes(32, 20)
    rows = [8] * dist.get_world_size()
    with runs.opened(rank, 8, of_operation, **options) as op:
        operands = runs.operands(op, rows, of_call)
        out = runs.new_out(op, rows, operands)
        room = torch.full((*out.shape[:-1], out.shape[-1] + 30), float("nan"), dtype=HALF, device=device())
        columns = slice(1, 1 + out.shape[-1])
        runs.call(op, tuple(map(in_a_larger_one, operands)), room[..., columns], rows, told=False)
        beside = room[..., 0].isnan().all() and room[..., columns.stop :].isnan().all()
        return [runs.error_ratio(room[..., columns], *operands), 0.0 if beside else 9.0]


def in_a_larger_one(tensor):
    """Return the tensor as a slice; float32, of weights of choices, as float64."""
    if tensor.dim() < 2:
        return tensor
    dtype = torch.float64 if tensor.dtype == torch.float32 else tensor.dtype
    *batch, rows, columns = tensor.shape
    room = torch.zeros((*batch, rows + 4, columns + 18), dtype=dtype, device=tensor.device)
    return room[..., 2 : 2 + rows, 3 : 3 + columns].copy_(tensor)


def late_pushes(rank, runs):
    """Copy late from rank 0: its peers' kernels are waiting for its rows by then."""
    with runs.opened(rank, 16, 16, torch.float32) as op:
        if rank == 0:
            delay_tasks(op, "copy", 0.2)
        return [runs.call_and_compare(op, [16, 9, 12, 3][: op.world_size], 16) for _ in range(2)]


def in_a_subset(rank, runs, **options):
    runs.begin(rank)
    group = dist.new_group([0, 2])
    if rank not in (0, 2):
        return [0.0]
    with runs.open(9, 16, HALF, group, **options) as op:
        return [runs.call_and_compare(op, [9, 4], 16, group=group) for _ in range(2)]


def tuned_with_other_row_counts(rank, runs, rows=(40, 31), k=32, n=40):
    """Return the errors of all runs, winners, how many runs it took, and what is known after one more."""
    runs.begin(rank)
    for kernel, candidates in runs.kernels:
        kernel.configs = candidates
    (of_operation, of_call), rows = runs.sizes(k, n), [*rows]
    with runs.open(64, of_operation) as op:
        step, errors = tuned_in_context(lambda: runs.call_and_compare(op, rows, of_call))
        step()
        taken, contexts = step.report.runs, step.report.contexts
        winners = {context.kernel: str(context.config) for context in contexts}
        rows[1] += 1  # another number of rows, to be run as it was tuned
        step()
        return errors, winners, taken, step.settled and len(step.report.contexts) == len(contexts)


def replays_among_eager_calls(rank, runs, backend, **options):
    """Call eagerly and replay, at random; no rank waits for another, or its host for the device."""
    runs.begin(rank)
    order, calls, kept = random.Random(7), [], []
    of_operation, of_call = runs.sizes(128, 200)
    with runs.open(256, of_operation, backend=backend, timeout_s=60.0, **options) as op:
        for rows, topk in (([256, 200], 2), ([70, 0], 3)):
            operands = runs.operands(op, rows, of_call, 8, topk)
            tensors = runs.new_out(op, rows, operands), *operands
            call = functools.partial(runs.call, op, operands, tensors[0], rows)
            calls.append((call, torch.cuda.CUDAGraph(), tensors))
        for call, graph, _ in calls:
            call()  # loads the kernels
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
        runs.poison(op)
        for _ in range(40):
            if order.randrange(4) == rank:
                torch.cuda._sleep(1_000_000)
            call, graph, (out, *operands) = order.choice(calls)
            is_eager = order.random() < 0.5
            for operand in operands[: runs.own_operands]:
                operand.normal_() if operand.is_floating_point() else operand.random_(-1, 8)
            out.fill_(float("nan"))
            call() if is_eager else graph.replay()
            kept.append([tensor.clone() for tensor in (out, *operands)])
        op.check()
        return [runs.error_ratio(*one) for one in kept]
