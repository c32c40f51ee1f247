"""The benchmark of regret: sessions that tune, their picks as they were, and what is made of the times."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_program

from benchmarks import regret
from benchmarks.common import render
from benchmarks.fresh_sessions.sessions import Sessions

PROGRAM = "benchmarks.regret"
TINY = "32x16x16"


# ---- the process that starts the others


SAYS_AND_FAILS = "import sys; print('ValueError: of a rank'); sys.exit(3)"
HANGS = "import time; time.sleep(600)"
LIMIT_S = 0.5


class WithLimit(subprocess.Popen):
    """A process whose limit is over if it hangs, and never before its end if it does not."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout == LIMIT_S and HANGS in self.args:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return super().wait(None if timeout == LIMIT_S else timeout)


def programs(monkeypatch: pytest.MonkeyPatch, *sources: str) -> list[tuple[str, ...]]:
    """Let these be what is started, one after another; return a list of the arguments that each is given."""
    started: list[tuple[str, ...]] = []

    def torchrun(ranks: int, *arguments: str) -> list[str]:
        started.append(arguments)
        return [sys.executable, "-c", sources[len(started) - 1]]

    monkeypatch.setattr(regret, "torchrun", torchrun)
    return started


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process lives on
    monkeypatch.setattr(sys, "argv", [PROGRAM, "--op", "gemm_rs", "--directory", "kept", *arguments])
    return regret.start_all(regret.parse())


def test_a_session_that_fails_or_hangs_is_told_and_the_rest_goes_on(monkeypatch, capfd):
    monkeypatch.setattr(subprocess, "Popen", WithLimit)
    started = programs(monkeypatch, "", SAYS_AND_FAILS, HANGS, "", "")
    assert start(monkeypatch, "--sessions", "4", "--session-limit-s", str(LIMIT_S), "--nproc", "3") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].startswith("session 2: ")
    assert lines[1].endswith("s, ended with 3; ValueError: of a rank")
    assert lines[2].endswith("s, took longer than 0.5 s; it printed nothing")
    endings = [(each.session, bool(each.trouble)) for each in Sessions(Path("kept")).ended()]
    assert endings == [(1, False), (2, True), (3, True), (4, False)]
    assert [arguments[-2:] for arguments in started[:4]] == [("--session", str(n)) for n in (1, 2, 3, 4)]
    assert started[4][-4:-1] == ("--timing", "yes", "--ran-as")
    command = "python -m benchmarks.regret --op gemm_rs --sessions 4 --session-limit-s 0.5 --nproc 3"
    assert started[4][-1] == command


# ---- picks


@pytest.mark.usefixtures("tried_once")
def test_two_sessions_tune_and_every_pick_and_alternative_is_timed(tmp_path: Path) -> None:
    common = ("--op", "ag_gemm", "--shapes", TINY, "--sessions", "2", "--directory", str(tmp_path / "kept"))
    common += ("--warm-ups", "1", "--iterations", "2", "--json", "record.json", "--commit", "0ff1ce")
    sessions = Sessions(tmp_path / "kept")
    for number in (1, 2):
        sessions.of(number).mkdir(parents=True)
        (sessions.of(number) / "begin").touch()
        environment = sessions.environment(number)
        run_program(PROGRAM, *common, "--session", str(number), environment=environment)
    assert list(sessions.picks("32 x 16 x 16", 2)) == [1, 2]
    run_program(PROGRAM, *common, "--timing", "yes", "--ran-as", "python -m benchmarks.regret")
    record = json.loads(Path("record.json").read_text())
    (case,) = record["cases"]
    assert case["trouble"] == case["remarks"] == case["trouble_at_closing"] == []
    ms = {arm["name"]: arm["ms"] for arm in case["arms"]}
    again = [name for name in ms if name.endswith(" again")]
    assert len(again) == 1
    assert set(ms) == {plan["arm"] for plan in case["plans"]} | set(again)
    regrets = case["regrets"][""]
    arm_of = {str(number): plan["arm"] for plan in case["plans"] for number in plan["sessions"]}
    assert set(arm_of) == {"1", "2"}
    least = min(time for name, time in ms.items() if name not in again)
    for session, percent in regrets["percent"].items():
        assert percent == pytest.approx(100 * (ms[arm_of[session]] / least - 1))
    fixed = {choice for plan in case["plans"] for choice in plan["choices"]}
    ways = {'ag_gemm consumer "plain"', 'ag_gemm way "collective"'}
    assert ways <= fixed
    page = render.page(record)
    for part in (
        "regret of 2 sessions, 2 x CPU",
        "| session 1 | session 2 | median | worst |",
        "## Each arm",
    ):
        assert part in page
    assert "they show behaviour, not speed" in page
