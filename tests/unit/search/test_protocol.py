"""How what all ranks said becomes the next plan: no kernel, no process, no clock."""

from __future__ import annotations

import itertools
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.protocol_simulation import Simulation, columns
from dist_autotune.errors import NoValidConfig
from dist_autotune.search.final_comparison import DUEL_RUNS
from dist_autotune.search.state import ADMISSION_RUNS
from dist_autotune.search.strategies import STRATEGIES

# ---- the schedule


@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(
    ("ms", "best_0", "best_1"),
    [
        ({"a0": 1.0, "a1": 2.0, "b0": 3.0, "b1": 2.0, "b2": 1.0}, "a0", "b2"),
        ({"a0": 2.0, "a1": 1.0, "b0": 3.0, "b1": 1.0, "b2": 2.0}, "a1", "b1"),
        ({"a0": 1.0, "a1": 1.0, "b0": 1.0, "b1": 1.0, "b2": 1.0}, "a0", "b0"),
    ],
    ids=["a0 b2", "a1 b1", "ties"],
)
def test_two_kernels_with_two_and_three_configs_follow_the_schedule(ms, best_0, best_1, ranks):
    simulation = Simulation({"a": ["a0", "a1"], "b": ["b0", "b1", "b2"]}, ms, ranks=ranks, n_repeat=2)
    plans = simulation.session()
    assert columns(plans, "a") == ["a0", "a0", "a1", "a1", best_0, best_0, best_0]
    assert columns(plans, "b") == ["b0", "b0", "b1", "b1", "b2", "b2", best_1]
    assert simulation.statuses() == {"a": "tuned", "b": "tuned"}


def test_a_context_that_appears_later_starts_then_and_all_end_before_the_final_run():
    simulation = Simulation(
        {"a": ["a0", "a1"], "b": ["b0", "b1"]},
        {"a0": 1.0, "a1": 2.0, "b0": 2.0, "b1": 1.0},
        launches=lambda run, rank, name: name == "a" or run >= 1,
    )
    plans = simulation.session()
    assert columns(plans, "a") == ["a0", "a1", "a0", "a0"]
    assert columns(plans, "b") == [None, "b0", "b1", "b1"]


def test_a_session_without_launches_ends_after_three_runs():
    assert len(Simulation({}, {}).session()) <= 3


def test_the_second_session_of_settled_contexts_is_one_run():
    simulation = Simulation({"a": ["a0", "a1"]}, {"a0": 2.0, "a1": 1.0})
    simulation.session()
    assert simulation.session() == [{"a": "a1"}]


@pytest.mark.parametrize(
    ("contexts", "options", "runs"),
    [
        ({"a": 2, "b": 3}, {"n_repeat": 2}, 3 * 2 + 1),
        ({"a": 2}, {"n_warmup": 3, "n_repeat": 5}, 2 * 8 + 1),
        ({"a": 2, "s": 3}, {}, 2 + 3 + 1),
        ({"s": 3}, {}, 1 + 3 + 1),
        ({"a": 2}, {"objective": "thunk"}, 2 + 2 + DUEL_RUNS + 1),
    ],
    ids=["two kernels", "with warm-ups", "kernel and choice", "choice", "objective=thunk"],
)
def test_the_runs_that_the_search_plans_are_the_runs_it_makes(contexts, options, runs):
    candidates = {name: [f"{name}{i}" for i in range(size)] for name, size in contexts.items()}
    ms = {c: 10.0 - i for names in candidates.values() for i, c in enumerate(names)}
    simulation = Simulation(
        candidates, ms, choices={"s"}, run_ms=lambda plan: ms[plan.get("s", "a0")], **options
    )
    simulation.tuning.open()
    planned = []
    while not simulation.tuning.done:
        simulation.run()
        planned.append(simulation.tuning.forecast.planned_trials + 1)
    assert len(simulation.plans) == planned[0] == runs


@settings(max_examples=30)
@given(
    search=st.sampled_from(sorted(STRATEGIES)),
    ranks=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_sessions_end_with_the_final_run_on_winners_whatever_is_measured(search, ranks, sizes, seed):
    contexts = {f"k{i}": [f"k{i}c{j}" for j in range(size)] for i, size in enumerate(sizes)}

    def ms(candidate: str, rank: int) -> float:
        return 1.0 + zlib.crc32(f"{candidate} {rank} {seed}".encode()) % 97 / 10

    simulation = Simulation(contexts, ms, ranks=ranks, search=search, n_repeat=2)
    plans = simulation.session()
    assert plans[-1] == simulation.winners()
    assert set(simulation.statuses().values()) == {"tuned"}


# ---- ends that come early


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


def test_a_settled_context_that_loses_its_last_candidate_ends_the_session_and_is_forgotten():
    simulation = Simulation(
        {"a": ["a0"], "b": ["b0", "b1"]},
        {"a0": 1.0, "b0": 1.0, "b1": 2.0},
        bans=lambda run, rank, name: {"a0": "no smem"} if (run, name) == (2, "a") else {},
        n_repeat=3,
    )
    simulation.tuning.open()
    simulation.run()
    assert simulation.statuses() == {"a": "tuned", "b": ""}
    simulation.run()
    with pytest.raises(NoValidConfig, match=r"a\[k\]: all 1 configs failed"):
        simulation.run()
    assert simulation.tuning.drop_unsettled() == {"a", "b"}
    assert simulation.tuning.contexts == {}
