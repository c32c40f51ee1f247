"""The benchmark of regret: sessions that tune, their picks as they were, and what is made of the times."""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from benchmarks import regret
from benchmarks.common import render
from benchmarks.common.launched import Launched, Observer, autotuners
from benchmarks.common.ranks import Ranks
from benchmarks.fresh_sessions import plans as regret_plans
from benchmarks.fresh_sessions.plans import (
    Contender,
    Contest,
    Replay,
    nothing_is_tried,
    ranked_configs,
    tuned,
)
from benchmarks.fresh_sessions.sessions import Found, Pick, Sessions
from benchmarks.fresh_sessions.subjects import OPERATIONS, open_ag_gemm
from benchmarks.fresh_sessions.table import Regret, arms_table, table
from ranks import assert_all_ok, run_ranks

PROGRAM = "benchmarks.regret"
TINY = "32x16x16"
PLACES = (0, 2)  # of candidates that two sessions pick


# ---- arithmetic


def test_regret_is_what_a_pick_takes_longer_than_the_least_of_all_arms():
    ms = {"pick A": 1.02, "pick B": 1.5, "plain": 1.0, "matmul": 2.0}
    found = Regret.of(ms, {3: "pick A", 1: "pick A", 2: "pick B", 4: "not timed"})
    assert (found.best, found.best_ms) == ("plain", 1.0)
    assert found.percent == {1: pytest.approx(2.0), 2: pytest.approx(50.0), 3: pytest.approx(2.0)}
    assert found.median_percent == pytest.approx(2.0)
    assert found.worst_percent == pytest.approx(50.0)


def test_the_table_has_a_column_for_each_session_and_tells_what_is_missing():
    answer = Regret.of({"pick A": 1.034, "plain": 1.0}, {1: "pick A", 3: "pick A"}).as_dict()
    plan = {"arm": "pick A", "sessions": [1, 3], "choices": ["pieces 2"], "launched": ["k: BLOCK: 1"]}
    case = {
        "case": "64", "regrets": {"": answer}, "noise_percent": 0.1234, "plans": [plan],
        "arms": [{"name": "pick A", "ms": 1.034}, {"name": "plain", "ms": 1.0, "host_bound": True}],
        "trouble": ["no time of the pick of sessions 2"], "remarks": ["matmul is not timed"],
        "tuning": {"1": {"runs": 70, "seconds": 2.0}, "3": {"runs": 61, "seconds": 2.5}},
    }  # fmt: skip
    made = table([case], "M", [1, 2, 3])
    assert made["columns"] == ("M", "best", "ms", "session 1", "session 2", "session 3", "median", "worst")
    assert made["rows"] == [("64", "plain", "1.0000", "3.40", "n/a", "3.40", "3.40", "3.40")]
    assert made["notes"][1:] == [
        "One pick timed as two arms differs by 0.12 %.",
        "64: sessions tuned in 61 to 70 runs, 2.0 to 2.5 s.",
        "64: no time of the pick of sessions 2",
        "64: matmul is not timed",
        "The device waited for the host in some arm of 64.",
    ]
    assert arms_table([case], "M")["rows"] == [("64", "pick A", "1.0340", "1, 3", "pieces 2", "k: BLOCK: 1")]


def test_configs_are_ranked_by_what_sessions_timed_relative_to_their_own_best():
    def pick(**timings: float) -> Pick:
        found = Found("gemm", "1", "a", "tuned", 1.0, timings)
        return Pick((found,), (("gemm", "a"),), runs=1, seconds=1.0)

    slow_machine, fast_machine = pick(a=20.0, b=22.0, c=30.0), pick(a=1.4, b=1.0, c=1.3)
    outlier = pick(b=9.0, c=1.0)
    assert ranked_configs("gemm", {1: slow_machine, 2: fast_machine}) == ["b", "a", "c"]
    assert ranked_configs("gemm", {1: slow_machine, 2: fast_machine, 3: outlier}) == ["b", "a", "c"]
    assert ranked_configs("other", {1: slow_machine}) == []


# ---- the process that starts the others


SAYS_AND_FAILS = "import sys; print('ValueError: of a rank'); sys.exit(3)"
HANGS = "import time; time.sleep(60)"


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
    started = programs(monkeypatch, "", SAYS_AND_FAILS, HANGS, "", "")
    assert start(monkeypatch, "--sessions", "4", "--session-limit-s", "0.5", "--nproc", "3") == 0
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


def test_with_a_directory_only_sessions_that_did_not_end_well_are_run_again(monkeypatch, capfd):
    programs(monkeypatch, "", SAYS_AND_FAILS, "")
    start(monkeypatch, "--sessions", "2")
    again = programs(monkeypatch, "", "")
    assert start(monkeypatch, "--sessions", "2") == 0
    assert [arguments[-2:] for arguments in again[:1]] == [("--session", "2")]
    assert "session 1: was there" in capfd.readouterr().out
    assert [each.trouble for each in Sessions(Path("kept")).ended()] == ["", ""]
    assert start(monkeypatch, "--dtype", "fp16") == 2
    assert "kept holds sessions of" in capfd.readouterr().err


def test_a_session_s_processes_have_empty_caches_and_nothing_of_this_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "DIST_AUTOTUNE_MODE"):
        monkeypatch.setenv(name, "1")
    sessions = Sessions(Path("kept").absolute())
    found = [sessions.environment(number, cold=False) for number in (1, 2)]
    assert {"RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & found[0].keys() == set()
    assert "DIST_AUTOTUNE_MODE" not in found[0]
    assert found[0]["DIST_AUTOTUNE_CACHE_DIR"] != found[1]["DIST_AUTOTUNE_CACHE_DIR"]
    assert found[0]["TRITON_CACHE_DIR"] == found[1]["TRITON_CACHE_DIR"]
    cold = [sessions.environment(number, cold=True)["TRITON_CACHE_DIR"] for number in (1, 2)]
    assert cold[0] != cold[1]


# ---- picks


def searching(place: int) -> Callable[..., Any]:
    """Return a search that tries and picks the candidate in this place."""

    def search(candidates: Any, **options: Any) -> Any:
        yield place
        return place

    return search


def replayed(rank: int, directory: Path) -> dict[str, Any]:
    """Pick two configs of one kernel in two sessions, replay both in turns, and one with the other's pick."""
    ranks = Ranks()
    options = Namespace(dtype="fp32", backend="auto", alternatives="quick")
    shape = OPERATIONS["ag_gemm"].shape(64, 48, 32)
    subject = open_ag_gemm(shape, options, ranks)
    subject.refresh()
    callee, observer = subject.alternatives["plain, 1 piece, 2 programs"].open(), Observer(autotuners())
    picks = {}
    for place in PLACES:
        observer.clear()
        picks[place] = tuned(callee, observer, "x", directory / str(place), search=searching(place))
    contest = Contest(ranks)
    with nothing_is_tried():
        replays = {place: Replay(callee, directory / str(place), observer, "x") for place in picks}
        loaded = [
            contest.load(replays[place], picks[place], f"session {place}", contest.trouble) for place in picks
        ]
        turns = [(place, observer.launches_of(replays[place])) for place in (0, 2, 0, 0, 2)]
        swapped = contest.load(replays[2], picks[0], "the other", contest.trouble)
        timed = [replays[0].contender("own"), Contender("not its own", replays[0], replays[2].launched)]
        measured = {"arms": [{"name": each.arm, "ms": 1.0} for each in timed]}
        regret_plans.void_what_launched_others(measured, timed, observer, ranks, [])
    for each in subject.operations:
        each.close()
    return {
        "picked": [picks[place].launched for place in picks], "loaded": loaded, "turns": turns,
        "swapped": swapped, "trouble": contest.trouble, "arms": measured["arms"],
    }  # fmt: skip


def test_a_pick_loaded_from_the_cache_of_its_session_is_what_is_launched(tmp_path):
    zero, one = assert_all_ok(run_ranks(replayed, 2, tmp_path))
    assert zero == one
    kernels = [[kernel for kernel, _ in launched] for launched in zero["picked"]]
    assert kernels == [["all_gather_gemm"]] * 2
    assert zero["picked"][0] != zero["picked"][1]
    assert zero["loaded"] == [True, True]
    for place, launched in zero["turns"]:
        picked = zero["picked"][PLACES.index(place)]
        assert launched == tuple(Launched(*each) for each in picked)
    assert zero["swapped"] is False
    assert "the cache of the session does not give back its pick: all_gather_gemm[" in zero["trouble"][0]
    own, not_its_own = zero["arms"]
    assert own == {"name": "own", "ms": 1.0}
    assert not_its_own["unavailable"].startswith("it launched all_gather_gemm: BLOCK_M")


def collective_of(rank: int, name: str) -> tuple[bool, tuple[str, ...]]:
    """Make a call of the operation by its collective; return whether it is right, and what it fixes."""
    ranks, operation = Ranks(), OPERATIONS[name]
    options = Namespace(dtype="fp32", backend="auto", alternatives="quick")
    sizes = (24, 32, 32, 4, 2) if "moe" in name else (64, 48, 32)
    subject = operation.open(operation.shape(*sizes), options, ranks)
    subject.refresh()
    alternative = subject.alternatives["collective"]
    callee = alternative.open()
    arm = subject.arm("collective", lambda: callee.call)
    is_right = arm.error(callee.call()) <= arm.limit
    callee.check()
    for each in subject.operations:
        each.close()
    assert (len(subject.operations), alternative.has_kernel) == (2, "moe" in name)
    return is_right, alternative.choices


@pytest.mark.filterwarnings("ignore:.*has not been tuned")
@pytest.mark.parametrize("name", ["ag_gemm", "gemm_rs", "ag_moe", "moe_rs"])
def test_a_collective_is_an_alternative_that_computes_what_the_operation_does(name):
    outcomes = assert_all_ok(run_ranks(collective_of, 2, name))
    assert outcomes == [(True, (f'{name} way "collective"',))] * 2


def test_two_sessions_tune_and_every_pick_and_alternative_is_timed(tmp_path: Path) -> None:
    common = ("--op", "ag_gemm", "--shapes", TINY, "--sessions", "2", "--directory", str(tmp_path / "kept"))
    common += ("--warm-ups", "1", "--iterations", "2", "--json", "record.json", "--commit", "0ff1ce")
    sessions = Sessions(tmp_path / "kept")
    for number in (1, 2):
        sessions.of(number).mkdir(parents=True)
        (sessions.of(number) / "begin").touch()
        environment = sessions.environment(number, cold=False)
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
    ways = {'ag_gemm consumer "plain"', 'ag_gemm consumer "matmul"', 'ag_gemm way "collective"'}
    assert ways <= fixed
    page = render.page(record)
    for part in (
        "regret of 2 sessions, 2 x CPU",
        "| session 1 | session 2 | median | worst |",
        "## Each arm",
    ):
        assert part in page
    assert "they show behaviour, not speed" in page
