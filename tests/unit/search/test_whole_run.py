"""The search for the fastest plan, `search="racing"`: what is launched, in which order, and how it ends."""

import pytest
from kernels_for_tests import Bench, launch, numbers
from msgspec.structs import replace
from rank_programs import tune

from benchmarks.simulation.protocol_simulation import Simulation, columns
from dist_autotune import tunable
from dist_autotune.search.budget import SearchedContexts
from dist_autotune.search.messages import HostTimes, Part
from ranks import assert_all_ok, run_ranks


def racing(contexts, ms, **options):
    return Simulation(contexts, ms, search="racing", **options)


def named(*names, candidates=2):
    return {name: [f"{name}{number}" for number in range(candidates)] for name in names}


def consumers(run_ms, **options):
    """Return a simulation of a choice between two kernels, each launched under one option only."""
    simulation = racing(
        named("way", "left", "right"),
        {"left0": 2.0, "left1": 1.0, "right0": 3.0, "right1": 1.5},
        choices={"way"},
        run_ms=run_ms,
        launches=lambda run, rank, name: (
            name == "way" or (name == "left") == (simulation._candidate("way") == "way0")
        ),
        **options,
    )
    return simulation


def test_an_option_wins_that_is_best_only_with_its_kernel_tuned():
    # With their first configs way1 takes 3.0 and way0 2.0; tuned, way1 takes 1.5 and way0 1.9.
    simulation = consumers(lambda plan: 0.9 if plan["way"] == "way0" else 0.0)
    simulation.session()
    assert simulation.winners() == {"way": "way1", "left": "left1", "right": "right1"}
    assert set(simulation.statuses().values()) == {"tuned"}


@pytest.mark.parametrize("options", [65, 100, 256])
@pytest.mark.parametrize("kernel", [0, 4])
def test_each_of_more_options_than_plans_race_is_tried(options, kernel):
    """Those behind the 64th were never launched but to explore them: the last one, twice as fast, lost."""
    contexts = named("way", candidates=options) | named("k", candidates=kernel)
    ms = {name: 1.0 + number / 10 for number, name in enumerate(contexts["k"])}
    last = f"way{options - 1}"
    simulation = racing(
        {name: each for name, each in contexts.items() if each},
        ms,
        choices={"way"},
        run_ms=lambda plan: 1.0 if plan["way"] == last else 2.0,
    )
    runs = len(simulation.session(2000))
    assert simulation.winners()["way"] == last
    assert runs <= SearchedContexts(simulation.tuning.rules, simulation.tuning.contexts.values()).planned_runs


@pytest.mark.parametrize(("options", "tried"), [(3, True), (17, False)])
def test_choices_of_one_kind_take_options_of_their_own_or_it_is_told_that_these_are_too_many(options, tried):
    wanted = {"up": "o1", "down": "o0", "in": "o1", "out": "o2"}
    contexts = {name: [f"o{number}" for number in range(options)] for name in wanted}
    simulation = racing(
        contexts, {}, choices={*wanted}, run_ms=lambda plan: 8.0 - len(wanted.items() & plan.items())
    )
    report = simulation._report
    simulation._report = lambda *about: replace(report(*about), host=HostTimes(enqueue_ms=9.0))
    simulation.session()
    assert (simulation.winners() == wanted) == tried
    assert ("took the same one" in simulation.tuning.made.remark) != tried
    assert "the host bounds this function: it takes 9 ms" in simulation.tuning.made.remark


def test_a_choice_that_only_one_option_asks_for_is_explored_and_raced_under_it():
    simulation = racing(
        named("way", "detail"),
        {},
        choices={"way", "detail"},
        run_ms=lambda plan: {"way0": 2.0, "way1": 3.0}[plan["way"]] - 2 * (plan.get("detail") == "detail1"),
        launches=lambda run, rank, name: name == "way" or simulation._candidate("way") == "way1",
    )
    plans = simulation.session()
    assert simulation.winners() == {"way": "way1", "detail": "detail1"}
    assert simulation.statuses() == {"way": "tuned", "detail": "tuned"}
    assert {plan.get("detail") for plan in plans if plan["way"] == "way0"} == {None}


def test_options_that_pay_only_together_are_found():
    together = {("a1", "b1"): 8.0, ("a0", "b0"): 10.0}
    simulation = racing(
        named("a", "b"),
        {},
        choices={"a", "b"},
        run_ms=lambda plan: together.get((plan["a"], plan["b"]), 11.0),
    )
    simulation.session()
    assert simulation.winners() == {"a": "a1", "b": "b1"}


@pytest.mark.parametrize("max_runs", [2, 5, 9, 13, 19, 21])
def test_a_session_without_runs_left_leaves_partial_results_and_later_ones_end_with_the_best(max_runs):
    simulation = consumers(lambda plan: 0.9 if plan["way"] == "way0" else 0.0, max_runs=max_runs)
    assert len(simulation.session()) == max_runs
    assert simulation.statuses()["way"] == "partial"
    assert simulation.plans[-1].items() <= simulation.winners().items()
    for _ in range(20):
        simulation.session()
    if max_runs == 2:
        return  # each session begins with as many
    assert simulation.statuses() == {"way": "tuned", "left": "tuned", "right": "tuned"}
    assert simulation.winners() == {"way": "way1", "left": "left1", "right": "right1"}


class Late(Simulation):
    """Ranks that tell of each whole run `RUNS_LATER`; until then what they tell is pending."""

    RUNS_LATER = 2

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._awaited: dict[int, tuple[int, Part]] = {}  # by rank: the run that its time is due in, and that

    def _report(self, run, rank, judged):
        due = self._awaited.get(rank)
        told = super()._report(run, rank, judged if due is None else None)
        if due is None and judged is None:
            return told
        due = self._awaited.setdefault(rank, (run + self.RUNS_LATER, told.run))
        if run < due[0]:
            return replace(told, run=Part(ran=due[1].ran, is_pending=True))
        return replace(told, run=self._awaited.pop(rank)[1])


def choice_of(make, **options):
    return make(
        named("way", candidates=3),
        {},
        choices={"way"},
        run_ms=lambda plan: {"way0": 3.0, "way1": 1.0, "way2": 2.0}[plan["way"]],
        search="racing",
        mode="online",
        **options,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_online_each_time_is_that_of_the_plan_that_ran_however_late_it_is_read(ranks):
    at_once, late = choice_of(Simulation, ranks=ranks), choice_of(Late, ranks=ranks)
    at_once.session()
    late.session()
    assert late.winners() == at_once.winners() == {"way": "way1"}
    times = late.tuning.contexts["way"].times.ms
    assert times == at_once.tuning.contexts["way"].times.ms == {0: 3.0, 1: 1.0, 2: 2.0}
    assert late.statuses() == {"way": "tuned"}
    assert len(late.plans) > 2 * len(at_once.plans)  # the runs between were no samples


# ---- what no run may try yet, or need not


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
