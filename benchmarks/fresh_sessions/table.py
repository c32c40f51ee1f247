"""What is made of times: regret by session, and its tables. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = tuple[str, ...]


@dataclass(frozen=True)
class Regret:
    """How much longer the picks of sessions take than the best arm of one run takes."""

    best: str
    best_ms: float
    percent: dict[int, float]  # by session
    median_percent: float | None  # None: no session has a pick that was timed
    worst_percent: float | None

    @classmethod
    def of(cls, ms: Mapping[str, float], arms: Mapping[int, str]) -> Regret:
        """Return the regret of sessions, each of which picked an arm; arms without a time do not count."""
        best = min(ms, key=lambda name: ms[name])
        percent = {
            session: 100 * (ms[arm] / ms[best] - 1) for session, arm in sorted(arms.items()) if arm in ms
        }
        values = list(percent.values())
        return cls(
            best,
            ms[best],
            percent,
            statistics.median(values) if values else None,
            max(values, default=None),
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "percent": {str(session): value for session, value in self.percent.items()}}


def table(cases: Sequence[dict[str, Any]], case_title: str, sessions: Sequence[int]) -> dict[str, Any]:
    """Return the table of all cases, a row for each question that a case answers."""
    columns = (case_title, "best", "ms", *(f"session {number}" for number in sessions), "median", "worst")
    rows = []
    for case in cases:
        for what, regret in case["regrets"].items():
            percent = [_percent(regret["percent"].get(str(number))) for number in sessions]
            ends = _percent(regret["median_percent"]), _percent(regret["worst_percent"])
            name = f"{case['case']}, {what}" if what else case["case"]
            rows.append((name, regret["best"], f"{regret['best_ms']:.4f}", *percent, *ends))
    return {"columns": columns, "figures": columns[2:], "rows": rows, "notes": notes(cases)}


def notes(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a reader of the table has to know."""
    found = ["Regret in percent: the time of a session's pick over that of the best arm of the same run."]
    twice = [f"{case['noise_percent']:.2f}" for case in cases if case["noise_percent"] is not None]
    if twice:
        found.append(f"One pick timed as two arms differs by {', '.join(twice)} %.")
    for case in cases:
        runs = [each["runs"] for each in case.get("tuning", {}).values()]
        if runs:
            seconds = [each["seconds"] for each in case["tuning"].values()]
            took = f"{min(runs)} to {max(runs)} runs, {min(seconds):.1f} to {max(seconds):.1f} s"
            found.append(f"{case['case']}: sessions tuned in {took}.")
    found += [f"{case['case']}: {text}" for case in cases for text in case["trouble"] + case["remarks"]]
    late = [case["case"] for case in cases if any(arm.get("host_bound") for arm in case["arms"])]
    if late:
        found.append(f"The device waited for the host in some arm of {', '.join(late)}.")
    return found


def arms_table(cases: Sequence[dict[str, Any]], case_title: str) -> dict[str, Any]:
    """Return the table of all arms: time, who picked it, what it launches."""
    columns = (case_title, "arm", "ms", "picked by sessions", "choices", "launched")
    rows: list[Row] = []
    for case in cases:
        ms = {arm["name"]: arm.get("ms") for arm in case["arms"]}
        for plan in case["plans"]:
            time_ms = ms.get(plan["arm"])
            figure = "n/a" if time_ms is None else f"{time_ms:.4f}"
            picked = ", ".join(map(str, plan["sessions"]))
            texts = "; ".join(plan["choices"]), "; ".join(plan["launched"])
            rows.append((case["case"], plan["arm"], figure, picked, *texts))
    return {"title": "Each arm", "columns": columns, "rows": rows}


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"
