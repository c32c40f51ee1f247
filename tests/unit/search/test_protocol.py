"""What no run may try yet, or need not: candidates that compile, choices that no winner asks for."""

import pytest
from kernels_for_tests import Bench, launch, numbers
from rank_programs import tune

from benchmarks.simulation.protocol_simulation import Simulation, columns
from dist_autotune import tunable
from ranks import assert_all_ok, run_ranks


def test_nothing_is_tried_until_the_slowest_rank_has_all():
    left, ms = {0: [2, 1, 0, 0, 0, 0], 1: [2, 2, 1, 1, 0, 0]}, {"a0": 3.0, "a1": 1.0, "a2": 2.0}
    compiling = lambda run, rank, name: (left[rank] + [0] * 9)[run]  # noqa: E731
    simulation = Simulation({"a": [*ms]}, ms, ranks=2, mode="online", compiling=compiling)
    plans = simulation.session()
    assert columns(plans, "a") == ["a0"] * 5 + ["a1", "a2", "a1"]
    assert simulation.statuses() == {"a": "tuned"}


@pytest.mark.parametrize("world", [1, 2])
def test_a_choice_that_the_best_plan_does_not_ask_for_gets_no_turn(world):
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
