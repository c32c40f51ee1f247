"""A context whose candidates are still compiled on some rank launches its incumbent."""

from __future__ import annotations

from benchmarks.simulation.protocol_simulation import Simulation, columns

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
