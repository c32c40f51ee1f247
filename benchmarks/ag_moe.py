"""All-gather + grouped GEMM over experts: ours, NCCL and torch's grouped_mm in sequence, the parts alone.

    ./launch.sh -m benchmarks.ag_moe [--tokens T] [--hidden K] [--ffn N] [--experts E] [--topk J]
                                     [--shapes few|public|wide]
                                     [--zipf S] [--empty-ranks R] [--json FILE]

Each rank has T / W tokens of K elements and N / W columns of each expert. Ours is `AllGatherMoE`, tuned
first, inside `contextual_autotune(is_dist=True)`, which may find that NCCL + own GEMM is best.

    ours                   eager, the number of tokens of each rank given; as a CUDA graph; and not given
    NCCL + grouped_mm      all-gathers of tokens and choices, then sort, gather rows, grouped_mm, put in
                           place; and as a CUDA graph
    NCCL + own GEMM        the same with our grouped GEMM, tuned alone; and as a CUDA graph
    grouped_mm             the same without the all-gathers
    grouped GEMM, ours     `AllGatherMoE` over a single rank, tuned by itself, all tokens being there
    NCCL gather            the all-gathers alone

Every arm sorts the choices, and writes a row for each choice, token by token. Protocol and traps:
`common/arms.py`. Without GPUs a tiny shape runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.arms import Arm, Plan
from benchmarks.common.ranks import COLLECTIVES, Ranks
from benchmarks.common.tuned import Prepare, in_both_ways
from benchmarks.operations.harness import DTYPES, OURS, collective_arm
from benchmarks.operations.moe_problem import (
    EVEN,
    GROUPED,
    GROUPED_OURS,
    Choices,
    Ours,
    Routing,
    Shape,
    TorchGrouped,
    products,
    routing_of,
    run_benchmark,
)
from benchmarks.operations.peers import all_gather
from benchmarks.operations.products import explained_error, product_arm, relative_error
from dist_autotune.kernels.ag_moe import AllGatherMoE

SEQUENCE, OWN_SEQUENCE = f"{COLLECTIVES} + {GROUPED}", f"{COLLECTIVES} + own GEMM"


class Problem:
    """The tensors of one shape on this rank, and what the right results are."""

    def __init__(self, shape: Shape, dtype: torch.dtype, ranks: Ranks, routing: Routing = EVEN) -> None:
        options = {"dtype": dtype, "device": ranks.device}
        self.choices, self.dtype = Choices(shape, ranks, routing), dtype
        self._x = torch.empty(self.choices.capacity, shape.hidden, **options)
        self._all_x = torch.empty(self.choices.rows, shape.hidden, **options)
        self.x, self.all_x = self._x[: self.choices.own], self._all_x[: shape.tokens]
        self.weight = torch.randn(shape.experts, shape.ffn // ranks.world_size, shape.hidden, **options)
        self.out = torch.empty(shape.tokens * shape.topk, self.weight.shape[1], **options)
        self.limit = explained_error(dtype, shape.hidden)
        self.gigaflop = 2e-9 * self.out.numel() * shape.hidden
        self.received_mb = 1e-6 * (self.all_x.numel() - self.x.numel()) * dtype.itemsize

    def refresh(self) -> None:
        """Take new random inputs."""
        self._x.normal_()
        self.choices.refresh(self.dtype)
        self.gather_rows(self._all_x)

    def error(self, result: torch.Tensor) -> float:
        topk = self.choices.shape.topk
        tokens = self.choices.sample().to(result.device)
        rows = self.all_x[tokens].repeat_interleave(topk, dim=0)
        right = products(rows, self.weight, self.choices.all_ids[tokens].reshape(-1))
        return relative_error(result.unflatten(0, (-1, topk))[tokens].flatten(0, 1), right)

    def arm(self, name: str, prepare: Prepare, *poisoned: torch.Tensor) -> Arm:
        of_product = {"error": self.error, "limit": self.limit, "gigaflop": self.gigaflop}
        return product_arm(name, prepare, self.out, *poisoned, **of_product)

    # ---- baselines

    def gather_rows(self, rows: torch.Tensor) -> None:
        """Gather the tokens of all ranks; behind them are as many rows as empty ranks would have."""
        all_gather(rows, self._x)

    def gather(self) -> torch.Tensor:
        self.choices.gather_ids()
        self.gather_rows(self._all_x)
        return self.all_x

    def torch_alone(self) -> Callable[[], torch.Tensor]:
        grouped = TorchGrouped(self.weight, self.choices.shape.topk)
        return lambda: grouped(self.all_x, self.choices.all_ids, self.out)

    def torch_in_sequence(self) -> Callable[[], torch.Tensor]:
        multiply = self.torch_alone()

        def call() -> torch.Tensor:
            self.gather()
            return multiply()

        return call


def run_shape(shape: Shape, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of one shape."""
    problem = Problem(shape, DTYPES[options.dtype], ranks, routing_of(options))
    choices, x, weight, out = problem.choices, problem.x, problem.weight, problem.out
    both = Ours(AllGatherMoE, shape, shape.hidden, options, ranks, "ag_moe")
    op, single = both.op, both.single

    def own_in_sequence() -> torch.Tensor:
        choices.gather_ids()
        problem.gather_rows(single.shard)
        return single(single.shard[: shape.tokens], weight, choices.all_ids, out)

    ours, ours_alone = both.tune(
        lambda: op(x, weight, choices.ids, out, tokens=choices.tokens),
        lambda: single(single.shard[: shape.tokens], weight, choices.all_ids, out),
    )

    def refresh() -> None:
        problem.refresh()
        single.shard[: shape.tokens].copy_(problem.all_x)

    own = in_both_ways(OWN_SEQUENCE, ours_alone.then(own_in_sequence))
    arms = [
        problem.arm(OURS, ours.eager),
        problem.arm("ours, graph", ours.graph),
        problem.arm("ours, tokens not given", ours.then(lambda: op(x, weight, choices.ids, out))),
        *(problem.arm(*way) for way in in_both_ways(SEQUENCE, problem.torch_in_sequence)),
        *(problem.arm(*way, single.shard) for way in own),
        problem.arm(GROUPED, problem.torch_alone),
        problem.arm(GROUPED_OURS, ours_alone.eager),
        collective_arm(
            f"{COLLECTIVES} gather",
            problem.gather,
            megabytes=problem.received_mb,
            poison=lambda: problem.all_x.fill_(math.nan),
        ),
    ]
    return both.measured(arms, refresh, plan)


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        op="ag_moe",
        title="All-gather + grouped GEMM over experts",
        sequence=SEQUENCE,
        own_sequence=OWN_SEQUENCE,
        run_shape=run_shape,
    )
