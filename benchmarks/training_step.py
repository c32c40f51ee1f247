"""A tensor-parallel training step: tuned in context, against stock tuning, NCCL + cuBLAS, and torch's own.

    ./launch.sh -m benchmarks.training_step [--tokens LENGTH] [--json FILE]

The step is forward and backward of `examples/train_transformer.py`: overlapped products, and its norm, rotary
embedding and cross-entropy, all of them tuned kernels. All arms have one model and the same tokens:

    first configs      every kernel's first candidate, every choice's first option
    stock              each rank tunes alone with triton.autotune; kernels that wait for peers cannot be timed
                       so, and keep their first candidate
    by launches        tuned in the step, objective="kernel", online
    by step            the same, objective="thunk"
    NCCL + cuBLAS      the kernels "by launches"; collectives and products of torch, without overlap
    async TP           plain torch, compiled, with `_micro_pipeline_tp`; CPU ranks only trace it

With --dp 2 the parameters are shared by FSDP2, whose collectives run beside the kernels; two GPUs suffice.
The arms are then "first configs", "by launches", "by step", "NCCL + cuBLAS", and

    best of families   "by launches" with the fastest combination of options, one option of each choice for
                       all its calls. All combinations are timed, then the faster third, until one is left

Then the record says which part of the gain of "best of families" over "by launches" the tuner found.

Told besides: on how many keys the ranks' stock picks disagree, and after how many steps a tuning was settled.
Each arm's loss and gradients are checked against the plain model on all tokens.

Protocol and traps: `common/arms.py`. Without GPUs a tiny step runs on CPU ranks in Triton's interpreter,
where no tuning is given the steps to settle, and "stock" has the first configs.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.common.arms import Arm, Plan, measure
from benchmarks.common.cases import Benchmark, Ratio, case_record
from benchmarks.common.examples import load_example
from benchmarks.common.launched import autotuners
from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.common.records import add_run_options
from benchmarks.common.tuned import tuned_record
from benchmarks.operations.products import relative_error
from benchmarks.operations.sequences import PLAIN, gather_and_multiply, multiply_and_scatter
from benchmarks.operations.step_plans import (
    Picks,
    best_of_families,
    first_configs,
    gain_found_percent,
    tune_all,
    tune_with_stock,
)
from dist_autotune.kernels import tp
from dist_autotune.kernels.tp import layers

LIMIT_S = 540.0
LIMIT = 0.05 if ON_GPU else 1e-4  # of a gradient's relative error: bfloat16 is rounded after each product
TUNINGS = {"by launches": "kernel", "by step": "thunk"}  # arm -> objective
CHECKED = ("layers.0.attention.wq.weight", "layers.0.feed_forward.w2.weight", "norm.weight")


# ---- the step


class Step:
    """One model, plain and parallel, and the tokens of a step; called, it computes loss and gradients."""

    def __init__(self, length: int, ranks: Ranks, dp: int = 1) -> None:
        self.example = load_example("train_transformer")
        self.ranks = ranks
        shape = (dp, ranks.world_size // dp)
        mesh = dist.init_device_mesh(ranks.device.type, shape, mesh_dim_names=("dp", "tp"))
        self.mesh, self.sharing = mesh["tp"], mesh["dp"]
        self.plain, self.model = self.example.models(mesh, ranks.device)
        vocabulary = self.example.Shape().vocabulary
        self.tokens = torch.zeros((max(2, dp), length + 1), dtype=torch.int64, device=ranks.device)
        self.vocabulary, self.angles = vocabulary, self.example.angles_of(length, ranks.device)

    def refresh(self) -> None:
        """Draw other tokens, the same on all ranks."""
        self.tokens.random_(self.vocabulary)
        dist.broadcast(self.tokens, 0)

    def __call__(self, model: Callable[..., Tensor] | None = None) -> Tensor:
        """Return this rank's part of the loss and of the gradients that are checked, one after the other."""
        for parameter in self.model.parameters():
            parameter.grad = None
        mine = self.tokens.chunk(self.sharing.size(), 0)[self.sharing.get_local_rank()]
        parts = (mine[:, :-1], mine[:, 1:])
        mine = (each.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()] for each in parts)
        model = self.model if model is None else model  # a compiled module has no truth: `len` of its model
        loss = model(*mine, self.angles) / self.mesh.size()
        loss.backward()
        gradients = [self.model.get_parameter(name).grad.to_local() for name in CHECKED]
        return torch.cat([loss.detach().reshape(1).float(), *(each.flatten().float() for each in gradients)])

    def wanted(self) -> list[Tensor]:
        """Return what the plain model's loss and gradients are, whole."""
        self.plain.zero_grad()
        loss = self.plain(self.tokens[:, :-1], self.tokens[:, 1:], self.angles)
        loss.backward()
        return [loss.detach(), *(self.plain.get_parameter(name).grad for name in CHECKED)]

    def error(self, result: Tensor) -> float:
        """Return the largest relative error of what a call has returned."""
        loss, *gradients = self.wanted()
        losses = result[:1].clone()
        dist.all_reduce(losses)
        errors = [abs(float(losses) / self.sharing.size() / float(loss) - 1)]
        left = result[1:]
        for name, gradient in zip(CHECKED, gradients, strict=True):
            parameter = self.model.get_parameter(name)
            local, expected = parameter.to_local(), gradient.float()
            own, left = left[: local.numel()].view_as(local), left[local.numel() :]
            mesh, placements = parameter.device_mesh, parameter.placements
            sizes = {"shape": parameter.shape, "stride": parameter.stride()}
            whole = DTensor.from_local(own, mesh, placements, **sizes).full_tensor()
            errors.append(relative_error(whole, expected))
        return max(errors)


# ---- the layers of others


@contextlib.contextmanager
def layers_of_torch() -> Iterator[None]:
    """Let the model's layers use torch's collectives and products."""
    ours = layers.all_gather_matmul, layers.matmul_reduce_scatter
    layers.all_gather_matmul, layers.matmul_reduce_scatter = gather_and_multiply, multiply_and_scatter
    try:
        yield
    finally:
        layers.all_gather_matmul, layers.matmul_reduce_scatter = ours


def compiled_step(step: Step) -> Callable[[], Tensor]:
    """Return the step with torch's asynchronous tensor parallelism, compiled; on CPU ranks traced only."""
    import torch._inductor.config as inductor

    inductor._micro_pipeline_tp = True
    model = torch.compile(step.model, fullgraph=True, backend="inductor" if ON_GPU else "eager")

    def call() -> Tensor:
        with layers_of_torch(), plain_functions(step):
            return step(model)

    call()
    return call


@contextlib.contextmanager
def plain_functions(step: Step) -> Iterator[None]:
    """Let the model compute its norm, rotary embedding and loss in plain torch."""
    modules = [module for module in step.model.modules() if hasattr(module, "functions")]
    for module in modules:
        module.functions = step.example.PLAIN
    try:
        yield
    finally:
        for module in modules:
            module.functions = step.example.TRITON


# ---- the run


def arms_of(step: Step, picks: dict[str, Picks]) -> list[Arm]:
    def arm(name: str, prepare: Callable[[], Callable[[], Tensor]]) -> Arm:
        return Arm(name=name, prepare=prepare, error=step.error, limit=LIMIT)

    def with_picks(chosen: Picks) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with chosen.in_use():
                return step()

        return call

    def without_overlap() -> Tensor:
        with picks["by launches"].in_use(), layers_of_torch():
            return step()

    return [
        *(arm(name, lambda chosen=chosen: with_picks(chosen)) for name, chosen in picks.items()),
        arm(PLAIN, lambda: without_overlap),
        *([arm("async TP", lambda: compiled_step(step))] if step.sharing.size() == 1 else []),
    ]


def run(case: str, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of the case."""
    step = Step(options.tokens, ranks, options.dp)
    step.refresh()
    tuners = autotuners([step.example])
    picks, reports, facts = (plans if options.dp == 1 else plans_beside_sharding)(step, tuners, options)
    measured = measure(arms_of(step, picks), ranks, step.refresh, plan)
    if options.dp > 1:
        facts |= gains_of(measured)
    ranks.say("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()))
    texts = [
        (context, f"{name}: {context.config}") for name, each in reports.items() for context in each.contexts
    ]
    tp.release(step.mesh)
    return case_record(
        f"{step.example.Shape().depth} layers, {len(step.tokens)} x {options.tokens} tokens, "
        f"{options.dp} x {step.mesh.size()} ranks",
        measured,
        ranks,
        tuned=tuned_record(list(reports.values()), texts),
        **facts,
    )


Plans: TypeAlias = tuple[dict[str, Picks], dict[str, Any], dict[str, Any]]  # picks and reports by arm; facts


def plans(step: Step, tuners: list[Any], options: argparse.Namespace) -> Plans:
    """Tune the step by launches, by itself, and each rank alone with Triton's own loop."""
    if not ON_GPU:  # Triton's own benchmark needs a GPU
        benchmark_nothing(tuners)
    stock, differing, keys = tune_with_stock(step, tuners)
    picks, reports, steps = tune_all(step, tuners, TUNINGS, options.budget_s)
    picks = {"first configs": first_configs(tuners, stock), "stock": stock, **picks}
    return picks, reports, {"steps": steps, "stock_disagrees_on": differing, "keys": keys}


def plans_beside_sharding(step: Step, tuners: list[Any], options: argparse.Namespace) -> Plans:
    """Tune the step beside FSDP2's collectives; search through the plans of families."""
    benchmark_nothing(tuners)  # stock tuning is no arm
    picks, reports, steps = tune_all(step, tuners, TUNINGS, options.budget_s)
    picks["first configs"] = first_configs(tuners, picks["by launches"])
    picks["best of families"], facts = best_of_families(step, picks["by launches"])
    return picks, reports, {"steps": steps, **facts}


def benchmark_nothing(tuners: list[Any]) -> None:
    """Let launches that nobody has tuned take the first config."""
    for tuner in tuners:
        tuner._do_bench = lambda call, quantiles: [1.0] * len(quantiles)


def gains_of(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the best plan's gain over "by launches", and which part of it was found."""
    ms = {arm["name"]: arm["ms"] for arm in measured["arms"] if "ms" in arm}
    alone, best = ms["by launches"], ms["best of families"]
    return {
        "gain_percent": round(100 * (alone / best - 1), 1),
        "gain_found_percent": gain_found_percent(alone, ms["by step"], best),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096 if ON_GPU else 8, help="of a sequence")
    parser.add_argument("--dp", type=int, choices=(1, 2), default=1, help="ranks that share parameters")
    parser.add_argument("--budget-s", type=float, help="of each tuning, which then ends with what it knows")
    add_run_options(parser, warm_ups=30)
    options = parser.parse_args()

    others = ("first configs", "stock", "by launches", PLAIN, "async TP")
    if options.dp > 1:
        others = ("first configs", "by launches", "best of families", PLAIN)
    Benchmark(
        op="training_step",
        title="A tensor-parallel training step",
        case_title="layers, tokens, DP x TP",
        ratios=[Ratio(of=other, to="by step") for other in others],
        limit_s=LIMIT_S,
        needed=("first configs", "stock", "best of families", *TUNINGS),
    ).start(options, ["the step"], run)


if __name__ == "__main__":
    main()
