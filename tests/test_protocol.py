"""How what all ranks said becomes the next plan, and how payloads merge: no kernel, no process, no clock."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_autotune.duel import DUEL_RUNS
from dist_autotune.errors import NoValidConfig, RankMismatch
from dist_autotune.flows import STRATEGIES, exhaustive
from dist_autotune.payload import Announcement, Part, Payload, check_facts, femtoseconds, merge
from dist_autotune.protocol import ADMISSION_RUNS, Tuning
from dist_autotune.search import BY_LAUNCH, Context, Rules

Ms = Mapping[str, float] | Callable[[str, int], float]


def rules(**options: Any) -> Rules:
    chosen = {"search": "exhaustive", "n_warmup": 0, "n_repeat": 1, "rank_reduce": "max", **options}
    return Rules(**{"strategy": STRATEGIES.get(chosen["search"], exhaustive), **chosen})


class Simulation:
    """All ranks at once: each launches what is planned and tells its own statistic.

    `contexts` are the candidates of each, in the order of first launch; `ms` maps candidates to a time,
    for all ranks or by rank. The whole run takes the sum of its launches, and `run_ms(plan)` more.
    """

    def __init__(
        self,
        contexts: Mapping[str, Sequence[str]],
        ms: Ms,
        *,
        ranks: int = 1,
        choices: Collection[str] = (),
        run_ms: Callable[[dict[str, str]], float] = lambda plan: 0.0,
        launches: Callable[[int, int, str], bool] = lambda run, rank, name: True,
        bans: Callable[[int, int, str], dict[str, str]] = lambda run, rank, name: {},
        second: float = 0.0,
        **options: Any,
    ) -> None:
        self.contexts = contexts
        self.ms = ms
        self.ranks = ranks
        self.choices = choices
        self.run_ms = run_ms
        self.launches = launches
        self.bans = bans
        self.second = second  # what each run takes of the budget
        self.tuning = Tuning(rules(**options))
        self.plans: list[dict[str, str]] = []  # of each run: context -> candidate launched
        self._announced: set[tuple[int, str]] = set()
        self._samples: dict[Any, list[float]] = {}
        self._began = 0

    def session(self, runs_at_most: int = 500) -> list[dict[str, str]]:
        """Run until the session is over; return the plans of its runs."""
        self.tuning.open()
        self._began = len(self.plans)
        while not self.tuning.done:
            self.run()
            assert len(self.plans) - self._began < runs_at_most, "the session does not end"
        return self.plans[self._began :]

    def run(self) -> None:
        run = len(self.plans) - self._began
        judged = self.tuning.judged_run
        payloads = [self._payload(run, rank, judged) for rank in range(self.ranks)]
        self.plans.append(self._planned(run))
        merged = functools.reduce(merge, (payload.encode() for payload in payloads))
        self.tuning.step(Payload.decode(merged))

    def winners(self) -> dict[str, str]:
        return {name: c.digests[c.incumbent] for name, c in self.tuning.contexts.items()}

    def statuses(self) -> dict[str, str]:
        return {name: context.status for name, context in self.tuning.contexts.items()}

    def _planned(self, run: int) -> dict[str, str]:
        return {
            name: self._candidate(name)
            for name in self.contexts
            if any(self.launches(run, rank, name) for rank in range(self.ranks))
        }

    def _candidate(self, name: str) -> str:
        context = self.tuning.contexts.get(name)
        return self.contexts[name][0] if context is None else context.digests[context.planned]

    def _payload(self, run: int, rank: int, judged: tuple[str, str] | None) -> Payload:
        names = [name for name in self.contexts if self.launches(run, rank, name)]
        plan = {name: self._candidate(name) for name in names}
        took = sum(self._ms(c, rank) for name, c in plan.items() if name not in self.choices)
        whole = Part()
        if judged is not None:
            whole = self._timed("|".join(judged), took + self.run_ms(plan), ("run", rank, judged))
        parts = {name: self._part(run, rank, name, plan[name]) for name in names}
        elapsed_s = self.second * (run + 1)
        return Payload("run", rank, parts=parts, run=whole, elapsed_s=elapsed_s)

    def _part(self, run: int, rank: int, name: str, candidate: str) -> Part:
        announcement = None
        if (rank, name) not in self._announced:
            self._announced.add((rank, name))
            order = tuple((c, c) for c in self.contexts[name])
            announcement = Announcement(
                rank, name, "k", order, tuple(sorted(self.contexts[name])), is_choice=name in self.choices
            )
        context = self.tuning.contexts.get(name)
        part = Part(ran=candidate)
        on_trial = context is None or (context.judge == BY_LAUNCH and context.trial is not None)
        if on_trial and name not in self.choices and not (context is not None and context.is_warmup):
            part = self._timed(candidate, self._ms(candidate, rank), (name, rank, candidate))
        bans = {c: (rank, reason) for c, reason in self.bans(run, rank, name).items()}
        return Part(**{**vars(part), "bans": bans, "announcement": announcement})

    def _timed(self, ran: str, ms: float, where: Any) -> Part:
        samples = self._samples.setdefault(where, [])
        samples.append(ms)
        so_far = statistics.median(samples)
        return Part(ran=ran, worst_ms=so_far, best_ms=so_far, total_fs=femtoseconds(so_far), measured=1)

    def _ms(self, candidate: str, rank: int) -> float:
        return self.ms(candidate, rank) if callable(self.ms) else self.ms[candidate]


def columns(plans: Sequence[Mapping[str, str]], name: str) -> list[str | None]:
    return [plan.get(name) for plan in plans]


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


def test_warm_ups_come_before_the_samples_of_each_candidate():
    simulation = Simulation({"a": ["a0", "a1"]}, {"a0": 2.0, "a1": 1.0}, n_warmup=2, n_repeat=1)
    assert columns(simulation.session(), "a") == ["a0"] * 3 + ["a1"] * 3 + ["a1"]


def test_a_context_that_appears_later_starts_then_and_all_end_before_the_final_run():
    simulation = Simulation(
        {"a": ["a0", "a1"], "b": ["b0", "b1"]},
        {"a0": 1.0, "a1": 2.0, "b0": 2.0, "b1": 1.0},
        launches=lambda run, rank, name: name == "a" or run >= 1,
    )
    plans = simulation.session()
    assert columns(plans, "a") == ["a0", "a1", "a0", "a0"]
    assert columns(plans, "b") == [None, "b0", "b1", "b1"]


def test_a_single_candidate_needs_no_trial():
    assert Simulation({"a": ["a0"]}, {"a0": 1.0}).session() == [{"a": "a0"}]


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
        planned.append(simulation.tuning.planned_runs)
    assert len(simulation.plans) == planned[0] == runs


# ---- ends that come early


@pytest.mark.parametrize(
    ("mode", "patience"), [("replay", 3), ("online", 64)], ids=["replay: 3 runs", "online: 64 runs"]
)
def test_a_context_that_is_no_longer_launched_starves(mode, patience):
    simulation = Simulation(
        {"a": ["a0", "a1"]},
        {"a0": 1.0, "a1": 2.0},
        launches=lambda run, rank, name: run == 0,
        mode=mode,
        n_repeat=5,
    )
    simulation.tuning.open()
    simulation.run()
    for _ in range(patience - 1):
        simulation.run()
        assert simulation.statuses() == {"a": ""}
    simulation.run()
    assert simulation.statuses() == {"a": "starved"}
    assert simulation.winners() == {"a": "a0"}


def test_a_starved_context_does_not_keep_the_others_from_settling():
    simulation = Simulation(
        {"a": ["a0", "a1"], "b": ["b0", "b1"]},
        {"a0": 1.0, "a1": 2.0, "b0": 2.0, "b1": 1.0},
        launches=lambda run, rank, name: name == "b" or run == 0,
        n_repeat=4,
    )
    simulation.session()
    assert simulation.statuses() == {"a": "starved", "b": "tuned"}
    assert simulation.winners()["b"] == "b1"


def test_a_launch_now_and_then_does_not_starve():
    simulation = Simulation(
        {"a": ["a0", "a1"]},
        {"a0": 2.0, "a1": 1.0},
        launches=lambda run, rank, name: run % 3 == 0,
        n_repeat=2,
    )
    simulation.session()
    assert (simulation.statuses(), simulation.winners()) == ({"a": "tuned"}, {"a": "a1"})


def test_a_context_launched_on_one_rank_only_does_not_starve():
    simulation = Simulation(
        {"a": ["a0", "a1"]},
        {"a0": 2.0, "a1": 1.0},
        ranks=2,
        launches=lambda run, rank, name: rank == 1,
        n_repeat=5,
    )
    simulation.session()
    assert (simulation.statuses(), simulation.winners()) == ({"a": "tuned"}, {"a": "a1"})


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


def test_a_late_context_is_tuned_by_the_next_session():
    simulation = Simulation(
        {"a": ["a0", "a1"], "b": ["b0", "b1"]},
        {"a0": 1.0, "a1": 2.0, "b0": 2.0, "b1": 1.0},
        launches=lambda run, rank, name: name == "a" or len(simulation.plans) >= ADMISSION_RUNS,
        n_repeat=10,
    )
    simulation.session()
    assert simulation.statuses() == {"a": "tuned", "b": "partial"}
    simulation.session()
    assert simulation.statuses() == {"a": "tuned", "b": "tuned"}
    assert simulation.winners() == {"a": "a0", "b": "b1"}


def test_a_new_context_at_every_run_ends():
    names = [f"k{run}" for run in range(200)]
    simulation = Simulation(
        {name: [f"{name}-0", f"{name}-1"] for name in names},
        lambda candidate, rank: 1.0,
        launches=lambda run, rank, name: name == f"k{run}",
        n_repeat=5,
    )
    assert len(simulation.session()) < 60
    assert set(simulation.statuses().values()) == {"starved", "partial"}


@pytest.mark.parametrize("search", sorted(STRATEGIES))
@pytest.mark.parametrize("max_runs", range(1, 12))
def test_max_runs_counts_the_final_run_too(search, max_runs):
    ms = {"a0": 3.0, "a1": 1.0, "a2": 2.0}
    simulation = Simulation({"a": list(ms)}, ms, max_runs=max_runs, search=search, n_repeat=3)
    plans = simulation.session()
    assert len(plans) <= max_runs
    assert plans[-1] == simulation.winners()


def test_the_best_so_far_is_used_when_runs_are_spent_and_the_next_session_goes_on():
    ms = {"a0": 3.0, "a1": 1.0, "a2": 2.0, "a3": 0.5}
    simulation = Simulation({"a": list(ms)}, ms, max_runs=4)
    assert columns(simulation.session(), "a") == ["a0", "a1", "a2", "a1"]
    assert (simulation.statuses(), simulation.winners()) == ({"a": "partial"}, {"a": "a1"})
    assert columns(simulation.session(), "a") == ["a3", "a3"]
    assert (simulation.statuses(), simulation.winners()) == ({"a": "tuned"}, {"a": "a3"})


def test_seconds_can_be_spent_too():
    ms = {"a0": 3.0, "a1": 1.0, "a2": 2.0, "a3": 0.5}
    simulation = Simulation({"a": list(ms)}, ms, budget_s=3.0, second=1.0)
    assert columns(simulation.session(), "a") == ["a0", "a1", "a2", "a1"]
    assert simulation.statuses() == {"a": "partial"}


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


def test_nothing_is_tried_when_only_cached_results_may_be_used():
    simulation = Simulation({"a": ["a0", "a1"]}, {"a0": 2.0, "a1": 1.0}, tunes=False)
    assert simulation.session() == [{"a": "a0"}]
    assert simulation.statuses() == {"a": "partial"}


# ---- bans


@pytest.mark.parametrize("search", sorted(STRATEGIES))
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bad", ["a0", "a1", "a2"], ids=["first", "middle", "last"])
def test_a_ban_by_one_rank_holds_for_all_from_the_next_run_on(search, rank, bad):
    def bans(run: int, by: int, name: str) -> dict[str, str]:
        return {bad: "OutOfResources"} if by == rank and simulation.plans[-1:] == [{"a": bad}] else {}

    ms = {"a0": 2.0, "a1": 2.0, "a2": 2.0, bad: 1.0}
    simulation = Simulation({"a": sorted(ms)}, ms, ranks=2, bans=bans, search=search, n_repeat=3)
    plans = columns(simulation.session(), "a")
    assert 0 < plans.count(bad) <= 2  # it is banned by the payload of the run after its first
    assert simulation.winners() == {"a": "a0" if bad != "a0" else "a1"}
    assert simulation.tuning.contexts["a"].banned[sorted(ms).index(bad)] == (rank, "OutOfResources")


def test_when_every_candidate_is_banned_the_session_ends_with_all_reasons():
    simulation = Simulation(
        {"a": ["a0", "a1"]},
        {"a0": 1.0, "a1": 1.0},
        ranks=2,
        bans=lambda run, rank, name: {f"a{rank}": f"reason of rank {rank}"} if run == 1 else {},
        n_repeat=3,
    )
    with pytest.raises(NoValidConfig, match=r"Rank 0, a0: reason of rank 0\. Rank 1, a1: reason of rank 1\."):
        simulation.session()


def test_every_candidate_banned_before_its_first_trial_is_an_error_of_the_first_run():
    simulation = Simulation(
        {"a": ["a0", "a1"]}, {"a0": 1.0, "a1": 1.0}, bans=lambda *_: {"a0": "no smem", "a1": "no regs"}
    )
    with pytest.raises(NoValidConfig, match=r"a\[k\]: all 2 configs failed"):
        simulation.session()


# ---- the time of the whole run


def test_choices_are_tuned_after_the_kernels_by_the_time_of_the_run():
    simulation = Simulation(
        {"split": ["1", "2"], "a": ["a0", "a1"]},
        {"a0": 2.0, "a1": 1.0},
        choices={"split"},
        run_ms=lambda plan: {"1": 5.0, "2": 3.0}[plan["split"]],
    )
    plans = simulation.session()
    assert columns(plans, "a") == ["a0", "a1", "a1", "a1", "a1"]
    assert columns(plans, "split") == ["1", "1", "1", "2", "2"]
    assert simulation.winners() == {"split": "2", "a": "a1"}


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
    assert "the default plan is kept" in simulation.tuning.remark


def test_a_default_that_was_banned_on_the_way_is_no_plan_to_compare_with():
    simulation = Simulation(
        {"a": ["a0", "a1", "a2"]},
        {"a0": 3.0, "a1": 2.0, "a2": 1.0},
        bans=lambda run, rank, name: {"a0": "no smem"} if run == 1 else {},
        objective="thunk",
    )
    plans = columns(simulation.session(), "a")
    assert len(plans) < DUEL_RUNS
    assert simulation.winners() == {"a": "a2"}


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


def test_there_is_no_comparison_when_the_tuned_plan_is_the_default_plan():
    simulation = Simulation({"a": ["a0", "a1"]}, {"a0": 1.0, "a1": 2.0}, objective="thunk")
    assert columns(simulation.session(), "a") == ["a0", "a1", "a0", "a1", "a0"]


def test_objective_thunk_is_judged_by_the_slowest_rank():
    simulation = Simulation(
        {"a": ["a0", "a1"]},
        lambda candidate, rank: {"a0": (3.0, 3.0), "a1": (1.0, 4.0)}[candidate][rank],
        ranks=2,
        objective="thunk",
        rank_reduce="max",
    )
    simulation.session()
    assert simulation.winners() == {"a": "a0"}


@pytest.mark.parametrize("max_runs", range(1, 25))
def test_max_runs_holds_for_run_times_and_the_final_comparison(max_runs):
    simulation = Simulation(
        {"a": ["a0", "a1"], "s": ["x", "y"]},
        {"a0": 2.0, "a1": 1.0},
        choices={"s"},
        objective="thunk",
        max_runs=max_runs,
    )
    plans = simulation.session()
    assert len(plans) <= max_runs
    assert plans[-1] == simulation.winners()


# ---- every rank computes the same plan


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


# ---- payloads

digests = st.sampled_from(["a", "b", "c"])
times = st.floats(0, 1e6)


@st.composite
def announcements(draw: Any, rank: int) -> Announcement:
    order = tuple((name, f"BLOCK={name}") for name in draw(st.permutations(["a", "b", "c"])))
    claim = draw(st.none() | st.tuples(st.just(rank), digests, st.none() | times))
    shared = tuple(sorted(draw(st.sets(digests, min_size=1))))
    return Announcement(rank, "matmul", "64", order, shared, claim=claim)


@st.composite
def parts(draw: Any, rank: int) -> Part:
    bans = dict.fromkeys(draw(st.sets(digests)), (rank, f"reason {rank}"))
    announcement = draw(st.none() | announcements(rank))
    fields: dict[str, Any] = {"ran": draw(st.none() | digests), "bans": bans, "announcement": announcement}
    kind = draw(st.sampled_from(["timed", "untimed", "pending"]))
    if kind == "timed":
        ms = draw(times)
        return Part(worst_ms=ms, best_ms=ms, total_fs=femtoseconds(ms), measured=1, **fields)
    return Part(unmeasured=int(kind == "untimed"), pending=int(kind == "pending"), **fields)


@st.composite
def payloads(draw: Any, rank: int) -> Payload:
    return Payload(
        draw(st.sampled_from(["run", "run", "run", "vote"])),
        rank,
        facts={"version": {draw(st.sampled_from(["1", "2"])): rank}},
        offers={name: (rank, name, draw(times)) for name in draw(st.sets(digests))},
        parts={name: draw(parts(rank)) for name in draw(st.sets(st.sampled_from(["x", "y"])))},
        run=draw(parts(rank)),
        elapsed_s=draw(times),
        wants_session=draw(st.booleans()),
    )


def all_ranks(n: int) -> st.SearchStrategy[tuple[Payload, ...]]:
    return st.tuples(*(payloads(rank) for rank in range(n)))


@given(all_ranks(3))
def test_merging_is_associative(three):
    first, second, third = three
    assert first.merged(second).merged(third) == first.merged(second.merged(third))


@given(all_ranks(2))
def test_merging_is_commutative(two):
    first, second = two
    assert first.merged(second) == second.merged(first)


@given(all_ranks(4))
def test_any_tree_of_encoded_payloads_gives_the_same_bytes(four):
    a, b, c, d = (payload.encode() for payload in four)
    trees = [
        merge(merge(merge(a, b), c), d),
        merge(merge(d, b), merge(c, a)),
        merge(c, merge(d, merge(a, b))),
    ]
    assert len(set(trees)) == 1


@given(payloads(0))
def test_a_payload_survives_its_journey(payload):
    assert Payload.decode(payload.encode()) == payload


@pytest.mark.parametrize("ms", [math.inf, -math.inf, 1e-300, 0.1 + 0.2])
def test_times_arrive_exactly(ms):
    part = Part(ran="a", worst_ms=ms, measured=1)
    assert Payload.decode(Payload("run", parts={"x": part}).encode()).parts["x"].worst_ms == ms


def test_a_payload_grows_with_contexts_not_with_ranks():
    def merged_bytes(ranks: int, contexts: int) -> int:
        part = {f"context-{i}": Part(ran="digest", worst_ms=0.123, measured=1) for i in range(contexts)}
        return len(functools.reduce(merge, (Payload("run", r, parts=part).encode() for r in range(ranks))))

    assert merged_bytes(256, 4) < 1.2 * merged_bytes(2, 4)
    assert merged_bytes(2, 8) > 1.5 * merged_bytes(2, 4)


@pytest.mark.parametrize("other", [(4, "a", None), (4, "b", 1.0), (5, "a", 1.0)], ids=str)
def test_of_two_claims_the_same_one_counts_in_any_order(other):
    # Rank 4 remembers its result and knows no time of it; rank 5 has it, with its time, from rank 4's disk.
    one, two = (Announcement(rank, "m", "k", (("a", "A"),), ("a",)) for rank in (4, 5))
    one, two = dataclasses.replace(one, claim=(4, "a", 2.5)), dataclasses.replace(two, claim=other)
    assert one.merged(two) == two.merged(one)
    assert one.merged(two).claim == (4, "a", 2.5)


def test_the_lowest_rank_gives_order_and_reasons():
    one = Announcement(0, "matmul", "64", (("a", "A"), ("b", "B")), ("a", "b"))
    other = Announcement(3, "matmul", "64", (("b", "B"), ("c", "C")), ("b", "c"))
    merged = other.merged(one)
    assert (merged.order, merged.shared, merged.rank) == (one.order, ("b",), 0)
    banned = Part(bans={"a": (3, "later")}).merged(Part(bans={"a": (1, "first")}))
    assert banned.bans == {"a": (1, "first")}


def test_facts_that_differ_are_named_with_the_ranks_that_say_so():
    one = Payload("open", 0, {"the version of Triton": {"3.6.0": 0}})
    other = Payload("open", 5, {"the version of Triton": {"3.9.0": 5}})
    with pytest.raises(RankMismatch, match=r"the version of Triton: rank 0: 3\.6\.0; rank 5: 3\.9\.0"):
        check_facts(one.merged(other), "open")


def test_ranks_at_different_exchanges_are_a_mismatch():
    with pytest.raises(RankMismatch, match="different points"):
        check_facts(Payload("open", 0).merged(Payload("run", 1)), "run")


def test_contexts_are_of_their_own_rules():
    announcement = Announcement(0, "matmul", "64", (("a", "A"), ("b", "B")), ("a", "b"))
    first, second = (Context("x", announcement, rules(), 0) for _ in range(2))
    first.start()
    first.ban(0, 0, "no")
    assert second.banned == {}
