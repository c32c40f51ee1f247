"""What the benchmarks of operations over several GPUs share: options, baselines' collectives, record, run."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from benchmarks.common.arms import Arm, Plan, measure
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.common.records import add_run_options, clocks_seen, describe_run, write_json
from benchmarks.common.tuned import Tuned
from benchmarks.render import summary

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PATIENCE_S = 60.0  # of a rank for its peers inside our operation
LIMIT_S = 900.0  # for everything about one shape, tuning and compiling included
OURS = "ours"  # the arm without whose time a run has failed

# Old names warn in torch 2.13, whose new ones 2.11 does not have.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

AnyShape = TypeVar("AnyShape")


class Closable(Protocol):
    """An operation of ours."""

    def close(self) -> None:
        """Meet the peers, and raise what went wrong."""


def parse(
    description: str | None,
    sizes: dict[str, str],
    *,
    public: Sequence[AnyShape],
    default: AnyShape,
    shared: Sequence[str],
) -> argparse.Namespace:
    """Return the options; `shapes` is the tuple of shapes to run, made of the `sizes` (name: help).

    The ranks share out those that `shared` names, so each must be a multiple of their number.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, text in sizes.items():
        parser.add_argument(
            f"--{name}", type=int, nargs="+", default=[getattr(default, name)], help=f"{text}; several: each"
        )
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
    given = itertools.product(*(getattr(options, name) for name in sizes))
    made = (type(default)(**dict(zip(sizes, values, strict=True))) for values in given)
    options.shapes = tuple(public) if options.shapes else tuple(made)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    uneven = [str(shape) for shape in options.shapes if any(getattr(shape, name) % ranks for name in shared)]
    if uneven:
        names = " and ".join(f"--{name}" for name in shared)
        parser.error(f"{names} must be a multiple of the {ranks} ranks; not so: {', '.join(uneven)}")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    return Plan(warm_ups=options.warm_ups, iterations=options.iterations, limit_s=LIMIT_S)


def collective_arm(
    name: str, call: Callable[[], torch.Tensor], *, megabytes: float, poison: Callable[[], object]
) -> Arm:
    """Return an arm that only moves data, of which it is checked that it comes."""
    return Arm(
        name=name,
        prepare=lambda: call,
        error=lambda result: float(result.isnan().any()),
        limit=0.0,
        work=megabytes,
        rate="GB/s",
        poison=poison,
    )


def measured_case(
    shape: Any,
    options: argparse.Namespace,
    ranks: Ranks,
    arms: Sequence[Arm],
    *,
    refresh: Callable[[], None],
    tuned: dict[str, Tuned],
    operations: Sequence[Closable],
    **more: Any,
) -> dict[str, Any]:
    """Time the arms, close the operations and return the record of this shape."""
    measured = measure(arms, ranks, refresh, plan_of(options))
    clocks = clocks_seen(ranks)
    trouble = [text for each in operations if (text := ranks.attempt(each.close))]
    return {
        "case": str(shape),
        "dtype": options.dtype,
        **more,
        **measured,
        **{name: each.record() for name, each in tuned.items()},
        "clocks": clocks,
        "trouble_at_closing": trouble,
    }


def new_record(
    options: argparse.Namespace,
    ranks: Ranks,
    *,
    op: str,
    title: str,
    case_title: str,
    ratios: Sequence[tuple[str, str, str]],
) -> dict[str, Any]:
    """Return a record without cases; a ratio is its name, of what, to what."""
    record = describe_run(ranks, op=op, title=title, commit=options.commit, plan=plan_of(options))
    record["case_title"] = case_title
    record["ratios"] = [{"name": name, "of": of, "to": to} for name, of, to in ratios]
    return record


def run_shapes(
    record: dict[str, Any],
    options: argparse.Namespace,
    ranks: Ranks,
    run_shape: Callable[[Any], dict[str, Any]],
) -> int:
    """Run all shapes, write the record after each, show the table; return 1 if ours did not work, else 0."""
    record["cases"] = []
    for shape in options.shapes:
        record["cases"].append(run_shape(shape))
        ranks.say(f"{shape}: done")
        if options.json is not None and ranks.rank == 0:
            write_json(options.json, record)
    ranks.say(f"\n{summary(record)}")
    ours = [arm for case in record["cases"] for arm in case["arms"] if arm["name"] == OURS]
    trouble = [text for case in record["cases"] for text in case["trouble_at_closing"]]
    return int(bool(trouble) or any("unavailable" in arm for arm in ours))
