"""A benchmark of cases: one record, a case after the other, ratios of arms, the table and the exit code."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.common.arms import Plan
from benchmarks.common.ranks import Ranks, run_on_ranks
from benchmarks.common.records import clocks_seen, describe_run, leave_record

AnyCase = TypeVar("AnyCase")


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The time of one arm over that of another."""

    of: str
    to: str
    name: str = ""  # "of / to" when left out


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What a record of cases is about."""

    op: str
    title: str
    case_title: str  # heads the column of cases
    ratios: Sequence[Ratio]
    limit_s: float  # for everything about one case, tuning and compiling included
    needed: Sequence[str] | None = None  # arms without whose times a run has failed; None: all

    def start(
        self,
        options: argparse.Namespace,
        cases: Sequence[AnyCase],
        run_case: Callable[[AnyCase, argparse.Namespace, Plan, Ranks], dict[str, Any]],
    ) -> None:
        """Be a rank of this program: run all cases, then leave the process."""
        run_on_ranks(
            lambda ranks: self.run(
                options, ranks, cases, lambda case, plan: run_case(case, options, plan, ranks)
            )
        )

    def run(
        self,
        options: argparse.Namespace,
        ranks: Ranks,
        cases: Sequence[AnyCase],
        run_case: Callable[[AnyCase, Plan], dict[str, Any]],
        **more: Any,
    ) -> int:
        """Run all cases, write the record after each, show the table; return the exit code."""
        plan = Plan(warm_ups=options.warm_ups, iterations=options.iterations, limit_s=self.limit_s)
        record = describe_run(ranks, op=self.op, title=self.title, commit=options.commit, plan=plan) | more
        record["case_title"] = self.case_title
        record["ratios"] = [
            {"name": ratio.name or f"{ratio.of} / {ratio.to}", "of": ratio.of, "to": ratio.to}
            for ratio in self.ratios
        ]
        record["cases"] = []
        for case in cases:
            record["cases"].append(run_case(case, plan))
            record["geometric_means"] = geometric_means(record)
            ranks.say(f"{case}: done")
            leave_record(record, options, ranks, shows=case is cases[-1])
        return int(self._has_failed(record["cases"]))

    def _has_failed(self, cases: list[dict[str, Any]]) -> bool:
        arms = [arm for case in cases for arm in case["arms"]]
        untimed = [arm["name"] for arm in arms if "unavailable" in arm]
        return bool(
            any(case["trouble_at_closing"] for case in cases)
            or any(self.needed is None or name in self.needed for name in untimed)
        )


def case_record(
    case: object,
    measured: dict[str, Any],
    ranks: Ranks,
    *,
    tuned: dict[str, Any],
    trouble: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """Return what a record holds of one case; trouble: why operations could not be closed."""
    told = {"tuned": tuned, "clocks": clocks_seen(ranks), "trouble_at_closing": list(trouble)}
    return {"case": str(case), **more, **measured, **told}


def geometric_means(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return, by name of each ratio, its geometric mean and least value over the cases that have it."""
    means = {}
    for ratio in record["ratios"]:
        found = []
        for case in record["cases"]:
            ms = {arm["name"]: arm.get("ms") for arm in case["arms"]}
            if ms.get(ratio["of"]) and ms.get(ratio["to"]):
                found.append(ms[ratio["of"]] / ms[ratio["to"]])
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            means[ratio["name"]] = {"mean": mean, "least": min(found), "cases": len(found)}
    return means
