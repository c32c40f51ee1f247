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
    async TP           plain torch, compiled, with `_micro_pipeline_tp`, without --dp; CPU ranks only trace it

With --dp 2 the parameters are shared by FSDP2, whose collectives run beside the kernels. Then "by launches"
and "by step" tune the kernels alone, and two arms more have limits of the collectives' CTAs:

    collective alone   the limit tuned beside kernels tuned by their launches
    both               limit and kernels tuned by the time of the step

Told besides: on how many keys the ranks' stock picks disagree, and after how many steps a tuning was settled.
Each arm's loss and gradients are checked against the plain model on all tokens.

Protocol and traps: `common/arms.py`. Without GPUs a tiny step runs on CPU ranks in Triton's interpreter,
where no tuning is given the steps to settle.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.common.arms import Arm, Plan, measure
from benchmarks.common.cases import Benchmark, Ratio, case_record
from benchmarks.common.examples import load_example
from benchmarks.common.launched import Held, autotuners, name_of
from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks, Unsupported, run_on_ranks
from benchmarks.common.records import add_run_options
from benchmarks.common.tuned import tuned_record
from benchmarks.operations.sequences import PLAIN, gather_and_multiply, multiply_and_scatter
from dist_autotune import contextual_autotune
from dist_autotune.kernels import tp
from dist_autotune.kernels.configs import do_bench
from dist_autotune.kernels.tp import layers
from dist_autotune.kernels.tp.collective_groups import copied_group
from dist_autotune.launch.tunable import CHOICES
from dist_autotune.triton_api.identity import key_text

LIMIT_S = 540.0
MOST_STEPS = 600 if ON_GPU else 2  # of one tuning; then it is timed as it is
LIMIT = 0.05 if ON_GPU else 1e-4  # of a gradient's relative error: bfloat16 is rounded after each product
TUNINGS = {"by launches": "kernel", "by step": "thunk"}  # arm -> objective
LIMITED = {"collective alone": "kernel", "both": "thunk"}  # the same with limits of FSDP2's collectives
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
        # On CPU ranks copies of the group stand for communicators with limits.
        self.limits = tp.CollectiveGroups(mesh["dp"], make=None if ON_GPU else copied_group)
        self.no_limits = tp.CollectiveGroups(mesh["dp"], max_ctas=(None,))
        self.plain, self.model = self.example.models(mesh, ranks.device)
        vocabulary = self.example.Shape().vocabulary
        self.tokens = torch.zeros((max(2, dp), length + 1), dtype=torch.int64, device=ranks.device)
        self.vocabulary, self.angles = vocabulary, self.example.angles_of(length, ranks.device)

    def use_limits(self, limits: tp.CollectiveGroups) -> None:
        """Let the collectives of FSDP2 have these limits, if there are any."""
        if self.sharing.size() > 1:
            tp.limit_sharding(self.model, limits)

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
            errors.append(float((whole - expected).norm() / expected.norm()))
        return max(errors)


# ---- which configs and choices a call takes


@dataclass(frozen=True)
class Picks:
    """Results for all kernels, and an option for each choice that is known; else the first."""

    held: Held
    choices: dict[tuple[str, str], Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        self.held.put_back()
        with mock.patch.object(CHOICES, "recall", self._choose):  # what a `tunable` takes outside of calls
            yield

    def _choose(self, name: str, options: Any, key: tuple[Any, ...], among: tuple[int, ...]) -> Any:
        chosen = self.choices.get((name, key_text(key)))
        return chosen if chosen in options else options[0]


def tune(step: Step, tuners: list[Any], name: str, objective: str) -> tuple[Picks, Any, int]:
    """Tune the step from nothing; return the picks, the report and how many steps it took."""
    tuned = contextual_autotune(
        lambda: step(),
        is_dist=True,
        mode="online",
        objective=objective,
        share=False,
        name=f"step, {name}",
    )
    clear(tuners)
    tuned.retune()
    calls = 0
    while not tuned.settled and calls < MOST_STEPS:
        tuned()
        calls += 1
    report = tuned.report
    names = {name_of(tuner) for tuner in tuners}
    choices = {
        (context.kernel, key_text(context.key)): context.config
        for context in report.contexts
        if context.kernel not in names
    }
    with Picks(Held(tuners), choices).in_use():
        step()  # keys of a tuning that has not ended
    return Picks(Held(tuners), choices), report, calls


def tune_with_stock(step: Step, tuners: list[Any]) -> tuple[Picks, int, int]:
    """Let each rank tune alone; return its picks, on how many keys the ranks disagree, and of how many."""
    clear(tuners)
    with Picks(Held(tuners)).in_use():
        step()
    texts = {
        f"{name_of(tuner)} {key}": str(config) for tuner in tuners for key, config in tuner.cache.items()
    }
    everywhere = step.ranks.gather(texts)
    differing = [key for key in texts if len({each.get(key) for each in everywhere}) > 1]
    return Picks(Held(tuners)), len(differing), len(texts)


def first_configs(tuners: list[Any], stock: Picks) -> Picks:
    """Return the first candidate for every key that stock knows."""
    stock.held.put_back()
    for tuner in tuners:
        tuner.cache.update(dict.fromkeys(tuner.cache, tuner.configs[0]))
    return Picks(Held(tuners))


def clear(tuners: list[Any]) -> None:
    for tuner in tuners:
        tuner.cache.clear()


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
    if step.sharing.size() > 1:
        raise Unsupported("it is compiled as one graph, which FSDP2 does not give")
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
        arm("async TP", lambda: compiled_step(step)),
    ]


def run(options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of the case."""
    step = Step(options.tokens, ranks, options.dp)
    step.refresh()
    tuners = autotuners([step.example])
    if not ON_GPU:  # Triton's own benchmark needs a GPU
        for tuner in tuners:
            tuner._do_bench = tuner._do_bench or do_bench
    stock, differing, keys = tune_with_stock(step, tuners)
    picks = {"first configs": first_configs(tuners, stock), "stock": stock}
    reports, steps = {}, {}
    for tunings, limits in ((TUNINGS, step.no_limits), (LIMITED, step.limits))[: options.dp]:
        step.use_limits(limits)
        for name, objective in tunings.items():
            picks[name], reports[name], steps[name] = tune(step, tuners, name, objective)
            ranks.say(f"{name}: {steps[name]} steps, {reports[name].seconds:.1f} s")
    ranks.say(f"stock: the ranks disagree on {differing} of {keys} keys")
    measured = measure(arms_of(step, picks), ranks, step.refresh, plan)
    texts = [
        (context, f"{name}: {context.config}") for name, each in reports.items() for context in each.contexts
    ]
    tp.release(step.mesh)
    step.limits.close()
    return case_record(
        f"{step.example.Shape().depth} layers, {len(step.tokens)} x {options.tokens} tokens, "
        f"{options.dp} x {step.mesh.size()} ranks",
        measured,
        ranks,
        tuned=tuned_record(list(reports.values()), texts),
        steps=steps,
        stock_disagrees_on=differing,
        keys=keys,
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096 if ON_GPU else 8, help="of a sequence")
    parser.add_argument("--dp", type=int, choices=(1, 2), default=1, help="ranks that share parameters")
    add_run_options(parser, warm_ups=30)
    options = parser.parse_args()

    def body(ranks: Ranks) -> int:
        limited = LIMITED if options.dp > 1 else ()
        others = ("first configs", "stock", "by launches", *limited, PLAIN, "async TP")
        benchmark = Benchmark(
            op="training_step",
            title="A tensor-parallel training step",
            case_title="layers, tokens, DP x TP",
            ratios=[Ratio(of=other, to="by step") for other in others],
            limit_s=LIMIT_S,
            needed=("first configs", "stock", *TUNINGS, *LIMITED),
        )
        return benchmark.run(options, ranks, ["the step"], lambda _, plan: run(options, plan, ranks))

    run_on_ranks(body)


if __name__ == "__main__":
    main()
