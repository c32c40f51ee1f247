"""The report of a session, and what is read out of the logs of several ranks."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from example_files import CONFIGS, session_records, write_session
from kernels_for_tests import Bench, double, launch, numbers, out_of_resources
from kernels_for_tests import records as records_of
from rank_programs import tune

from dist_autotune.cli import html, tables
from dist_autotune.errors import LaunchTimeout
from dist_autotune.formatting import WALL_CLOCK_NOTE, Table
from dist_autotune.logs import records
from dist_autotune.logs.history import ContextHistory, SessionHistory, load
from dist_autotune.logs.writer import SessionLog
from dist_autotune.tuner.report import TunedContext, TuningReport
from ranks import assert_all_ok, run_ranks


def load_one(directory: Path) -> SessionHistory:
    (session,) = load(directory).sessions
    return session


def load_context(directory: Path) -> ContextHistory:
    (context,) = load_one(directory).contexts
    return context


def shown(session: SessionHistory) -> list[Table]:
    of_contexts = [table for context in session.contexts for table in tables.context_tables(context)]
    return [*tables.session_tables(session), *of_contexts]


# ---- TuningReport

CONTEXT = TunedContext(
    kernel="matmul", key=(4096, "fp16"), config="BLOCK: 128", ms=0.25, fastest_rank_ms=0.2,
    status="tuned", timings={"BLOCK=64": 0.5, "BLOCK=128": 0.25}, banned={"BLOCK=512": "out of resource"},
)  # fmt: skip


def test_a_report_reads_as_a_table() -> None:
    other = TunedContext(kernel="add", key=(7,), config="BLOCK: 8", status="starved")
    report = TuningReport(runs=12, contexts=(CONTEXT, other), world_size=2, seconds=3.25, log_dir="logs")
    assert str(report).splitlines() == [
        "2 contexts in 12 runs on 2 ranks, 3.2 s",
        "context                 ms  spread  status   timed  banned  winner",
        "matmul[4096, fp16]  0.2500  25.0 %  tuned        2       1  BLOCK: 128",
        "add[7]                   -       -  starved      0       0  BLOCK: 8",
        "Logs: logs",
    ]


def test_a_report_without_contexts_says_so_and_why() -> None:
    text = str(TuningReport(runs=1, contexts=(), warning="no launches seen"))
    assert text == "0 contexts in 1 run on 1 rank, 0.0 s\nWarning: no launches seen"


def test_a_report_labels_wall_clock_figures() -> None:
    assert WALL_CLOCK_NOTE in str(TuningReport(runs=1, contexts=(CONTEXT,), clock="WallClock"))
    assert WALL_CLOCK_NOTE not in str(TuningReport(runs=1, contexts=(CONTEXT,), clock="EventClock"))


def test_importing_the_log_side_loads_neither_torch_nor_triton() -> None:
    modules = "logs.writer, logs.history, storage.winners, tuner.report, cli.html, cli.commands"
    program = f"""
import importlib.util, sys, types
package = types.ModuleType("dist_autotune")  # its __init__ may import what it likes
package.__path__ = list(importlib.util.find_spec("dist_autotune").submodule_search_locations)
sys.modules["dist_autotune"] = package
import importlib
for module in {modules.split(", ")}:
    importlib.import_module(f"dist_autotune.{{module}}")
assert not {{"torch", "triton", "matplotlib"}} & sys.modules.keys()
"""
    root = str(Path(records.__file__).parents[2])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, cwd=root)


# ---- what the logs tell


def test_a_session_is_put_together_from_the_logs_of_its_ranks(tmp_path: Path) -> None:
    write_session(tmp_path)
    session = load_one(tmp_path)
    assert (session.opened.thunk, session.ranks, session.closed.runs, session.closed.outcome) == (
        "layer",
        [0, 1],
        7,
        "settled",
    )
    context = load_context(tmp_path)
    assert (context.label, context.settled.status, context.settled.ms) == ("matmul[4096, fp16]", "tuned", 2.0)
    assert context.winner is context.candidates[1]
    assert [candidate.agreed_ms for candidate in context.candidates] == [4.0, 2.0, 3.3, None]
    assert [candidate.banned for candidate in context.candidates][:3] == ["", "", ""]
    assert context.candidates[3].banned.startswith("rank 1: out of resource")
    assert (context.candidates[0].rank_ms, context.candidates[0].samples) == ({0: 1.0, 1: 4.0}, 4)


def test_a_run_that_did_not_count_changes_nothing(tmp_path: Path) -> None:
    with SessionLog(tmp_path, 0) as log:
        for record in session_records("s1", 0, "layer", "EventClock")[
            :-2
        ]:  # not settled: the latest times hold
            lucky = isinstance(record, records.Agreed) and record.config_id == 1
            log.write(dataclasses.replace(record, ms=0.001, counted=False) if lucky else record)
    context = load_context(tmp_path)
    assert [candidate.agreed_ms for candidate in context.candidates] == [4.0, None, 3.3, None]
    assert min(context.convergence.values()) == 3.3


def test_a_run_with_several_configs_is_no_candidate_of_its_own(tmp_path: Path) -> None:
    write_session(tmp_path)
    before = shown(load_one(tmp_path))
    for rank in (0, 1):
        with SessionLog(tmp_path, rank) as log:
            log.write(
                records.Trial(
                    session="s1", rank=rank, run=9, context="c0ffee", kernel="matmul", key="4096, 'fp16'",
                    config_id=-1, config="several configs in one run", kind="sample", k=1, n=1, launches=2,
                    ms=9.0 + rank, statistic_ms=9.0,
                )
            )  # fmt: skip
    assert shown(load_one(tmp_path)) == before


def test_one_rank_alone_has_neither_spread_nor_stragglers(tmp_path: Path) -> None:
    write_session(tmp_path, ranks=(0,))
    session = load_one(tmp_path)
    assert session.stragglers() == []
    assert [candidate.spread_percent for candidate in load_context(tmp_path).candidates] == [None] * 4
    assert any("No records of ranks [1]" in note for note in tables.session_notes(session))


def test_a_session_that_crashed_is_unfinished_and_still_readable(tmp_path: Path) -> None:
    with SessionLog(tmp_path, 0) as log:
        for record in session_records("s1", 0, "layer", "EventClock")[:10]:
            log.write(record)
        log.write(records.RunFailed(session="s1", run=2, by_rank=1, error="ValueError: no"))
    session = load_one(tmp_path)
    assert session.closed.outcome == "unfinished"
    assert session.contexts[0].settled.status == "unfinished"
    assert session.remarks() == ["Run 2 failed on rank 1: ValueError: no"]
    assert shown(session)


def test_a_record_from_before_the_session_had_a_name_belongs_to_none(tmp_path: Path) -> None:
    with SessionLog(tmp_path, 0) as log:
        log.write(records.Exchanged(run=-1, sent_bytes=1, received_bytes=1, ms=0.1))
    assert load(tmp_path).sessions == ()


def test_a_session_whose_opening_is_lost_is_left_out_and_counted(tmp_path: Path) -> None:
    with SessionLog(tmp_path, 0) as log:
        for record in session_records("s1", 0, "layer", "EventClock")[1:4]:
            log.write(record)
    history = load(tmp_path)
    assert history.sessions == ()
    assert history.skipped == {"rank-0.jsonl": "skipped 3 lines: 3 x of a session whose opening is lost"}


def test_the_newest_session_that_tried_something_stands_for_its_function(tmp_path: Path) -> None:
    write_session(tmp_path, "s1")
    write_session(tmp_path, "s2")
    write_session(tmp_path, "s3", thunk="step")
    with SessionLog(tmp_path, 0) as log:  # everything from the cache: nothing to look at
        log.write(session_records("s4", 0, "layer", "EventClock")[0])
    loaded = load(tmp_path)
    assert [session.opened.session for session in loaded.sessions] == ["s1", "s2", "s3", "s4"]
    assert [session.opened.session for session in loaded.newest()] == ["s2", "s3"]


# ---- HTML


class Page(HTMLParser):
    """Collects what a page would load, its ids and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.assets: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.assets.append(str(value))
            if name == "id":
                self.ids.append(str(value))

    def handle_data(self, data: str) -> None:
        self.text += data


def write_page(directory: Path) -> str:
    pytest.importorskip("matplotlib", reason="the HTML report draws with matplotlib")
    loaded = load(directory)
    html.write_html(directory / "report.html", loaded, loaded.sessions)
    return (directory / "report.html").read_text()


def test_the_html_report_is_one_file_with_tables_and_a_plot_per_context(tmp_path: Path) -> None:
    write_session(tmp_path, "s1")
    write_session(tmp_path, "s2")
    html = write_page(tmp_path)
    page = Page(html)
    assert page.assets == []
    assert not {"link", "script", "img", "iframe"} & set(page.tags)
    assert page.tags.count("svg") == 2
    assert len(page.ids) == len(set(page.ids))
    for text in (
        "matmul[4096, fp16]",
        CONFIGS[1],
        "shared memory <48>",
        "Stragglers",
        "each rank alone",
        "+300.0",
    ):
        assert text in page.text
    for piece in html.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + piece.split("</svg>")[0] + "</svg>")


def test_the_html_report_labels_wall_clock_figures(tmp_path: Path) -> None:
    write_session(tmp_path, clock="WallClock")
    text = Page(write_page(tmp_path)).text
    assert WALL_CLOCK_NOTE in text
    assert "best agreed ms (wall clock)" in text


# ---- the report in the program and that of the command line


def several_configs(bench: Bench) -> Any:
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 1.1, 128: 1.05})  # 16 is dropped after its warm-up run
    kernel.fn.failures[64] = out_of_resources
    single = bench.kernel({16: 1.0}, double)
    tuned = bench.tune(
        lambda *ns: ([launch(kernel, numbers(n)) for n in ns], launch(single, numbers())),
        n_warmup=None,
        n_repeat=None,
    )
    tuned(64)
    return tuned


def another_key(bench: Bench) -> Any:
    tuned = several_configs(bench)
    tuned(64, 128)
    return tuned


def dropped(bench: Bench) -> Any:
    read_ms = bench.clock.read_ms

    def fails_late(mark: Any) -> float:
        if bench.clock.reads == 2:
            raise LaunchTimeout("stuck")
        return read_ms(mark)

    bench.clock.read_ms = fails_late
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with pytest.raises(LaunchTimeout):
        tuned()
    return tuned


def figures_of(report: Any) -> list[tuple[Any, ...]]:
    lines = str(report).splitlines()
    (head,) = [index for index, line in enumerate(lines) if line.startswith("context")] or [len(lines)]
    rows = [re.split(r"\s{2,}", line) for line in lines[head + 1 : head + 1 + len(report.contexts)]]
    return sorted((label, ms, spread.rstrip(" %"), *rest[:3]) for label, ms, spread, *rest in rows)


def figures_logged() -> list[tuple[Any, ...]]:
    session = load(Path(".autotune_logs")).sessions[-1]
    rows = tables.session_tables(session)[0].rows
    return sorted((row[0], row[2], row[6].lstrip("+"), *row[3:6]) for row in rows)


@pytest.mark.parametrize("program", [several_configs, another_key, dropped])
def test_the_report_and_the_command_line_give_the_same_figures(bench: Bench, program: Any) -> None:
    tuned = program(bench)
    assert figures_of(tuned.report) == figures_logged()
    closed = records_of(records.SessionClosed)[-1]
    assert (closed.runs, closed.contexts) == (tuned.report.runs, len(tuned.report.contexts))
    assert closed.contexts > 0


def test_the_report_and_the_command_line_give_the_same_figures_of_two_ranks() -> None:
    def program(rank: int) -> list[tuple[Any, ...]]:
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0 + rank, 64: 1.1 + 0.1 * rank})
        tuned = tune(bench, lambda: launch(kernel, numbers()), n_warmup=None, n_repeat=None)
        tuned()
        return figures_of(tuned.report)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one == figures_logged()
