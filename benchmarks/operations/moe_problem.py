"""What the benchmarks over experts share: shapes, the choices of all ranks, torch's grouped GEMM."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.arms import Arm, Plan
from benchmarks.common.cases import Benchmark, Ratio
from benchmarks.common.ranks import ON_GPU, Ranks, Unsupported
from benchmarks.common.tuned import Tuned
from benchmarks.operations.harness import (
    DTYPES,
    LIMIT_S,
    OURS,
    OURS_BY_STORES,
    PATIENCE_S,
    measured_case,
    parse,
)
from benchmarks.operations.peers import all_gather
from dist_autotune.formatting import counted

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
FEW = tuple(Shape(tokens, 4096, 14336, 8, 2) for tokens in (16, 32, 64, 128, 256, 512))
MODELS = tuple((shape.hidden, shape.ffn, shape.experts, shape.topk) for shape in PUBLIC)
WIDE = tuple(Shape(tokens, *model) for tokens in (16, 128, 1024, 4096, 16384) for model in MODELS)
LISTS = {"few": FEW, "public": PUBLIC, "wide": WIDE}
DEFAULT = PUBLIC[0] if ON_GPU else Shape(24, 32, 64, 4, 2)
SIZES = {
    "tokens": "tokens of all ranks together",
    "hidden": "size of a token",
    "ffn": "columns of an expert, of all ranks together",
    "experts": "number of experts",
    "topk": "experts of a token",
}


@dataclass(frozen=True)
class Routing:
    """How tokens lie and choose. The ranks from the last on that are `empty` hold no tokens."""

    zipf: float = 0.0  # expert e is chosen in proportion to (e + 1) ** -zipf; 0: all alike
    empty: int = 0

    def __str__(self) -> str:
        zipf = f", Zipf {self.zipf:g}" if self.zipf else ""
        return zipf + (f", {counted(self.empty, 'empty rank')}" if self.empty else "")


EVEN = Routing()


class Choices:
    """The choices of all ranks' tokens, new at every refresh; as many tokens on each rank that is not empty.

    Collectives want as many rows of every rank: an empty one adds rows that nobody reads, behind the others.
    """

    def __init__(self, shape: Shape, ranks: Ranks, routing: Routing) -> None:
        self.filled = ranks.world_size - routing.empty
        self.shape, self.capacity = shape, shape.tokens // self.filled
        self.tokens = [self.capacity] * self.filled + [0] * routing.empty
        self.own, self.rows = self.tokens[ranks.rank], self.capacity * ranks.world_size
        place = {"device": ranks.device}
        numbers = torch.arange(1, shape.experts + 1, **place)
        self._popularity = -routing.zipf * numbers.log()
        self._ids = torch.zeros(self.capacity, shape.topk, dtype=torch.int64, **place)
        self._weights = torch.zeros(self.capacity, shape.topk, **place)
        self._all_ids = torch.zeros(self.rows, shape.topk, dtype=torch.int64, **place)
        self._all_weights = torch.zeros(self.rows, shape.topk, **place)
        self.ids, self.weights = self._ids[: self.own], self._weights[: self.own]
        self.all_ids, self.all_weights = self._all_ids[: shape.tokens], self._all_weights[: shape.tokens]

    def refresh(self, dtype: torch.dtype) -> None:
        """Choose the experts of random scores; the weights are numbers that `dtype` can hold."""
        exponential = torch.empty_like(self._popularity.expand(self.capacity, -1)).exponential_()
        scores = self._popularity - exponential.log()
        best, ids = scores.softmax(dim=1).topk(self.shape.topk, dim=1)
        self._ids.copy_(ids)
        self._weights.copy_(best.to(dtype))
        self.gather_ids()
        self.gather_weights()

    def gather_ids(self) -> None:
        all_gather(self._all_ids, self._ids)

    def gather_weights(self) -> None:
        all_gather(self._all_weights, self._weights)

    def sample(self) -> torch.Tensor:
        """Return some tokens of each rank that has any, as numbers among those of all."""
        count = min(SAMPLE, self.capacity)
        return torch.cat([torch.arange(count) + rank * self.capacity for rank in range(self.filled)])


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
    """One of our operations over all ranks and, with all tokens there, over this rank alone; each tuned.

    Behind a collective the former launches the latter's kernel: then that is tuned there.
    """

    def __init__(
        self,
        operation: Callable[..., Any],
        shape: Shape,
        size: int,
        options: argparse.Namespace,
        ranks: Ranks,
        name: str,
    ) -> None:
        dtype, capacity = DTYPES[options.dtype], shape.tokens // (ranks.world_size - options.empty_ranks)
        settings = {"timeout_s": PATIENCE_S, "max_topk": shape.topk}
        groups = [dist.new_group([rank]) for rank in range(ranks.world_size)]
        # For a single rank symmetric memory is plain memory.
        backend = "torch" if ON_GPU else "shm"
        self.op = operation(capacity, size, dtype, backend=options.backend, **settings)
        self.single = operation(
            capacity * ranks.world_size, size, dtype, group=groups[ranks.rank], backend=backend, **settings
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

    def measured(
        self,
        arms: Sequence[Arm],
        refresh: Callable[[], None],
        plan: Plan,
        storing: tuple[Any, Tuned] | None = None,
    ) -> dict[str, Any]:
        """Time the arms, close the operations and return the record of this shape.

        storing: ours that stores to the peers, and its tuned call.
        """
        tuned, operations = {"tuned": self.all_ranks, "tuned_alone": self.alone}, [self.op, self.single]
        if storing is not None:
            operations.append(storing[0])
            tuned["tuned_by_stores"] = storing[1]
        return measured_case(
            f"{self._shape}{routing_of(self._options)}",
            plan,
            self._ranks,
            arms,
            refresh=refresh,
            tuned=tuned,
            operations=operations,
            dtype=self._options.dtype,
            symmetric_memory=self.op.backend,
        )


def routing_of(options: argparse.Namespace) -> Routing:
    return Routing(options.zipf, options.empty_ranks)


def add_routing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--zipf", type=float, default=0.0, help="exponent of the experts' popularity; 0: alike"
    )
    parser.add_argument("--empty-ranks", type=int, default=0, help="ranks, the last ones, without tokens")


def run_benchmark(
    description: str | None,
    *,
    op: str,
    title: str,
    sequence: str,
    own_sequence: str,
    run_shape: Callable[[Shape, argparse.Namespace, Plan, Ranks], dict[str, Any]],
    can_store: bool = False,
) -> None:
    """Run all shapes, show the table and leave the record.

    The sequences are the arms of torch's and of our grouped GEMM with collectives. can_store: there is an arm
    of ours that stores to the peers.
    """

    def add_more(parser: argparse.ArgumentParser) -> None:
        add_routing(parser)
        if can_store:
            parser.add_argument(
                "--by-stores", action="store_true", help="time ours that stores to the peers, too"
            )

    options = parse(
        description, SIZES, lists=LISTS, default=DEFAULT, shared=("tokens", "ffn"), add_more=add_more
    )
    filled = int(os.environ.get("WORLD_SIZE", "1")) - options.empty_ranks
    if options.empty_ranks < 0 or filled < 1 or any(shape.tokens % filled for shape in options.shapes):
        sys.exit(f"--empty-ranks {options.empty_ranks}: the tokens are shared by {filled} ranks, evenly")
    Benchmark(
        op=op,
        title=title,
        case_title="tokens x hidden x ffn, experts",
        ratios=[
            Ratio(of=sequence, to=OURS),
            Ratio(of=f"{sequence}, graph", to="ours, graph", name=f"graph: {sequence} / ours"),
            Ratio(of=own_sequence, to=OURS),
            Ratio(of=OURS, to=GROUPED_OURS),
            Ratio(of=OURS, to=OURS_BY_STORES),
            Ratio(of=GROUPED, to=GROUPED_OURS),
        ],
        limit_s=LIMIT_S,
        needed=(OURS,),
    ).start(options, options.shapes, run_shape)
