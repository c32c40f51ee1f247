"""Choices and objective='thunk' in what ranks say: judged by the run, then against the default plan."""

from __future__ import annotations

import pytest

from benchmarks.simulation.protocol_simulation import Simulation, columns
from dist_autotune.search.final_comparison import DUEL_RUNS


def test_objective_thunk_takes_contexts_in_turn_from_their_kernel_time_winners():
    simulation = Simulation(
        {"a": ["a0", "a1"], "b": ["b0", "b1"]},
        {"a0": 2.0, "a1": 1.0, "b0": 1.0, "b1": 2.0},
        run_ms=lambda plan: 10.0 if plan["a"] == "a1" else 0.0,  # alone a1 is fast, with b it is not
        objective="thunk",
    )
    plans = simulation.session()
    assert [(plan["a"], plan["b"]) for plan in plans[:6]] == [
        ("a0", "b0"),
        ("a1", "b1"),  # both by kernel time: a1 and b0 win
        ("a0", "b0"),
        ("a1", "b0"),  # a by run time
        ("a0", "b0"),
        ("a0", "b1"),  # b by run time, with a's new winner
    ]
    assert simulation.winners() == {"a": "a0", "b": "b0"}


def test_objective_thunk_ends_with_an_alternating_comparison_with_the_default_plan():
    simulation = Simulation({"a": ["a0", "a1"]}, {"a0": 2.0, "a1": 1.0}, objective="thunk")
    plans = columns(simulation.session(), "a")
    assert len(plans) == 2 + 2 + DUEL_RUNS + 1
    assert plans[4:-1] == ["a1", "a0"] * (DUEL_RUNS // 2)
    assert plans[-1] == "a1"
    assert simulation.statuses() == {"a": "tuned"}


def test_the_default_plan_is_kept_and_said_so_when_the_tuned_one_is_not_faster():
    def run_ms(plan: dict[str, str]) -> float:  # the gain is gone by the time of the final comparison
        return 5.0 if plan["a"] == "a1" and len(simulation.plans) > 4 else 0.0

    simulation = Simulation({"a": ["a0", "a1"]}, {"a0": 2.0, "a1": 1.0}, run_ms=run_ms, objective="thunk")
    plans = columns(simulation.session(), "a")
    assert plans[-1] == "a0"
    assert simulation.winners() == {"a": "a0"}
    assert simulation.tuning.remark == "the default plan is kept: it took 2.000 ms, the tuned one 6.000 ms"


@pytest.mark.parametrize("at_run", range(6, 16))
def test_a_default_that_is_banned_during_the_comparison_is_not_taken_up_again(at_run):
    simulation = Simulation(
        {"a": ["a0", "a1", "a2"]},
        {"a0": 3.0, "a1": 2.0, "a2": 1.0},
        run_ms=lambda plan: 9.0 if plan["a"] == "a2" and len(simulation.plans) > 6 else 0.0,
        bans=lambda run, rank, name: {"a0": "no smem"} if run == at_run else {},
        objective="thunk",
    )
    simulation.session()
    assert simulation.tuning.contexts["a"].winner == 2
    assert simulation.winners() == {"a": "a2"}


@pytest.mark.parametrize("fails", ["k0", "k1"])
def test_a_comparison_left_to_the_next_session_outlives_a_candidate_that_fails_there(fails):
    sessions = 0

    def bans(run: int, rank: int, name: str) -> dict[str, str]:
        return {fails: "out of memory"} if (sessions, run, name) == (2, 3, "k") else {}

    simulation = Simulation(
        {"k": ["k0", "k1"], "x": ["x0", "x1", "x2"]},
        {"k0": 2.0, "k1": 1.0, "x0": 3.0, "x1": 2.0, "x2": 1.0},
        bans=bans,
        objective="thunk",
        max_runs=4,  # the first session leaves `k` to be compared, and `x` in the middle of its search
    )
    while "partial" in simulation.statuses().values() or not sessions:
        sessions += 1
        simulation.session()
        assert sessions < 20
    assert simulation.winners() == {"k": "k1" if fails == "k0" else "k0", "x": "x2"}
