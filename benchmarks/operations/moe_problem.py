"""What the benchmarks over experts share: shapes, the choices of all ranks, torch's grouped GEMM."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.arms import Arm
from benchmarks.common.ranks import ON_GPU, Ranks, Unsupported, run_on_ranks
from benchmarks.common.tuned import Tuned
from benchmarks.operations.harness import (
    DTYPES,
    OURS,
    PATIENCE_S,
    all_gather,
    measured_case,
    new_record,
    parse,
    run_shapes,
)

GROUPED, GROUPED_OURS = "grouped_mm", "grouped GEMM, ours"
SAMPLE = 64  # tokens of each rank whose results are checked


@dataclass(frozen=True)
class Shape:
    tokens: int  # of all ranks together
    hidden: int
    ffn: int  # of all ranks together
    experts: int
    topk: int

    def __str__(self) -> str:
        return f"{self.tokens} x {self.hidden} x {self.ffn}, {self.topk} of {self.experts}"


PUBLIC = (
    Shape(8192, 4096, 14336, 8, 2),
    Shape(8192, 2048, 1408, 60, 4),
    Shape(8192, 8192, 8192, 32, 4),
)
DEFAULT = PUBLIC[0] if ON_GPU else Shape(24, 32, 64, 4, 2)
SIZES = {
    "tokens": "tokens of all ranks together",
    "hidden": "size of a token",
    "ffn": "columns of an expert, of all ranks together",
    "experts": "number of experts",
    "topk": "experts of a token",
}


class Choices:
    """The choices of all ranks' tokens, new at every refresh; equal numbers of tokens on all ranks."""

    def __init__(self, shape: Shape, ranks: Ranks) -> None:
        world, device = ranks.world_size, ranks.device
        self.shape, self.own = shape, shape.tokens // world
        self.tokens = [self.own] * world
        self.ids = torch.zeros(self.own, shape.topk, dtype=torch.int64, device=device)
        self.weights = torch.zeros(self.own, shape.topk, device=device)
        self.all_ids = torch.zeros(shape.tokens, shape.topk, dtype=torch.int64, device=device)
        self.all_weights = torch.zeros(shape.tokens, shape.topk, device=device)

    def refresh(self, dtype: torch.dtype) -> None:
        """Choose the experts of random scores; the weights are numbers that `dtype` can hold."""
        scores = torch.randn(self.own, self.shape.experts, device=self.ids.device)
        best, ids = scores.softmax(dim=1).topk(self.shape.topk, dim=1)
        self.ids.copy_(ids)
        self.weights.copy_(best.to(dtype))
        all_gather(self.all_ids, self.ids)
        all_gather(self.all_weights, self.weights)

    def sample(self) -> torch.Tensor:
        """Return some tokens of each rank, as numbers among those of all."""
        count = min(SAMPLE, self.own)
        return torch.cat([torch.arange(count) + rank * self.own for rank in range(len(self.tokens))])


def products(rows: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the float32 reference: each row times its expert's weight.T."""
    found = torch.empty(len(rows), weight.shape[1], device=rows.device)
    for expert in range(weight.shape[0]):
        chosen = ids == expert
        found[chosen] = rows[chosen].float() @ weight[expert].float().T
    return found


def grouped_mm() -> Callable[..., torch.Tensor]:
    """Return torch's grouped GEMM."""
    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        raise Unsupported(f"torch {torch.__version__} has no grouped_mm")
    return found


class TorchGrouped:
    """torch's grouped GEMM of choices: they are sorted, their rows gathered, multiplied and put in place.

    Without a look of the host at anything, as a careful user would write it.
    """

    def __init__(self, weight: torch.Tensor, choices_of_a_row: int) -> None:
        self._multiply = grouped_mm()
        self._columns, self._choices = weight.mT, choices_of_a_row
        self._experts = torch.arange(weight.shape[0], device=weight.device)

    def __call__(self, rows: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write each choice's product to its row of `out`."""
        chosen, order = ids.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(chosen, self._experts, right=True).to(torch.int32)
        out[order] = self._multiply(rows[order // self._choices], self._columns, offs=ends)
        return out


class Ours:
    """One of our operations over all ranks and, with all tokens there, over this rank alone; each tuned."""

    def __init__(
        self,
        operation: Callable[..., Any],
        shape: Shape,
        size: int,
        options: argparse.Namespace,
        ranks: Ranks,
        name: str,
    ) -> None:
        dtype, own = DTYPES[options.dtype], shape.tokens // ranks.world_size
        settings = {"timeout_s": PATIENCE_S, "max_topk": shape.topk}
        groups = [dist.new_group([rank]) for rank in range(ranks.world_size)]
        # For a single rank symmetric memory is plain memory.
        backend = "torch" if ON_GPU else "shm"
        self.op = operation(own, size, dtype, backend=options.backend, **settings)
        self.single = operation(
            shape.tokens, size, dtype, group=groups[ranks.rank], backend=backend, **settings
        )
        self._shape, self._options, self._ranks, self._name = shape, options, ranks, name

    def tune(
        self, call: Callable[[], torch.Tensor], alone: Callable[[], torch.Tensor]
    ) -> tuple[Tuned, Tuned]:
        """Return the call of all ranks and that of this rank alone."""
        retune, name = self._options.retune, f"{self._name} benchmark"
        self.all_ranks = Tuned(call, check=self.op.check, name=name, retune=retune)
        self.alone = Tuned(alone, check=self.single.check, name=f"{name}, alone", retune=retune)
        return self.all_ranks, self.alone

    def measured(self, arms: Sequence[Arm], refresh: Callable[[], None]) -> dict[str, Any]:
        """Time the arms, close both operations and return the record of this shape."""
        return measured_case(
            self._shape,
            self._options,
            self._ranks,
            arms,
            refresh=refresh,
            tuned={"tuned": self.all_ranks, "tuned_alone": self.alone},
            operations=[self.op, self.single],
            symmetric_memory=self.op.backend,
        )


def run_benchmark(
    description: str | None,
    *,
    op: str,
    title: str,
    sequence: Callable[[str], str],
    run_shape: Callable[[Shape, argparse.Namespace, Ranks], dict[str, Any]],
) -> None:
    """Run all shapes, show the table and leave the record.

    `sequence` gets the name of the collectives and returns that of the arm of torch's grouped GEMM with them.
    """
    options = parse(description, SIZES, public=PUBLIC, default=DEFAULT, shared=("tokens", "ffn"))

    def body(ranks: Ranks) -> int:
        pairs = [(sequence(ranks.collectives), OURS), (OURS, GROUPED_OURS), (GROUPED, GROUPED_OURS)]
        record = new_record(
            options,
            ranks,
            op=op,
            title=title,
            case_title="tokens x hidden x ffn, experts",
            ratios=[(f"{of} / {to}", of, to) for of, to in pairs],
        )
        return run_shapes(record, options, ranks, lambda shape: run_shape(shape, options, ranks))

    run_on_ranks(body)
