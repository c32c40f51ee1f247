"""What the benchmarks of operations over several GPUs share: options, arms of collectives, a case of ours."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.common.arms import Arm, Plan, measure
from benchmarks.common.cases import case_record
from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.common.records import add_run_options
from benchmarks.common.tuned import Tuned

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PATIENCE_S = 60.0  # of a rank for its peers inside our operation
LIMIT_S = 900.0  # for everything about one shape, tuning and compiling included
OURS = "ours"  # the arm without whose time a run has failed
OURS_BY_STORES = f"{OURS}, by stores"  # whose kernel stores to the peers

AnyShape = TypeVar("AnyShape")


class Closable(Protocol):
    """An operation of ours."""

    def close(self) -> None:
        """Meet the peers, and raise what went wrong."""


def parse(
    description: str | None,
    sizes: dict[str, str],
    *,
    lists: Mapping[str, Sequence[AnyShape]],
    default: AnyShape,
    shared: Sequence[str],
    add_more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """Return the options; `shapes` is the tuple of shapes to run: one of the `lists`, or made of the `sizes`.

    sizes: name and help. The ranks share out those that `shared` names, so each must be a multiple of their
    number. add_more adds options of one benchmark.
    """
    parser = new_parser(description)
    for name, text in sizes.items():
        parser.add_argument(
            f"--{name}", type=int, nargs="+", default=[getattr(default, name)], help=f"{text}; several: each"
        )
    parser.add_argument("--shapes", choices=lists, help="few rows, models, or a wide grid, not one")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the operands")
    parser.add_argument(
        "--backend", default="auto", help="symmetric memory of ours: auto, torch, nvshmem, shm"
    )
    parser.add_argument("--retune", action="store_true", help="ignore what the cache holds")
    add_run_options(parser, warm_ups=120)
    add_more(parser)
    options = parser.parse_args()
    if options.shapes and not ON_GPU:
        parser.error(f"--shapes {options.shapes} needs GPUs: the interpreter would take days")
    given = itertools.product(*(getattr(options, name) for name in sizes))
    made = (type(default)(**dict(zip(sizes, values, strict=True))) for values in given)
    options.shapes = tuple(lists[options.shapes]) if options.shapes else tuple(made)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    uneven = [str(shape) for shape in options.shapes if any(getattr(shape, name) % ranks for name in shared)]
    if uneven:
        names = " and ".join(f"--{name}" for name in shared)
        parser.error(f"{names} must be a multiple of the {ranks} ranks; not so: {', '.join(uneven)}")
    return options


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
    plan: Plan,
    ranks: Ranks,
    arms: Sequence[Arm],
    *,
    refresh: Callable[[], None],
    tuned: dict[str, Tuned],
    operations: Sequence[Closable],
    **more: Any,
) -> dict[str, Any]:
    """Time the arms, close the operations and return the record of this shape, `tuned` of ours in it."""
    measured = measure(arms, ranks, refresh, plan)
    trouble = [text for each in operations if (text := ranks.attempt(each.close))]
    records = {name: each.record() for name, each in tuned.items()}
    return case_record(shape, measured, ranks, trouble=trouble, **more, **records)
