"""An operation of ours as arms of a benchmark: tuned in context, then called eagerly or replayed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from benchmarks.common.ranks import ON_GPU, Unsupported
from dist_autotune import TunedContext, TuningReport, contextual_autotune

Prepare: TypeAlias = Callable[[], Callable[[], torch.Tensor]]


BY_REPLAYS = "by replays, graph"  # an arm that a session of its own has judged so


class Tuned:
    """A call that all ranks tune together; `check` waits for the device and raises what went wrong."""

    def __init__(
        self, call: Callable[..., torch.Tensor], *, check: Callable[[], None], name: str, retune: bool
    ) -> None:
        self.call, self._by_replays = (
            contextual_autotune(is_dist=True, watch=False, name=name, objective=objective)(call)
            for objective in ("kernel", "graph")
        )
        self._check = check
        if retune:
            self.call.retune()
            self._by_replays.retune()

    def eager(self, *args: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Tune what is not tuned yet; return the call."""
        return self._settled(self.call, args)

    def by_replays(self, *args: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return the replay of a call that a session of its own has judged by replays."""
        return in_graph(lambda: self._settled(self._by_replays, args))()

    def _settled(
        self, function: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]
    ) -> Callable[[], torch.Tensor]:
        for _ in range(3):  # a session may leave candidates for the next one
            function(*args)
            if function.settled:
                break
        self._check()
        return lambda: function(*args)

    def graph(self, *args: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return the replay of a settled call: the candidate that eager calls run, its binary loaded."""
        return in_graph(lambda: self.eager(*args))()

    def then(self, call: Callable[[], torch.Tensor]) -> Prepare:
        """Return what prepares another call of the same kernels, once this one has settled them."""

        def prepare() -> Callable[[], torch.Tensor]:
            self.eager()
            return call

        return prepare

    def record(self) -> dict[str, Any]:
        """Return what the record of a case says of the tuning."""
        report = self.call.report
        reports = [] if report is None else [report]
        return tuned_record(
            reports, [(context, str(context.config)) for r in reports for context in r.contexts]
        )


def tune_online(step: Callable[[], object], most_steps: int, **options: Any) -> tuple[TuningReport, int]:
    """Tune a step from nothing, one trial a call; return the report, and after how many calls it was settled.

    Calls that waited for a compiler, with the first configs, do not count.
    """
    tuned = contextual_autotune(step, is_dist=True, mode="online", share=False, **options)
    tuned.retune()
    calls = held = 0
    while not tuned.settled and calls - held < most_steps:
        tuned()
        calls += 1
        outlook = tuned.report.outlook
        held = held if outlook is None else outlook.held
    return tuned.report, calls - held


def in_graph(prepare: Prepare) -> Prepare:
    """Return what prepares the same call as a CUDA graph of it, if the driver lets us capture it."""

    def prepared() -> Callable[[], torch.Tensor]:
        if not ON_GPU:
            raise Unsupported("CUDA graphs need a GPU")
        call = prepare()
        call()  # what is set up at a first call is no part of the graph
        return capture(call)

    return prepared


def in_both_ways(name: str, prepare: Prepare) -> list[tuple[str, Prepare]]:
    """Return name and preparation of an arm, eager and as a CUDA graph."""
    return [(name, prepare), (f"{name}, graph", in_graph(prepare))]


def capture(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture a call that has been made before; return the replay, which keeps the call and its tensors.

    The graph holds addresses alone: what it reads must not be freed while it is replayed. Raises Unsupported
    if the capture is refused.
    """
    graph, refusal, result = torch.cuda.CUDAGraph(), None, None
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            try:
                result = call()
            except RuntimeError as error:
                refusal = error
    except RuntimeError:  # the end of a capture in which nothing was captured
        if refusal is None:
            raise
    if refusal is not None or result is None:
        raise Unsupported(str(refusal)) from refusal

    return Replay(graph, result, call)


@dataclass(frozen=True)
class Replay:
    """A captured call: the graph, its result, and the call, whose tensors the graph reads."""

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor
    captured: Callable[[], torch.Tensor]

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.result


def tuned_record(reports: list[TuningReport], contexts: list[tuple[TunedContext, str]]) -> dict[str, Any]:
    """Return the record of sessions, each context with the text for its winner."""
    return {
        "contexts": [
            {
                "kernel": context.kernel,
                "config": text,
                "ms": context.ms if context.ms is not None and math.isfinite(context.ms) else None,
                "status": context.status,
                "timed": len(context.timings),  # the search drops slow candidates in its warm-up runs
                "banned": len(context.banned),
            }
            for context, text in contexts
        ],
        "runs": sum(report.runs for report in reports),
        "seconds": round(sum(report.seconds for report in reports), 1),
    }
