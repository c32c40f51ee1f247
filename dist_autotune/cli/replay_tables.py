"""What `dist-autotune replay` shows, as plain tables and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..formatting import Table, columns, config_label, counted, format_ms, format_percent, one_line
from .replay import Verdict
from .what_if import Pick, WhatIf

_LONGEST = 160  # characters of a value that differs: of a whole payload the rest is in the log


def verdicts_table(verdicts: Sequence[Verdict]) -> Table:
    """Return one row per session."""
    rows = []
    for verdict in verdicts:
        found = counted(len(verdict.differences), "difference") if verdict.differences else "as recorded"
        if not verdict.compared and not verdict.differences:
            found = "nothing to recompute"
        counts = str(verdict.runs), str(verdict.compared), str(verdict.recounted)
        rows.append((verdict.session, verdict.thunk, verdict.search, *counts, found))
    names = columns("session", "function", "search", ">runs", ">decisions", ">times", "recomputed")
    note = (
        "decisions: records compared, over all ranks. times: agreed times made anew from the ranks' samples."
    )
    return Table("Replay", names, tuple(rows), note)


def differences_table(verdicts: Sequence[Verdict]) -> Table:
    """Return one row per difference."""
    rows = tuple(
        (
            verdict.session,
            "-" if difference.run is None else str(difference.run),
            difference.about,
            difference.what,
            _shortened(difference.recorded),
            _shortened(difference.recomputed),
        )
        for verdict in verdicts
        for difference in verdict.differences
    )
    names = columns("session", ">run", "context", "what", "recorded", "recomputed")
    return Table("Differences", names, rows)


def what_if_table(found: Sequence[WhatIf]) -> Table:
    """Return one row per context that was searched anew."""
    rows = []
    for each in found:
        pick, recorded = _pick(each.pick), _pick(each.recorded)
        runs = str(each.runs), str(each.resampled), str(each.recorded_runs)
        judged = each.context if each.judge == "launch" else f"{each.context} by the whole run"
        rows.append((each.session, judged, str(each.candidates), each.search, *runs, *pick, *recorded))
    names = columns(
        "session", "context", ">candidates", "search", ">runs", ">resampled", ">recorded runs",
        "pick", ">ms", ">regret %", "recorded pick", ">ms", ">regret %",
    )  # fmt: skip
    note = (
        "ms and regret: by all recorded samples of the config. resampled: runs for which the log holds no "
        "further run of that config; one of those it holds was drawn again."
    )
    return Table("Another search on the recorded samples", names, tuple(rows), note)


def as_dict(verdicts: Sequence[Verdict], found: Sequence[WhatIf], unread: dict[str, str]) -> dict[str, Any]:
    """Return what was found as JSON-representable data."""
    return {
        "sessions": [dataclasses.asdict(verdict) for verdict in verdicts],
        "another_search": [dataclasses.asdict(each) for each in found],
        "unreadable": unread,
    }


def _pick(pick: Pick | None) -> tuple[str, str, str]:
    if pick is None:
        return "-", "-", "-"
    return config_label(pick.config), format_ms(pick.ms), format_percent(pick.regret_percent)


def _shortened(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
