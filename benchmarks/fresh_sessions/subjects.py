"""The operations: each shape opened as a user opens it, and what its alternatives are."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from benchmarks import ag_gemm, ag_moe, gemm_rs, moe_rs
from benchmarks.common.arms import Arm
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.operations import moe_problem
from benchmarks.operations.harness import DTYPES, PATIENCE_S, Closable
from dist_autotune.formatting import counted
from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.choices import options_for
from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.moe_rs import MoEReduceScatter

Call: TypeAlias = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Callee:
    """A call of an operation; `check` waits for the device and raises what went wrong."""

    call: Call
    check: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What is timed beside the picks, after it was tuned in the process of the timing.

    choices: those that arguments fix, as a session's pick tells them. has_kernel: there is one to be tuned.
    """

    open: Callable[[], Callee]
    choices: tuple[str, ...] = ()
    has_kernel: bool = True


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One shape of an operation on this rank; `free` is the call that sessions tune.

    has_choices: of the host, which the alternatives fix. Without, kernels' configs are alternatives.
    """

    free: Callee
    alternatives: dict[str, Alternative]
    has_choices: bool = False
    refresh: Callable[[], None]
    arm: Callable[[str, Callable[[], Call]], Arm]
    operations: list[Closable]  # those that are open


@dataclass(frozen=True)
class Operation:
    """What there is to tune under one name."""

    title: str
    case_title: str
    shape: Callable[..., Any]  # the class of its shapes, made of numbers
    public: Sequence[Any]
    default: Any
    open: Callable[[Any, argparse.Namespace, Ranks], Subject]


def open_ag_gemm(shape: ag_gemm.Shape, options: argparse.Namespace, ranks: Ranks) -> Subject:
    dtype = DTYPES[options.dtype]
    problem = ag_gemm.Problem(shape, dtype, ranks)
    operations: list[Closable] = []

    def opened(**fixed: Any) -> Callee:
        op = AllGatherGemm(
            problem.rows,
            shape.k,
            dtype,
            backend=options.backend,
            timeout_s=PATIENCE_S,
            **fixed,
        )
        operations.append(op)
        problem.places.append(op.shard)
        op.shard.copy_(problem.a)
        return Callee(lambda: op(op.shard, problem.weight, problem.out), op.check)

    return Subject(
        free=opened(),
        alternatives=_alternatives_of_ag_gemm(problem.rows, opened, options, ranks),
        has_choices=True,
        refresh=problem.refresh,
        arm=problem.product,
        operations=operations,
    )


def _alternatives_of_ag_gemm(
    rows: int, opened: Callable[..., Callee], options: argparse.Namespace, ranks: Ranks
) -> dict[str, Alternative]:
    """Return the choices that are fixed by arguments: of overlapped calls, and the collective."""
    sms = torch.cuda.get_device_properties(ranks.device).multi_processor_count if ON_GPU else 0
    found = options_for(rows, sms, ranks.world_size, specialized=ON_GPU)
    alternatives = {"collective": _collective("ag_gemm", lambda: opened(collective=True))}
    for consumer in found.consumers:
        counts = found.programs if options.alternatives == "all" else found.programs[:1]
        for programs, pieces in itertools.product(counts, found.pieces):
            chosen = {"consumer": consumer, "pieces": pieces, "programs": programs}
            name = f"{consumer}, {counted(pieces, 'piece')}, {counted(programs, 'program')}"
            alternatives[name] = Alternative(
                open=lambda chosen=chosen: opened(**chosen),
                choices=tuple(f"ag_gemm {what} {json.dumps(option)}" for what, option in chosen.items()),
            )
    return alternatives


def _collective(operation: str, opened: Callable[[], Callee]) -> Alternative:
    """Return the alternative of cuBLAS with a collective, which has no kernel of ours."""
    return Alternative(open=opened, choices=(f'{operation} way "collective"',), has_kernel=False)


def _without_choices(op: Any, call: Call, problem: Any) -> Subject:
    """Return the subject of an operation that tunes kernels alone.

    Tuning it in the process of the timing loads every candidate before picks are launched.
    """
    free = Callee(call, op.check)
    return Subject(
        free=free,
        alternatives={"tuned here": Alternative(open=lambda: free)},
        refresh=problem.refresh,
        arm=problem.arm,
        operations=[op],
    )


def open_gemm_rs(shape: gemm_rs.Shape, options: argparse.Namespace, ranks: Ranks) -> Subject:
    dtype = DTYPES[options.dtype]
    problem = gemm_rs.Problem(shape, dtype, ranks)
    settings = {"backend": options.backend, "timeout_s": PATIENCE_S}
    op = GemmReduceScatter(shape.m, shape.n, dtype, **settings)
    subject = _without_choices(op, lambda: op(problem.a, problem.weight, problem.out), problem)

    def open_collective() -> Callee:
        other = GemmReduceScatter(shape.m, shape.n, dtype, collective=True, **settings)
        subject.operations.append(other)
        return Callee(lambda: other(problem.a, problem.weight, problem.out), other.check)

    subject.alternatives["collective"] = _collective("gemm_rs", open_collective)
    return subject


def _open_experts(
    name: str,
    operation: Callable[..., Any],
    problem: Any,
    shape: moe_problem.Shape,
    options: argparse.Namespace,
    call_of: Callable[[Any], Call],
) -> Subject:
    """Return the subject of an operation over experts, and its collectives as an alternative."""
    settings = {"backend": options.backend, "timeout_s": PATIENCE_S, "max_topk": shape.topk}

    def opened(collective: bool | None) -> Any:
        return operation(
            problem.choices.capacity, shape.hidden, problem.dtype, collective=collective, **settings
        )

    op = opened(None)
    subject = _without_choices(op, call_of(op), problem)

    def open_collective() -> Callee:
        other = opened(True)
        subject.operations.append(other)
        return Callee(call_of(other), other.check)

    fixed = (f'{name} way "collective"',)
    subject.alternatives["collective"] = Alternative(open=open_collective, choices=fixed)
    return subject


def open_ag_moe(shape: moe_problem.Shape, options: argparse.Namespace, ranks: Ranks) -> Subject:
    problem = ag_moe.Problem(shape, DTYPES[options.dtype], ranks)
    choices = problem.choices

    def call_of(op: AllGatherMoE) -> Call:
        return lambda: op(problem.x, problem.weight, choices.ids, problem.out, tokens=choices.tokens)

    return _open_experts("ag_moe", AllGatherMoE, problem, shape, options, call_of)


def open_moe_rs(shape: moe_problem.Shape, options: argparse.Namespace, ranks: Ranks) -> Subject:
    problem = moe_rs.Problem(shape, DTYPES[options.dtype], ranks)
    choices = problem.choices

    def call_of(op: MoEReduceScatter) -> Call:
        given = (problem.y, problem.weight, choices.ids, choices.weights, problem.out)
        return lambda: op(*given, tokens=choices.tokens)

    return _open_experts("moe_rs", MoEReduceScatter, problem, shape, options, call_of)


OPERATIONS = {
    "ag_gemm": Operation(
        "All-gather + GEMM", "M x N x K", ag_gemm.Shape, ag_gemm.PUBLIC, ag_gemm.DEFAULT, open_ag_gemm
    ),
    "gemm_rs": Operation(
        "GEMM + reduce-scatter", "M x N x K", gemm_rs.Shape, gemm_rs.PUBLIC, gemm_rs.DEFAULT, open_gemm_rs
    ),
    "ag_moe": Operation(
        "All-gather + grouped GEMM over experts",
        "tokens x hidden x ffn, experts",
        moe_problem.Shape,
        moe_problem.PUBLIC,
        moe_problem.DEFAULT,
        open_ag_moe,
    ),
    "moe_rs": Operation(
        "Grouped GEMM over experts + reduce-scatter",
        "tokens x hidden x ffn, experts",
        moe_problem.Shape,
        moe_problem.PUBLIC,
        moe_problem.DEFAULT,
        open_moe_rs,
    ),
}
