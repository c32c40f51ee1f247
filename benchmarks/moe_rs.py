"""Grouped GEMM over experts + reduce-scatter: ours, torch's grouped_mm and NCCL in sequence, the parts alone.

    ./launch.sh -m benchmarks.moe_rs [--tokens T] [--hidden N] [--ffn K] [--experts E] [--topk J]
                                     [--shapes few|public|wide]
                                     [--zipf S] [--empty-ranks R] [--by-stores] [--json FILE]

Each rank has K / W elements of the rows of all T * J choices, and of each expert. Ours is `MoEReduceScatter`,
tuned first, inside `contextual_autotune(is_dist=True)`, which may find that own GEMM + NCCL is best.

    ours                   eager, the number of tokens of each rank given; as a CUDA graph; and not given
    ours, by stores        with --by-stores: ours whose kernel stores to the peers; and as a CUDA graph
    grouped_mm + NCCL      all-gathers of choices and weights, then sort, gather rows, grouped_mm,
                           put in place, weigh and add by a batched product, reduce-scatter; and as a
                           CUDA graph
    own GEMM + NCCL        the same with our grouped GEMM, tuned alone; and as a CUDA graph
    grouped_mm             the same without collectives
    grouped GEMM, ours     `MoEReduceScatter` over a single rank, tuned by itself: no exchange
    NCCL scatter           the reduce-scatter alone

Protocol and traps: `common/arms.py`. Without GPUs a tiny shape runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.arms import Arm, Plan
from benchmarks.common.ranks import COLLECTIVES, Ranks
from benchmarks.common.tuned import Tuned, in_both_ways
from benchmarks.operations.harness import DTYPES, OURS, OURS_BY_STORES, PATIENCE_S, collective_arm
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
from benchmarks.operations.peers import reduce_scatter
from benchmarks.operations.products import explained_error, product_arm, relative_error
from dist_autotune.kernels.moe_rs import MoEReduceScatter

SEQUENCE, OWN_SEQUENCE = f"{GROUPED} + {COLLECTIVES}", f"own GEMM + {COLLECTIVES}"


class Problem:
    """The tensors of one shape on this rank, and what the right results are."""

    def __init__(self, shape: Shape, dtype: torch.dtype, ranks: Ranks, routing: Routing = EVEN) -> None:
        options = {"dtype": dtype, "device": ranks.device}
        self.choices, self.dtype, self.ranks = Choices(shape, ranks, routing), dtype, ranks
        inner, choices = shape.ffn // ranks.world_size, shape.tokens * shape.topk
        self.y = torch.empty(choices, inner, **options)
        self.weight = torch.randn(shape.experts, shape.hidden, inner, **options)
        self.products = torch.empty(choices, shape.hidden, **options)
        self._combined = torch.zeros(self.choices.rows, 1, shape.hidden, **options)
        self._out = torch.empty(self.choices.capacity, shape.hidden, **options)
        self.combined, self.out = self._combined[: shape.tokens], self._out[: self.choices.own]
        # A product, a rank's part and the sum are rounded once each; a ring rounds its sum at every hop.
        roundings = 2 + max(1, ranks.world_size - 1)
        self.limit = explained_error(dtype, shape.ffn * shape.topk, roundings)
        self.gigaflop = 2e-9 * self.products.numel() * inner
        self.sent_mb = 1e-6 * (self._combined.numel() - self._out.numel()) * dtype.itemsize

    def refresh(self) -> None:
        """Take new random inputs."""
        self.y.normal_()
        self.choices.refresh(self.dtype)
        self.combined.normal_()

    def part(self) -> torch.Tensor:
        """Return this rank's part of the sums of some tokens of each rank, in float32."""
        topk = self.choices.shape.topk
        tokens = self.choices.sample().to(self.y.device)
        rows = self.y.unflatten(0, (-1, topk))[tokens].flatten(0, 1)
        found = products(rows, self.weight, self.choices.all_ids[tokens].reshape(-1))
        weights = self.choices.all_weights[tokens].reshape(-1, 1)
        return (found * weights).unflatten(0, (-1, topk)).sum(dim=1)

    def sum_error(self, result: torch.Tensor) -> float:
        right = self.part()
        dist.all_reduce(right)
        if not self.choices.own:
            return 0.0
        right = right.chunk(self.choices.filled)[self.ranks.rank]
        return relative_error(result[: len(right)], right)

    def part_error(self, result: torch.Tensor) -> float:
        right = self.part()
        found = result.reshape(-1, right.shape[1])[self.choices.sample().to(right.device)]
        return relative_error(found, right)

    def arm(
        self, name: str, prepare: Callable[[], Callable[[], torch.Tensor]], *, of_part: bool = False
    ) -> Arm:
        """Return an arm that computes this rank's rows of the sum, or its part of all of them."""
        written, error = (self.combined, self.part_error) if of_part else (self.out, self.sum_error)
        of_product = {"limit": self.limit, "gigaflop": self.gigaflop}
        return product_arm(name, prepare, written, error=error, **of_product)

    def by_stores(self, options: argparse.Namespace) -> tuple[MoEReduceScatter, Tuned]:
        """Return ours whose kernel stores its sums into the peers' memory; collective."""
        choices = self.choices
        ways = {"collective": False, "by_stores": True}
        settings = {"backend": options.backend, "timeout_s": PATIENCE_S, "max_topk": choices.shape.topk}
        op = MoEReduceScatter(choices.capacity, choices.shape.hidden, self.dtype, **settings, **ways)

        def call() -> torch.Tensor:
            return op(self.y, self.weight, choices.ids, choices.weights, self.out, tokens=choices.tokens)

        return op, Tuned(call, check=op.check, name="moe_rs benchmark, by stores", retune=options.retune)

    # ---- baselines

    def torch_alone(self) -> Callable[[], torch.Tensor]:
        grouped, choices = TorchGrouped(self.weight, choices_of_a_row=1), self.choices
        topk = choices.shape.topk

        def call() -> torch.Tensor:
            grouped(self.y, choices.all_ids, self.products)
            weights = choices.all_weights.to(self.dtype)[:, None]
            return torch.bmm(weights, self.products.unflatten(0, (-1, topk)), out=self.combined)

        return call

    def torch_in_sequence(self) -> Callable[[], torch.Tensor]:
        multiply = self.torch_alone()

        def call() -> torch.Tensor:
            self.gather_choices()
            multiply()
            return self.scatter()

        return call

    def gather_choices(self) -> None:
        self.choices.gather_ids()
        self.choices.gather_weights()

    def scatter(self) -> torch.Tensor:
        reduce_scatter(self._out, self._combined[:, 0])
        return self.out


def run_shape(shape: Shape, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of one shape."""
    problem = Problem(shape, DTYPES[options.dtype], ranks, routing_of(options))
    choices, y, weight, out = problem.choices, problem.y, problem.weight, problem.out
    both = Ours(MoEReduceScatter, shape, shape.hidden, options, ranks, "moe_rs")
    op, single = both.op, both.single
    storing = problem.by_stores(options) if options.by_stores else None

    def alone() -> torch.Tensor:
        return single(y, weight, choices.all_ids, choices.all_weights, problem.combined[:, 0])

    def own_in_sequence() -> torch.Tensor:
        problem.gather_choices()
        alone()
        return problem.scatter()

    ours, ours_alone = both.tune(
        lambda: op(y, weight, choices.ids, choices.weights, out, tokens=choices.tokens),
        alone,
    )

    def asking() -> torch.Tensor:
        return op(y, weight, choices.ids, choices.weights, out)

    by_stores = {}
    if storing is not None:
        by_stores = {OURS_BY_STORES: storing[1].eager, f"{OURS_BY_STORES}, graph": storing[1].graph}
    arms = [
        problem.arm(OURS, ours.eager),
        problem.arm("ours, graph", ours.graph),
        *(problem.arm(*way) for way in by_stores.items()),
        problem.arm("ours, tokens not given", ours.then(asking)),
        *(problem.arm(*way) for way in in_both_ways(SEQUENCE, problem.torch_in_sequence)),
        *(problem.arm(*way) for way in in_both_ways(OWN_SEQUENCE, ours_alone.then(own_in_sequence))),
        problem.arm(GROUPED, problem.torch_alone, of_part=True),
        problem.arm(GROUPED_OURS, ours_alone.eager, of_part=True),
        collective_arm(
            f"{COLLECTIVES} scatter",
            problem.scatter,
            megabytes=problem.sent_mb,
            poison=lambda: problem.combined.normal_(),
        ),
    ]
    return both.measured(arms, problem.refresh, plan, storing)


if __name__ == "__main__":
    run_benchmark(
        __doc__,
        op="moe_rs",
        title="Grouped GEMM over experts + reduce-scatter",
        sequence=SEQUENCE,
        own_sequence=OWN_SEQUENCE,
        run_shape=run_shape,
        can_store=True,
    )
