"""The trace of a session: what Chrome and Perfetto read, with events that nest."""

import json
from pathlib import Path
from typing import Any

import pytest
from example_files import session_records, write_session
from kernels_for_tests import Bench, launch, numbers

from dist_autotune import tunable
from dist_autotune.logs import records
from dist_autotune.logs.writer import SessionLog
from dist_autotune.reports.history import load_history
from dist_autotune.reports.trace import BEHIND, RUN, TRIAL, spans_of, write_trace


def trace_of(directory: Path) -> list[dict[str, Any]]:
    write_trace(directory / "trace.json", load_history(directory).sessions)
    data = json.loads((directory / "trace.json").read_text(), parse_constant=pytest.fail)
    assert data["displayTimeUnit"] == "ms"
    return list(data["traceEvents"])


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Check that of two events on one row, the second begins within the first and ends in it, or after it."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for spans in rows.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        open_ends: list[float] = []
        for begin, end in spans:
            while open_ends and open_ends[-1] <= begin + 0.01:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.01
            open_ends.append(end)


def test_runs_trials_and_exchanges_are_events_of_their_rank(tmp_path: Path) -> None:
    write_session(tmp_path)
    events = trace_of(tmp_path)
    assert_nested(events)
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}
    assert [e["name"] for e in events if e["ph"] == "X" and e["cat"] == RUN and e["pid"] == 0] == [
        f"run {number}" for number in range(6)
    ]
    trials = [e for e in events if e["ph"] == "X" and e["cat"] == TRIAL and e["pid"] == 1]
    assert [e["args"]["config"] for e in trials] == ["BLOCK=64"] * 2 + ["BLOCK=128"] * 2 + ["BLOCK=256"] * 2
    assert all(e["args"]["ms"] for e in trials)


def test_a_real_session_nests_and_fills_its_time(bench: Bench, kernel: Any) -> None:
    tuned = bench.tune(
        lambda: (tunable("rows", [1, 2]), launch(kernel, numbers())), n_warmup=None, n_repeat=None
    )
    tuned()
    directory = Path(".autotune_logs")
    assert_nested(trace_of(directory))
    (session,) = load_history(directory).sessions
    spans = spans_of(session)[0]
    runs = [span for span in spans if span.kind == RUN]
    assert len(runs) == tuned.report.runs
    assert any(span.name.startswith("whole run") for span in spans)
    assert max(span.end_s for span in spans) <= tuned.report.seconds


def test_compilations_behind_several_runs_have_rows_of_their_own(tmp_path: Path) -> None:
    counts = {"compiled": 3, "from_peers": 0, "cached": 1, "failed": 0, "workers": 2}
    with SessionLog(tmp_path, 0) as log:
        log.write(session_records()[0])
        for run in range(3):
            log.write(records.RunStarted(session="s1", run=run, plan={}, elapsed_s=run + 1.0))
        for key, seconds in (("1", 2.5), ("2", 1.5)):
            behind = {"run": 2, "kernel": "matmul", "key": key, "seconds": seconds, **counts}
            log.write(records.Preflighted(session="s1", elapsed_s=3.5 + seconds / 10, **behind))
    events = trace_of(tmp_path)
    assert_nested(events)
    behind = [e for e in events if e.get("cat") == BEHIND]
    assert [round(e["dur"] / 1e6, 3) for e in behind] == [2.5, 1.5]
    assert len({e["tid"] for e in behind}) == 2


@pytest.mark.parametrize("elapsed", ["inf", "nan", -1e30])
def test_times_that_are_no_times_do_not_spoil_the_trace(tmp_path: Path, elapsed: Any) -> None:
    write_session(tmp_path)
    path = tmp_path / "rank-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[5]["elapsed_s"] = elapsed
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert_nested(trace_of(tmp_path))
