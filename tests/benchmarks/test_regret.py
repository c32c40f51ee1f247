"""The benchmark of regret: sessions that tune, their picks as they were, and what is made of the times."""

import json
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


def programs(monkeypatch: pytest.MonkeyPatch, *sources: str) -> list[tuple[str, ...]]:
    """Let these be what is started, one after another; return a list of the arguments that each is given."""
    started: list[tuple[str, ...]] = []

    def torchrun(ranks: int, *arguments: str) -> list[str]:
        started.append(arguments)
        return [sys.executable, "-c", sources[len(started) - 1]]

    monkeypatch.setattr(regret, "torchrun", torchrun)
    return started


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
