"""Pairs of tensor-parallel layers, forward and backward, against NCCL + cuBLAS and torch's asynchronous TP.

    ./launch.sh -m benchmarks.models.parallel_layers [--shapes 8B 70B] [--tokens 4096 8192 16384]
                                                     [--json FILE]

A pair is gate and up behind one gather, then down, or q, k and v, then the output; between them elementwise
torch, in all arms the same. A call computes the result and all gradients.

    ours               the overlapped products, tuned in the call
    ours, graph        the same, captured and replayed
    NCCL + cuBLAS      a gather, products, a scatter
    async TP           the same, compiled with `_micro_pipeline_tp`; GPUs only

Checked: result and every gradient against float32. Protocol and traps: `common/arms.py`. Without GPUs a
tiny pair runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.arms import Arm, Plan, measure
from benchmarks.common.ranks import ON_GPU, Ranks, Unsupported, run_on_ranks
from benchmarks.common.records import add_run_options, clocks_seen, describe_run, write_json
from benchmarks.common.tuned import Tuned
from benchmarks.models.training_step import gather_and_multiply, multiply_and_scatter
from benchmarks.render import summary
from dist_autotune.kernels import tp

LIMIT_S = 300.0  # of a case, tuning and compiling included
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
LIMIT = 0.02 if ON_GPU else 1e-4  # of a relative error: three products, each rounded to DTYPE
WIDTHS = {"8B": (4096, 14336, 1024), "70B": (8192, 28672, 1024)} if ON_GPU else {"tiny": (32, 64, 16)}
TOKENS = (4096, 8192, 16384) if ON_GPU else (16,)


@dataclass(frozen=True)
class Case:
    """Shapes of a public model: features, hidden features, features of k and of v; tokens of all ranks."""

    layer: str  # "mlp" or "attention"
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

    def __init__(self, case: Case, ranks: Ranks) -> None:
        self.case, self.ranks, self.group = case, ranks, dist.group.WORLD.group_name
        sizes = case.sizes(ranks.world_size)
        place = {"dtype": DTYPE, "device": ranks.device}
        self.x = torch.zeros(case.tokens // ranks.world_size, sizes[0][1], **place).requires_grad_()
        self.weights = [torch.zeros(size, **place).requires_grad_() for size in sizes]
        self.grad = torch.zeros(self.x.shape, **place)
        self.flops = 6.0 * case.tokens * sum(weight.numel() for weight in self.weights)

    def refresh(self) -> None:
        with torch.no_grad():
            self.x.normal_()
            self.grad.normal_()
            for weight in self.weights:
                weight.normal_(std=weight.shape[1] ** -0.5)

    def forward(
        self, gather: Callable[..., Any], scatter: Callable[..., Tensor], x: Tensor, *weights: Tensor
    ) -> Tensor:
        """Return the result, from a gather's products and a scatter's sum."""
        parts = gather(x, list(weights[:-1]))
        if self.case.layer == "mlp":
            hidden = torch.nn.functional.silu(parts[0]) * parts[1]
        else:  # every part counts, for what attention itself would cost
            q, k, v = parts
            hidden = q + (k + v).repeat(1, q.shape[1] // k.shape[1])
        return scatter(hidden, weights[-1])

    def call(self, forward: Callable[..., Tensor]) -> list[Tensor]:
        """Return the result and all gradients."""
        leaves = [self.x, *self.weights]
        result = forward(*leaves)
        return [result.detach(), *torch.autograd.grad(result, leaves, self.grad)]

    def error(self, got: list[Tensor]) -> float:
        """Return the largest relative error of result and gradients."""
        leaves = [each.detach().float().requires_grad_() for each in (self.x, *self.weights)]
        wanted = self.forward(self.gather_of_torch, self.scatter_of_torch, *leaves)
        expected = [wanted.detach(), *torch.autograd.grad(wanted, leaves, self.grad.float())]
        pairs = zip(got, expected, strict=True)
        return max(float((one.float() - other).norm() / other.norm()) for one, other in pairs)

    def gather_of_torch(self, x: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        return gather_and_multiply(x, weights, self.group, bias=None, gather_dim=0, save_gathered=True)

    def scatter_of_torch(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return multiply_and_scatter(hidden, weight, self.group, bias=None, scatter_dim=0)


def arms_of(pair: Pair, tuned: Tuned) -> list[Arm]:
    def plain(*tensors: Tensor) -> Tensor:
        return pair.forward(pair.gather_of_torch, pair.scatter_of_torch, *tensors)

    def compiled() -> Callable[[], list[Tensor]]:
        if not ON_GPU:
            raise Unsupported("torch's symmetric memory needs GPUs")
        import torch._inductor.config as inductor

        inductor._micro_pipeline_tp = True
        forward = torch.compile(plain, fullgraph=True)
        return lambda: pair.call(forward)

    prepared = {
        "ours": tuned.eager,
        "ours, graph": tuned.graph,
        "NCCL + cuBLAS" if ON_GPU else "gloo + torch": lambda: lambda: pair.call(plain),
        "async TP": compiled,
    }
    return [
        Arm(
            name=name,
            prepare=prepare,
            error=pair.error,
            limit=LIMIT,
            work=1e-9 * pair.flops,
            rate="TFLOP/s",
        )
        for name, prepare in prepared.items()
    ]


def run_case(case: Case, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of one case."""
    pair = Pair(case, ranks)
    pair.refresh()

    def ours(*tensors: Tensor) -> Tensor:
        return pair.forward(tp.all_gather_matmul, tp.matmul_reduce_scatter, *tensors)

    tuned = Tuned(lambda: pair.call(ours), check=lambda: None, name=f"pair {case}", retune=True)
    measured = measure(arms_of(pair, tuned), ranks, pair.refresh, plan)
    record = {"case": str(case), **measured, "tuned": tuned.record(), "clocks": clocks_seen(ranks)}
    tp.release()
    return record | {"trouble_at_closing": []}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=WIDTHS, default=[*WIDTHS])
    parser.add_argument("--tokens", nargs="+", type=int, default=[*TOKENS], help="of all ranks")
    add_run_options(parser, warm_ups=40)
    options = parser.parse_args()

    def body(ranks: Ranks) -> int:
        plan = Plan(warm_ups=options.warm_ups, iterations=options.iterations, limit_s=LIMIT_S)
        title = "Pairs of tensor-parallel layers, forward and backward"
        record = describe_run(ranks, op="parallel_layers", title=title, commit=options.commit, plan=plan)
        record["case_title"] = "layer, tokens"
        record["ratios"] = [
            {"name": f"{other} / ours", "of": other, "to": "ours"} for other in ("NCCL + cuBLAS", "async TP")
        ]
        record["cases"] = [
            run_case(Case(layer, shape, tokens), plan, ranks)
            for shape in options.shapes
            for layer in ("mlp", "attention")
            for tokens in options.tokens
        ]
        if options.json is not None and ranks.rank == 0:
            write_json(options.json, record)
        ranks.say(summary(record))
        arms = [arm for case in record["cases"] for arm in case["arms"]]
        return int(any(arm["name"] == "ours" and "unavailable" in arm for arm in arms))

    run_on_ranks(body)


if __name__ == "__main__":
    main()
