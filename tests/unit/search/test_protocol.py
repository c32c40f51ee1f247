"""How what all ranks said becomes the next plan: no kernel, no process, no clock."""

import pytest
from kernels_for_tests import Bench, launch, numbers
from rank_programs import tune

from benchmarks.simulation.protocol_simulation import Simulation, columns
from dist_autotune import tunable
from dist_autotune.search.context import RunVerdict
from dist_autotune.search.state import STARVED_RUNS
from ranks import assert_all_ok, run_ranks

# ---- contexts that are compiled


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


# ---- in which order contexts are judged by the whole run


def only_with(run_ms, condition, mode="replay", **options):
    """Return a simulation in which `detail` is asked for only under some option of `way`."""
    names = ["way", "detail", "other"]
    simulation = Simulation(
        {name: [f"{name}0", f"{name}1"] for name in names},
        {},
        choices=set(names),
        run_ms=lambda plan: run_ms[plan["way"]],
        launches=lambda run, rank, name: name != "detail" or condition(simulation._candidate("way")),
        mode=mode,
        **options,
    )
    return simulation


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_a_choice_that_the_best_plan_does_not_ask_for_gets_no_turn(mode):
    simulation = only_with({"way0": 2.0, "way1": 1.0}, lambda way: way == "way0", mode)
    simulation.tuning.open()
    while any(simulation.tuning.unsettled) or not simulation.plans:
        simulation.run()
        assert len(simulation.plans) < 100
    assert simulation.statuses() == {"way": "tuned", "detail": "starved", "other": "tuned"}
    assert simulation.tuning.contexts["detail"].by_run is RunVerdict.LEFT_OUT
    assert "detail1" not in columns(simulation.plans, "detail")
    # The first run, those of `way` and `other`; then, as long as a run that asks for it may still come.
    last_asked = max(number for number, plan in enumerate(simulation.plans) if plan["way"] == "way0")
    assert len(simulation.plans) == max(1 + 2 + 2, last_asked + 1 + STARVED_RUNS[mode])


@pytest.mark.parametrize("world", [1, 2])
def test_in_a_session_too(world):
    def program(rank):
        bench, asked = Bench(), []
        kernel = bench.kernel({16: 2.0, 32: 1.0})

        def step():
            launch(kernel, numbers())
            way = tunable(f"way {world}", ["fast", "slow"])
            asked.append(way)
            bench.spend(2.0 if way == "slow" else 1.0)
            if way == "slow":
                asked.append(tunable(f"detail {world}", [1, 2]))
            asked.append(tunable(f"last {world}", [3, 4]))

        tuned = tune(bench, step)
        tuned()
        statuses = {context.kernel: context.status for context in tuned.report.contexts}
        return statuses, asked, tuned.report.warning

    for statuses, asked, warning in assert_all_ok(run_ranks(program, world)):
        assert warning == ""
        assert statuses[f"way {world}"] == statuses[f"last {world}"] == "tuned"
        assert statuses[f"detail {world}"] == "starved"
        assert 2 not in asked
