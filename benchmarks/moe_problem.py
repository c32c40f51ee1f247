"""What the benchmarks over experts share: shapes, the choices of all ranks, torch's grouped GEMM."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from common import (
    ON_GPU,
    Plan,
    Ranks,
    Unsupported,
    add_run_options,
    describe_run,
    run_on_ranks,
    write_json,
)
from render import summary

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PATIENCE_S = 60.0  # of a rank for its peers inside our operation
LIMIT_S = 900.0  # for everything about one shape, tuning and compiling included
SAMPLE = 64  # tokens of each rank whose results are checked

# Old names warn in torch 2.13, whose new ones 2.11 does not have.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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


def alone(ranks: Ranks) -> dist.ProcessGroup:
    """Return a group of this rank only."""
    groups = [dist.new_group([rank]) for rank in range(ranks.world_size)]
    return groups[ranks.rank]


ALONE_BACKEND = "torch" if ON_GPU else "shm"  # for a single rank it is plain memory


def parse(description: str | None) -> argparse.Namespace:
    """Return the options; `shapes` is the tuple of shapes to run."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in (
        ("tokens", "tokens of all ranks together"),
        ("hidden", "size of a token"),
        ("ffn", "columns of an expert, of all ranks together"),
        ("experts", "number of experts"),
        ("topk", "experts of a token"),
    ):
        parser.add_argument(f"--{name}", type=int, default=getattr(DEFAULT, name), help=text)
    parser.add_argument("--shapes", choices=["public"], help="a list of model shapes, instead of one")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument(
        "--backend", default="auto", help="symmetric memory of ours: auto, torch, nvshmem, shm"
    )
    parser.add_argument("--retune", action="store_true", help="ignore what the cache holds")
    add_run_options(parser, warm_ups=120)
    options = parser.parse_args()
    if options.shapes and not ON_GPU:
        parser.error("--shapes public needs GPUs: the interpreter would take days")
    given = Shape(options.tokens, options.hidden, options.ffn, options.experts, options.topk)
    options.shapes = PUBLIC if options.shapes else (given,)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    uneven = [str(shape) for shape in options.shapes if shape.tokens % ranks or shape.ffn % ranks]
    if uneven:
        parser.error(f"tokens and ffn must be multiples of the {ranks} ranks; not so: {', '.join(uneven)}")
    return options


def run_benchmark(
    description: str | None,
    *,
    op: str,
    title: str,
    ours: str,
    ratios: Callable[[str], list[tuple[str, str]]],
    run_shape: Callable[[Shape, argparse.Namespace, Plan, Ranks], dict[str, Any]],
) -> None:
    """Run all shapes, show the table and leave the record; `ratios` gets the name of the collectives."""
    options = parse(description)

    def body(ranks: Ranks) -> int:
        plan = Plan(warm_ups=options.warm_ups, iterations=options.iterations, limit_s=LIMIT_S)
        record = describe_run(ranks, op=op, title=title, commit=options.commit, plan=plan)
        record["case_title"] = "tokens x hidden x ffn, experts"
        named = ratios(ranks.collectives)
        record["ratios"] = [{"name": f"{of} / {to}", "of": of, "to": to} for of, to in named]
        record["cases"] = []
        for shape in options.shapes:
            record["cases"].append(run_shape(shape, options, plan, ranks))
            ranks.say(f"{shape}: done")
            if options.json is not None and ranks.rank == 0:
                write_json(options.json, record)
        ranks.say(f"\n{summary(record)}")
        timed = [arm for case in record["cases"] for arm in case["arms"] if arm["name"] == ours]
        trouble = [text for case in record["cases"] for text in case["trouble_at_closing"]]
        return int(bool(trouble) or any("unavailable" in arm for arm in timed))

    run_on_ranks(body)
