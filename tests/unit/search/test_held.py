"""A context whose candidates are still compiled on some rank launches its incumbent."""

from __future__ import annotations

import pytest

from benchmarks.simulation.protocol_simulation import Simulation, columns
from dist_autotune.search.state import STARVED_RUNS

CANDIDATES = {"a": ["a0", "a1", "a2"]}
MS = {"a0": 3.0, "a1": 1.0, "a2": 2.0}


def test_nothing_is_tried_until_the_slowest_rank_has_all():
    left = {0: [2, 1, 0, 0, 0, 0], 1: [2, 2, 1, 1, 0, 0]}
    simulation = Simulation(
        CANDIDATES, MS, ranks=2, mode="online", compiling=lambda run, rank, name: (left[rank] + [0] * 9)[run]
    )
    plans = simulation.session()
    assert columns(plans, "a") == ["a0"] * 5 + ["a1", "a2", "a1"]
    assert simulation.statuses() == {"a": "tuned"}


def test_contexts_are_tuned_as_each_is_compiled():
    simulation = Simulation(
        {"a": ["a0", "a1"], "b": ["b0", "b1"]},
        {"a0": 2.0, "a1": 1.0, "b0": 2.0, "b1": 1.0},
        mode="online",
        compiling=lambda run, rank, name: {"a": run < 2, "b": run < 5}[name] + 0,
    )
    plans = simulation.session()
    assert columns(plans, "a") == ["a0"] * 3 + ["a1"] * 5
    assert columns(plans, "b") == ["b0"] * 6 + ["b1"] * 2


def test_a_rank_that_comes_late_and_compiles_holds_the_others_search():
    simulation = Simulation(
        CANDIDATES,
        MS,
        ranks=2,
        mode="online",
        launches=lambda run, rank, name: rank == 0 or run >= 1,
        compiling=lambda run, rank, name: int(rank == 1 and run < 4),
    )
    plans = simulation.session()
    assert columns(plans, "a") == ["a0", "a1", "a0", "a0", "a0", "a2", "a1"]


def test_what_fails_to_compile_on_one_rank_never_runs():
    def bans(run: int, rank: int, name: str) -> dict[str, str]:
        return {"a1": "does not compile"} if (run, rank) == (2, 1) else {}

    simulation = Simulation(
        CANDIDATES, MS, ranks=2, mode="online", bans=bans, compiling=lambda run, rank, name: int(run < 4)
    )
    plans = simulation.session()
    assert columns(plans, "a") == ["a0"] * 5 + ["a2", "a2"]


def test_a_context_that_is_not_launched_while_it_is_compiled_starves_as_any():
    simulation = Simulation(
        CANDIDATES,
        MS,
        mode="online",
        launches=lambda run, rank, name: run == 0,
        compiling=lambda run, rank, name: 1,
    )
    assert len(simulation.session()) == STARVED_RUNS["online"] + 2
    assert simulation.statuses() == {"a": "starved"}


@pytest.mark.parametrize("search", ["exhaustive", "racing"])
def test_runs_that_are_held_are_no_trials_in_the_forecast(search):
    simulation = Simulation(
        CANDIDATES, MS, mode="online", search=search, compiling=lambda run, rank, name: 2 * (run < 20)
    )
    simulation.tuning.open()
    for _ in range(20):
        simulation.run()
    forecast = simulation.tuning.forecast
    assert (forecast.trials, forecast.held, forecast.compiling) == (1, 19, 2)
    assert forecast.more_runs == forecast.planned_trials - 1
