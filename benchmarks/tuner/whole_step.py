"""A step of many kernels beside all-reduces, tuned online: by their launches, and by the time of the step.

    ./launch.sh -m benchmarks.tuner.whole_step [--layers L] [--mib MIB] [--json FILE]

As in a backward pass, each layer multiplies and then reduces its gradients over all ranks, beside the layers
behind it. The kernel is the persistent GEMM of `examples/overlap.py`, whose candidates are tiles and numbers
of programs; every layer has a shape, and so a context, of its own. The step is tuned twice, one trial a call:

    default       the first config of every layer
    launches      each layer's by its own launches in the step, objective="kernel"
    run           by the time of the whole step, objective="thunk"

Then the three plans are timed, interleaved with each config for all layers (`all: ...`): the layers are one
family, so this is the exhaustive search over families. Told besides: after how many steps each tuning was
settled, and which part of the best family's gain over "launches" the plan by run has. Products and
all-reduces alone are arms, too: the longer one bounds the step.

Protocol and traps: `common/arms.py`. Without GPUs a tiny step runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.arms import Arm, Plan, measure
from benchmarks.common.cases import Benchmark, Ratio, case_record
from benchmarks.common.examples import load_example
from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.common.records import add_run_options
from benchmarks.common.tuned import tune_online, tuned_record
from benchmarks.operations.products import explained_error, relative_error
from benchmarks.operations.step_plans import gain_found_percent

LIMIT_S = 300.0
MOST_STEPS = 1000  # of one tuning
FILLER_MS = 15.0  # the host takes longer for a step of 24 layers than the device: without it, all plans tie
ROWS, INNER, COLUMNS = (4096, 2048, 1024) if ON_GPU else (32, 16, 16)
WIDER = 128 if ON_GPU else 16  # each layer than the one before
TUNINGS = {"launches": "kernel", "run": "thunk"}  # arm -> objective

Configs = dict[tuple[int, int, int], Any]  # by M, N, K


class Step:
    """Layers that multiply, each followed by an all-reduce of its own bucket."""

    def __init__(self, layers: int, mib: float, device: torch.device) -> None:
        self.example = load_example("overlap")
        shapes = [(ROWS, COLUMNS + WIDER * layer, INNER) for layer in range(layers)]
        self.layers = [self.example.Step(*shape, mib, device) for shape in shapes]

    def __call__(
        self, configs: Configs | None = None, *, multiplies: bool = True, reduces: bool = True
    ) -> torch.Tensor:
        """Run all layers, tuned or with these configs; return the last product."""
        works = []
        for layer in self.layers:
            if multiplies:
                layer.gemm(None if configs is None else configs[self.shape_of(layer)])
            if reduces:
                works.append(dist.all_reduce(layer.bucket, op=dist.ReduceOp.MAX, async_op=True))
        for work in works:
            work.wait()
        return self.layers[-1].c

    @staticmethod
    def shape_of(layer: Any) -> tuple[int, int, int]:
        return layer.a.shape[0], layer.b.shape[0], layer.a.shape[1]

    def error(self) -> float:
        """Return the largest relative error of all products, against float32."""
        return max(relative_error(each.c, each.a.float() @ each.b.float().T) for each in self.layers)

    def refresh(self) -> None:
        for layer in self.layers:
            for tensor in (layer.a, layer.b, layer.bucket):
                tensor.normal_()

    def poison(self) -> None:
        for layer in self.layers:
            layer.c.fill_(math.nan)


def tune(step: Step, objective: str) -> tuple[Configs, Any, int]:
    """Tune the step; return the configs, the report and how many calls it took."""
    chosen = {"objective": objective, "name": f"step by {objective}", "filler_ms": FILLER_MS}
    report, calls = tune_online(step, MOST_STEPS, **chosen)
    configs = {tuple(map(int, context.key[:3])): context.config for context in report.contexts}
    step.example.persistent_gemm.cache.clear()  # where Triton keeps results, which the next would respect
    return configs, report, calls


def gains_of(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the best plan of the family, and the part of its gain that was found."""
    ms = {arm["name"]: arm["ms"] for arm in measured["arms"] if "ms" in arm}
    families = {name: each for name, each in ms.items() if name.startswith("all: ")}
    best = min(families, key=families.__getitem__)
    return {
        "best_family_plan": best,
        "gain_percent": round(100 * (ms["launches"] / families[best] - 1), 1),
        "gain_found_percent": gain_found_percent(ms["launches"], ms["run"], families[best]),
    }


def run(case: str, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of the case."""
    step = Step(options.layers, options.mib, ranks.device)
    step.refresh()
    first = step.example.persistent_gemm.configs[0]
    plans: dict[str, Configs] = {"default": {step.shape_of(layer): first for layer in step.layers}}
    reports, steps = {}, {}
    for name, objective in TUNINGS.items():
        plans[name], reports[name], steps[name] = tune(step, objective)
        ranks.say(f"{name}: settled after {steps[name]} steps, {reports[name].seconds:.1f} s")
    kernel = step.example.persistent_gemm
    for config in kernel.configs:
        plans[f"all: {step.example.label(config)}"] = {step.shape_of(layer): config for layer in step.layers}
    first_layer = step.layers[0]
    arms = [
        Arm(
            name=name,
            prepare=lambda configs=configs: lambda: step(configs),
            error=lambda _: step.error(),
            limit=explained_error(first_layer.c.dtype, INNER),
            work=sum(2e-9 * math.prod(step.shape_of(layer)) for layer in step.layers),
            rate="TFLOP/s",
            poison=step.poison,
        )
        for name, configs in plans.items()
    ]
    alone = {"prepare": lambda: lambda: step(plans["run"], reduces=False)}
    arms.append(replace(arms[0], name="products alone", **alone))
    arms.append(
        Arm(
            name="all-reduces alone",
            prepare=lambda: lambda: step(multiplies=False),
            error=lambda _: float(first_layer.bucket.isnan().any()),
            limit=0.0,
        )
    )
    measured = measure(arms, ranks, step.refresh, plan)
    facts = gains_of(measured)
    ranks.say("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()))
    texts = [
        (context, f"{name}: {step.example.label(context.config)}")
        for name, report in reports.items()
        for context in report.contexts
    ]
    return case_record(
        case,
        measured,
        ranks,
        tuned=tuned_record(list(reports.values()), texts),
        steps=steps,
        **facts,
        candidates=len(step.layers) * len(step.example.persistent_gemm.configs),
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--layers", type=int, default=24 if ON_GPU else 3, help="of the step")
    parser.add_argument("--mib", type=float, default=32 if ON_GPU else 0.01, help="of each all-reduce")
    add_run_options(parser, warm_ups=60)
    options = parser.parse_args()

    Benchmark(
        op="whole_step",
        title="A step of many kernels beside all-reduces",
        case_title="layers, all-reduce",
        ratios=[Ratio(of="default", to="run"), Ratio(of="launches", to="run")],
        limit_s=LIMIT_S,
    ).start(options, [f"{options.layers} layers, {options.mib:g} MiB each"], run)


if __name__ == "__main__":
    main()
