"""Progress: on the first rank, a bar on a terminal and lines elsewhere, and in nobody's way."""

import contextlib
import gc
import io
import os
import re
import sys
from pathlib import Path

import pytest
from kernels_for_tests import Bench, Mine, launch, numbers
from rich.cells import cell_len

from dist_autotune.logs.progress import Progress
from dist_autotune.search.budget import Forecast, StepTimes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal for a test to redirect stderr to: pytest gives each phase of a test its own."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


class Seconds:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


FORECAST = {"timed": 30, "candidates": 60, "contexts": 28, "planned_trials": 24}


def standing(runs: int, settled: int) -> Forecast:
    return Forecast(**FORECAST, runs=runs, trials=runs, settled=settled)


def shown(wanted: bool | None, *, is_first: bool, stderr: io.StringIO) -> str:
    """Return what is written in 20 seconds of 1 second a run."""
    clock = Seconds()
    with contextlib.redirect_stderr(stderr):
        progress = Progress("train_step", wanted, is_first=is_first, clock=clock)
        for run in range(1, 21):
            clock.now += 1.0
            progress.update(standing(run, run), lambda: StepTimes(5.2, 3.9, "launch"))
        progress.close("settled after 20 runs, 20 s")
    return stderr.getvalue()


# ---- lines


def test_without_a_terminal_it_writes_a_line_at_the_opening_at_each_quarter_and_at_the_end():
    timed, gain = "30 of 60 candidates timed", "so far: launches 5.200 -> 3.900 ms a step (-25.0 %)"
    assert shown(None, is_first=True, stderr=io.StringIO()).splitlines() == [
        f"dist_autotune: tuning train_step: {line}"
        for line in (
            f"1 of 28 contexts settled, run 1, {timed}, about 23 runs to go, {gain}",
            f"6 of 28 contexts settled, run 6, {timed}, about 18 runs to go, 0:18 left, {gain}",
            f"12 of 28 contexts settled, run 12, {timed}, about 12 runs to go, 0:12 left, {gain}",
            f"18 of 28 contexts settled, run 18, {timed}, about 6 runs to go, 0:06 left, {gain}",
            "settled after 20 runs, 20 s",
        )
    ]


def test_when_all_contexts_are_settled_it_says_that_winners_are_compared():
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        Progress("train_step", None, is_first=True).update(standing(20, 28), lambda: None)
    assert stderr.getvalue().endswith("60 candidates timed, comparing winners with first configs\n")


def test_a_session_that_finds_all_results_writes_no_line():
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        progress = Progress("train_step", None, is_first=True)
        progress.update(Forecast(timed=0, candidates=0, planned_trials=0, runs=1), lambda: None)
        progress.close("settled after 1 run")
    assert stderr.getvalue() == ""


@pytest.mark.parametrize(("wanted", "is_first"), [(False, True), (None, False), (True, False)])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_it_is_shown_by_the_first_rank_alone_and_not_if_unwanted(wanted, is_first, kind):
    assert shown(wanted, is_first=is_first, stderr=kind()) == ""


def test_a_reader_that_is_gone_stops_nothing(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    assert shown(None, is_first=True, stderr=Gone()) == ""


# ---- the bar


def test_on_a_terminal_it_draws_a_bar_that_fits_80_columns(terminal):
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", shown(None, is_first=True, stderr=terminal))
    lines = [line for line in re.split(r"\x1b\[2K|\r|\n", drawn) if "train_step" in line]
    under_way = [line for line in lines if "60 timed" in line]
    assert under_way[-1].split(maxsplit=3)[3].split("  ") == ["30/60 timed", "3.900 ms (-25 %)", "0:04 left"]
    assert "left" not in under_way[2].rpartition("ms")[2]  # three runs say nothing of the time left
    assert lines[-1].endswith("settled")
    assert "\u2578" not in lines[-1]  # the half dash: the bar is full
    assert "dist_autotune:" not in drawn
    assert max(map(cell_len, lines)) <= 80


@pytest.mark.parametrize("raises", [True, False], ids=["a call raises", "its function goes"])
def test_a_session_that_is_left_gives_the_cursor_back_and_leaves_no_file_open(
    bench, terminal, tmp_path, raises
):
    kernel = bench.kernel({16: 3.0, 32: 1.0})

    def step() -> None:
        launch(kernel, numbers())
        if raises:
            raise Mine

    def cursor() -> tuple[int, int]:
        return terminal.getvalue().count("\x1b[?25l"), terminal.getvalue().count("\x1b[?25h")

    with contextlib.redirect_stderr(terminal):
        tuned = bench.tune(step, mode="replay" if raises else "online", progress=True)
        with contextlib.suppress(Mine):
            tuned()
        assert cursor() == (1, int(raises))
        del tuned
        gc.collect()
    assert cursor() == (1, 1)
    assert not any(
        os.path.realpath(each).startswith(str(tmp_path)) for each in Path("/proc/self/fd").iterdir()
    )


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, closed(), object()], ids=["none", "closed", "no stream"])
def test_a_program_may_have_no_stderr(monkeypatch, stderr):
    tuned = Bench().tuned({16: 3.0, 32: 1.0}, name="step", progress=None)
    monkeypatch.setattr(sys, "stderr", stderr)
    tuned()
    assert tuned.settled
