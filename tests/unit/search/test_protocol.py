"""How what all ranks said becomes the next plan: no kernel, no process, no clock."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.simulation.protocol_simulation import Simulation
from dist_autotune.search.state import ADMISSION_RUNS


@pytest.mark.parametrize(("first_run", "status"), [(ADMISSION_RUNS - 1, ""), (ADMISSION_RUNS, "partial")])
def test_contexts_are_admitted_in_the_first_sixteen_runs(first_run, status):
    contexts = {"a": ["a0", "a1"], "b": ["b0", "b1"]}
    simulation = Simulation(
        contexts,
        dict.fromkeys(["a0", "a1", "b0", "b1"], 1.0),
        launches=lambda run, rank, name: name == "a" or run >= first_run,
        n_repeat=50,
    )
    simulation.tuning.open()
    for _ in range(first_run + 1):
        simulation.run()
    assert simulation.statuses()["b"] == status
    assert simulation.winners()["b"] == "b0"


def test_a_search_without_an_end_is_cut_at_four_times_what_is_planned():
    def endless(candidates, *, n_warmup, n_repeat):
        for index in itertools.cycle(candidates):  # noqa: UP028  a cycle has no send()
            yield index

    simulation = Simulation(
        {"a": ["a0", "a1"]}, {"a0": 2.0, "a1": 1.0}, strategy=endless, search="endless", n_repeat=3
    )
    plans = simulation.session()
    assert len(plans) == 4 * (2 * 3 + 1)
    assert (simulation.statuses(), simulation.winners()) == ({"a": "partial"}, {"a": "a1"})
