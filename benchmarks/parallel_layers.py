"""Pairs of tensor-parallel layers, forward and backward, against NCCL + cuBLAS and torch's asynchronous TP.

    ./launch.sh -m benchmarks.parallel_layers [--shapes few|public|wide] [--forward] [--json FILE]
    ./launch.sh -m benchmarks.parallel_layers --models 8B 70B --tokens 4096 8192 16384

A pair is gate and up behind one gather, then down, or q, k and v, then the output; between them elementwise
torch, in ours silu(gate) * up as `tp.SwiGLU` has it. A call computes the result and all gradients, with
--forward the result alone.

    ours               the overlapped products, tuned in the call; and as a CUDA graph
    ours, by replays   the graph, of up to 1024 tokens, tuned with objective="graph" in a session of its own
    NCCL + cuBLAS      a gather, products, a scatter; and as a CUDA graph
    NCCL + own GEMM    the same with `persistent_matmul`, tuned in the call; and as a CUDA graph
    async TP           as NCCL + cuBLAS, compiled with `_micro_pipeline_tp`; GPUs only

Checked: result and every gradient against float32. Protocol and traps: `common/arms.py`. Without GPUs a
tiny pair runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.common.arms import Arm, Plan, measure
from benchmarks.common.cases import Benchmark, Ratio, case_record
from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks, Unsupported
from benchmarks.common.records import add_run_options
from benchmarks.common.tuned import BY_REPLAYS, Tuned, in_both_ways
from benchmarks.operations.products import product_arm, relative_error
from benchmarks.operations.sequences import (
    OWN_GEMM,
    PLAIN,
    Product,
    gather_and_multiply,
    multiply_and_scatter,
    own_product,
    torch_product,
)
from dist_autotune.kernels import tp
from dist_autotune.kernels.tp.gating import silu_times

LIMIT_S = 300.0  # of a case, tuning and compiling included
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
LIMIT = 0.02 if ON_GPU else 0.005  # of a relative error: three products, each rounded to DTYPE
WIDTHS = {"8B": (4096, 14336, 1024), "70B": (8192, 28672, 1024), "405B": (16384, 53248, 1024)}
if not ON_GPU:
    WIDTHS = {"tiny": (32, 64, 16)}
LAYERS = ("mlp", "attention")
LISTS = {  # models, and tokens of all ranks
    "few": (("8B",), (16, 32, 64, 128, 256, 512, 1024)),
    "public": (("8B", "70B"), (4096, 8192, 16384)),
    "wide": (("8B", "70B", "405B"), (16, 128, 1024, 4096, 16384)),
}
MOST_REPLAYED = 1024  # tokens
DEFAULT = LISTS["public"] if ON_GPU else (("tiny",), (16,))


@dataclass(frozen=True)
class Case:
    """Shapes of a public model: features, hidden features, features of k and of v; tokens of all ranks."""

    layer: str  # of LAYERS
    shape: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.layer} {self.shape}, {self.tokens} tokens"

    def sizes(self, ranks: int) -> tuple[tuple[int, int], ...]:
        """Return [N, K] of the weights behind the gather, then of the one before the scatter."""
        features, hidden, of_kv = WIDTHS[self.shape]
        if self.layer == "mlp":
            return (*[(hidden // ranks, features)] * 2, (features, hidden // ranks))
        rows = (features // ranks, of_kv // ranks, of_kv // ranks)
        return (*((n, features) for n in rows), (features, features // ranks))


class Pair:
    """The tensors of a case, and a call that computes result and gradients with given products."""

    def __init__(self, case: Case, ranks: Ranks, *, has_gradients: bool) -> None:
        self.case, self.ranks, self.group = case, ranks, dist.group.WORLD.group_name
        self.has_gradients = has_gradients
        sizes = case.sizes(ranks.world_size)
        place = {"dtype": DTYPE, "device": ranks.device}
        self.x = torch.zeros(case.tokens // ranks.world_size, sizes[0][1], **place).requires_grad_()
        self.weights = [torch.zeros(size, **place).requires_grad_() for size in sizes]
        self.grad = torch.zeros(self.x.shape, **place)
        self.flops = (
            (6.0 if has_gradients else 2.0) * case.tokens * sum(weight.numel() for weight in self.weights)
        )

    def refresh(self) -> None:
        with torch.no_grad():
            self.x.normal_()
            self.grad.normal_()
            for weight in self.weights:
                weight.normal_(std=weight.shape[1] ** -0.5)

    def forward(
        self,
        gather: Callable[..., Any],
        scatter: Callable[..., Tensor],
        gated: Callable[[Tensor, Tensor], Tensor],
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Return the result, from a gather's products and a scatter's sum."""
        parts = gather(x, list(weights[:-1]))
        if self.case.layer == "mlp":
            hidden = gated(*parts)
        else:  # every part counts, for what attention itself would cost
            q, k, v = parts
            hidden = q + (k + v).repeat(1, q.shape[1] // k.shape[1])
        return scatter(hidden, weights[-1])

    def call(self, forward: Callable[..., Tensor]) -> list[Tensor]:
        """Return the result and, where they are wanted, all gradients."""
        leaves = [self.x, *self.weights]
        return self._call(forward, leaves, self.grad)

    def _call(self, forward: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(self.has_gradients):
            result = forward(*leaves)
        gradients = torch.autograd.grad(result, leaves, grad) if self.has_gradients else ()
        return [result.detach(), *gradients]

    def error(self, got: list[Tensor]) -> float:
        """Return the largest relative error of result and gradients."""
        leaves = [each.detach().float().requires_grad_() for each in (self.x, *self.weights)]
        expected = self._call(self.in_sequence, leaves, self.grad.float())
        pairs = zip(got, expected, strict=True)
        return max(relative_error(*pair) for pair in pairs)

    def in_sequence(self, *leaves: Tensor, product: Product = torch_product) -> Tensor:
        """Return the result without overlap."""

        def gather(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
            return gather_and_multiply(x, weights, self.group, gather_dim=0, product=product)

        def scatter(hidden: Tensor, weight: Tensor) -> Tensor:
            return multiply_and_scatter(hidden, weight, self.group, scatter_dim=0, product=product)

        return self.forward(gather, scatter, lambda gate, up: silu(gate) * up, *leaves)

    def overlapped(self, *leaves: Tensor) -> Tensor:
        return self.forward(tp.all_gather_matmul, tp.matmul_reduce_scatter, silu_times, *leaves)

    def compiled(self) -> Callable[[], list[Tensor]]:
        """Return the call as torch's asynchronous tensor parallelism compiles it."""
        if not ON_GPU:
            raise Unsupported("torch's symmetric memory needs GPUs")
        import torch._inductor.config as inductor

        inductor._micro_pipeline_tp = True
        forward = torch.compile(self.in_sequence, fullgraph=True)
        return lambda: self.call(forward)

    def tuned(self, name: str, forward: Callable[..., Tensor]) -> Tuned:
        call = functools.partial(self.call, forward)
        return Tuned(call, check=lambda: None, name=f"pair {self.case}, {name}", retune=True)


def arms_of(pair: Pair, ours: Tuned, own: Tuned) -> list[Arm]:
    prepared = [
        *in_both_ways("ours", ours.eager),
        *([(f"ours, {BY_REPLAYS}", ours.by_replays)] if pair.case.tokens <= MOST_REPLAYED else []),
        *in_both_ways(PLAIN, lambda: lambda: pair.call(pair.in_sequence)),
        *in_both_ways(OWN_GEMM, own.eager),
        ("async TP", pair.compiled),
    ]
    of_pair = {"error": pair.error, "limit": LIMIT, "gigaflop": 1e-9 * pair.flops}
    return [product_arm(*way, **of_pair) for way in prepared]


def run_case(case: Case, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of one case."""
    pair = Pair(case, ranks, has_gradients=not options.forward)
    pair.refresh()
    ours = pair.tuned("ours", pair.overlapped)
    own = pair.tuned(OWN_GEMM, functools.partial(pair.in_sequence, product=own_product))
    measured = measure(arms_of(pair, ours, own), ranks, pair.refresh, plan)
    record = case_record(case, measured, ranks, tuned=ours.record(), tuned_own_gemm=own.record())
    tp.release()
    return record


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", choices=LISTS, help="few tokens, public models or a wide grid")
    parser.add_argument("--models", nargs="+", choices=WIDTHS, default=DEFAULT[0], help="whose layers")
    parser.add_argument("--tokens", nargs="+", type=int, default=DEFAULT[1], help="of all ranks")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS, help="pairs of them")
    parser.add_argument("--forward", action="store_true", help="without gradients")
    add_run_options(parser, warm_ups=40)
    options = parser.parse_args()
    if options.shapes and not ON_GPU:
        parser.error(f"--shapes {options.shapes} needs GPUs: the interpreter would take days")
    models, tokens = LISTS[options.shapes] if options.shapes else (options.models, options.tokens)
    cases = [Case(*each) for each in itertools.product(options.layers, models, tokens)]
    way = "forward" if options.forward else "forward and backward"
    Benchmark(
        op="parallel_layers",
        title=f"Pairs of tensor-parallel layers, {way}",
        case_title="layer, tokens",
        ratios=[
            *(Ratio(of=other, to="ours") for other in (PLAIN, OWN_GEMM, "async TP")),
            Ratio(of=f"{PLAIN}, graph", to="ours, graph", name=f"graph: {PLAIN} / ours"),
            Ratio(of=f"{PLAIN}, graph", to=f"ours, {BY_REPLAYS}", name=f"graph: {PLAIN} / ours, by replays"),
        ],
        limit_s=LIMIT_S,
        needed=("ours",),
    ).start(options, cases, run_case)


if __name__ == "__main__":
    main()
