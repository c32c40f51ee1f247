"""The report of a session, and what is read out of the logs of several ranks."""

from pathlib import Path
from typing import Any

import pytest
from example_files import write_session
from kernels_for_tests import Bench, double, launch, numbers, out_of_resources
from kernels_for_tests import records as records_of
from rank_programs import tune

from dist_autotune.logs import records
from dist_autotune.logs.writer import SessionLog
from dist_autotune.reports import tables
from dist_autotune.reports.history import SessionHistory, load_history
from dist_autotune.tables import as_lines
from dist_autotune.tuner.report import TunedContext, TuningReport
from ranks import assert_all_ok, run_ranks


def load_one(directory: Path) -> SessionHistory:
    (session,) = load_history(directory).sessions
    return session


def shown(directory: Path) -> list[str]:
    history = load_history(directory)
    return as_lines(*tables.history_parts(history, history.sessions))


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
        "No gain of matmul[4096, fp16]: the first config was not timed.",
        "No gain of add[7]: no config has a time yet.",
        "Logs: logs",
    ]


# ---- what the logs tell


def test_a_session_that_crashed_is_unfinished_and_still_readable(tmp_path: Path) -> None:
    write_session(tmp_path, ranks=(0,), part=slice(10))
    with SessionLog(tmp_path, 0) as log:
        log.write(records.RunFailed(session="s1", run=2, by_rank=1, error="ValueError: no"))
    session = load_one(tmp_path)
    assert session.closed.outcome == "unfinished"
    assert session.contexts[0].tuned.status == "unfinished"
    assert session.remarks() == ["Run 2 failed on rank 1: ValueError: no"]
    assert shown(tmp_path)


def test_a_session_whose_opening_is_lost_is_left_out_and_counted(tmp_path: Path) -> None:
    write_session(tmp_path, ranks=(0,), part=slice(1, 4))
    history = load_history(tmp_path)
    assert history.sessions == ()
    assert history.skipped == {"rank-0.jsonl": "skipped 3 lines: 3 x of a session whose opening is lost"}


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


def reported_in_logs() -> list[str]:
    """Return the report of the newest session in the logs, line by line."""
    *_, newest = load_history(Path(".autotune_logs")).sessions
    return str(newest.report).splitlines()


def reported(tuned: Any) -> list[str]:
    """Return the same of the program, which also names its logs."""
    *lines, logs = str(tuned.report).splitlines()
    assert logs.startswith("Logs: ")
    return lines


def by_whole_runs(bench: Bench) -> Any:
    tuned = bench.tuned({16: 3.0, 32: 1.0, 64: 1.1}, objective="thunk", n_warmup=None, n_repeat=None)
    tuned()
    return tuned


def online(bench: Bench) -> Any:
    tuned = bench.tuned({16: 3.0, 32: 1.0}, mode="online")
    while not tuned.settled:
        tuned()
    return tuned


def from_disk(bench: Bench) -> Any:
    online(bench)
    tuned = bench.tuned({16: 3.0, 32: 1.0})
    tuned()
    assert [context.status for context in tuned.report.contexts] == ["cached"]
    return tuned


def with_bits(bench: Bench) -> Any:
    kernel = bench.kernel({16: 3.0, 32: 2.0, 64: 1.0})

    def thunk() -> Any:
        y = launch(kernel, numbers())
        return y + (bench.launches[-1].block == 64)

    tuned = bench.tune(thunk, bits="check")
    tuned()
    (context,) = tuned.report.contexts
    assert context.same_bits is False
    return tuned


PROGRAMS = (with_bits, several_configs, by_whole_runs, online, from_disk)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_report_and_the_command_line_give_the_same_figures(bench: Bench, program: Any) -> None:
    tuned = program(bench)
    assert reported(tuned) == reported_in_logs()
    closed = records_of(records.SessionClosed)[-1]
    assert (closed.runs, closed.contexts) == (tuned.report.runs, len(tuned.report.contexts))
    assert closed.contexts > 0


def test_the_report_and_the_command_line_give_the_same_figures_of_two_ranks() -> None:
    def program(rank: int) -> list[str]:
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0 + rank, 64: 1.1 + 0.1 * rank})
        tuned = tune(bench, lambda: launch(kernel, numbers()), n_warmup=None, n_repeat=None)
        tuned()
        return reported(tuned)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == reported_in_logs()
    assert one[1:] == zero[1:]  # behind the heading, which has this rank's seconds


def test_what_a_report_says_can_be_computed_from_its_figures(bench: Bench) -> None:
    slow = bench.kernel({16: 4.0, 32: 2.0})
    quick = bench.kernel({16: 1.0, 32: 1.5}, double)
    tuned = bench.tune(lambda: (launch(quick, numbers()), [launch(slow, numbers()) for _ in range(3)]))
    tuned()
    report = tuned.report
    assert [(c.kernel, c.ms, c.launches, c.run_ms) for c in report.contexts] == [
        ("add", 2.0, 3, 6.0),
        ("double", 1.0, 1, 1.0),
    ]
    assert [c.gain_percent for c in report.contexts] == [50.0, 0.0]
    assert [round(report.share_percent(c), 1) for c in report.contexts] == [85.7, 14.3]
    assert (report.step.before_ms, report.step.after_ms) == (13.0, 7.0)
    assert "Tuned: launches 13.00 -> 7.000 ms a step (-46.2 %)" in str(report)
    assert reported(tuned) == reported_in_logs()
