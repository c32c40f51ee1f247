"""The progress bar: on rank 0 and a terminal, and in nobody's way."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from typing import Any

import pytest
from kernels_for_tests import Bench, launch, numbers

from dist_autotune import tunable
from dist_autotune.logs.progress import is_shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal for a test to redirect stderr to: pytest gives each phase of a test its own."""
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


@pytest.mark.parametrize(
    ("wanted", "rank", "is_terminal", "shown"),
    [
        (None, 0, True, True),
        (None, 0, False, False),
        (None, 1, True, False),
        (True, 0, False, True),
        (True, 1, True, False),
        (False, 0, True, False),
    ],
)
def test_it_is_shown_by_rank_0_on_a_terminal_unless_told_otherwise(
    monkeypatch, wanted, rank, is_terminal, shown
):
    monkeypatch.setattr(sys, "stderr", Terminal() if is_terminal else io.StringIO())
    assert is_shown(wanted, rank) is shown


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, closed(), object()], ids=["none", "closed", "no stream"])
def test_a_program_may_have_no_stderr(monkeypatch, stderr):
    tuned = tune()
    monkeypatch.setattr(sys, "stderr", stderr)
    tuned()
    assert tuned.settled


def test_brackets_in_a_key_are_no_markup(terminal):
    with contextlib.redirect_stderr(terminal):
        tune(lambda: tunable("layout", [1, 2], key=("[/row]",)))()
    assert "layout[[/row]]" in terminal.getvalue()


def tune(thunk: Any = lambda: None, **options: Any) -> Any:
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    return bench.tune(lambda: (launch(kernel, numbers()), thunk()), progress=None, name="step", **options)


def test_it_counts_the_runs_and_is_gone_at_the_end(terminal):
    with contextlib.redirect_stderr(terminal):
        tune()()
    drawn = terminal.getvalue()
    assert "tuning step" in drawn or "add[64" in drawn
    assert "3/3" in drawn
    assert drawn.endswith("\x1b[2K")  # the last thing written clears the line


def test_what_the_function_prints_goes_where_it_always_went(terminal, capsys):
    streams = []
    with contextlib.redirect_stderr(terminal):
        tune(lambda: streams.append((sys.stdout, sys.stderr)) or print("from the function"))()
    assert streams == [(sys.stdout, terminal)] * 3
    assert capsys.readouterr().out == "from the function\n" * 3
    assert "from the function" not in terminal.getvalue()


def test_it_has_no_thread(terminal):
    tune(cache=False)()  # starts the thread that watches how long a run takes
    before, seen = threading.active_count(), []
    with contextlib.redirect_stderr(terminal):
        tune(lambda: seen.append(threading.active_count()))()
    assert terminal.getvalue()
    assert seen == [before] * 3


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_a_session_that_fails_leaves_no_bar(terminal, mode):
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    kernel.fn.failures.update(dict.fromkeys((16, 32), lambda: KeyError("mine")))
    tuned = bench.tune(lambda: launch(kernel, numbers()), progress=None, mode=mode)
    with contextlib.redirect_stderr(terminal):
        with pytest.raises(KeyError):
            tuned()
        kernel.fn.failures.clear()
        while not tuned.settled:
            tuned()
    assert terminal.getvalue().endswith("\x1b[2K")


def test_settled_calls_show_nothing(terminal):
    tuned = tune()
    with contextlib.redirect_stderr(terminal):
        tuned()
        drawn = terminal.getvalue()
        tuned()
    assert drawn
    assert terminal.getvalue() == drawn
