"""A session's steps: what tuning may take of them, in pretended seconds."""

import random
import statistics
import time
from itertools import pairwise

import pytest
from kernels_for_tests import launch, numbers
from msgspec.structs import replace

from benchmarks.simulation.protocol_simulation import Simulation
from dist_autotune.search.phases.pace import Cost, Pace, StepKind
from dist_autotune.search.phases.step_gain import StepGain
from dist_autotune.tuner.rank_run import RankRun

STEP_S = 0.1  # without the launches that are tuned
CANDIDATES, KEYS, LAUNCHES = 36, 6, 16
SLOWED = 1.4  # a step beside compilers


class Training(Simulation):
    """Online steps in which each candidate takes its ms `LAUNCHES` times."""

    def __init__(self, seed=0, spread=2.0, pause_s=0.0, compile_s=0.0, **options):
        draws = random.Random(seed)
        contexts = {f"k{key}": [f"k{key}c{c}" for c in range(CANDIDATES)] for key in range(KEYS)}
        own_ms = {
            each: draws.uniform(0.3, 0.8) * (1 + spread * draws.gammavariate(1.2, 0.5) * (place > 0 or 0.3))
            for candidates in contexts.values()
            for place, each in enumerate(candidates)
        }
        super().__init__(
            contexts,
            lambda candidate, rank: own_ms[candidate] * draws.gauss(1, 0.01),
            compiling=self.to_compile,
            **{"mode": "online", "search": "racing", "tries_all": True, **options},
        )
        self.compile_s, self.compiled_s = compile_s, 0.0  # of a candidate; so far, of all
        self.own_ms, self.ended_s, self.pause_s = own_ms, [0.0], pause_s
        self.apart = 0  # runs before the one that is reported
        self.tried = []  # whether a step held a trial

    def step_s(self, plan):
        return STEP_S + 1e-3 * LAUNCHES * sum(self.own_ms[candidate] for candidate in plan.values())

    def _whole_ms(self, plan, rank):
        return 1e3 * (self.ended_s[-1] - self.ended_s[-2])

    def to_compile(self, run, rank, name):
        """Return the candidates of a context that are left to compilers, which take one after the other."""
        done = int(self.compiled_s / self.compile_s) if self.compile_s else CANDIDATES * KEYS
        return max(0, CANDIDATES - max(0, done - CANDIDATES * [*self.contexts].index(name)))

    def run(self):
        self.apart = self.tuning.apart
        plan = {name: self._candidate(name) for name in self.contexts}
        self.plans += [plan] * self.apart
        for _ in range(self.apart + 1):
            pause_s = self.pause_s * (len(self.tried) == 40)
            is_beside = (
                self.to_compile(0, 0, "k5") > 0 and self.tuning.contexts and not self.tuning.pace.pauses
            )
            took_s = self.step_s(plan) * (SLOWED if is_beside else 1) + pause_s
            self.compiled_s += took_s * bool(is_beside)
            self.ended_s.append(self.ended_s[-1] + took_s)
            self.tried.append(self.tuning.tries)
        super().run()

    def _report(self, run, rank, judged):
        report = super()._report(run, rank, judged)
        took_s = [end - begin for begin, end in pairwise(self.ended_s[-2 - self.apart :])]
        apart_s = statistics.median(took_s[:-1] or [0.0])
        return replace(report, step_s=took_s[-1], exchange_s=1e-4, apart=self.apart, apart_s=apart_s)

    def session(self, runs_at_most=5000):
        self.tuning.open()
        self.run()
        while self.tuning.has_work:
            self.run()
            assert len(self.plans) < runs_at_most, "the session does not end"
        return self.plans


@pytest.mark.parametrize(("overhead", "seed"), [(0.15, 0), (0.15, 1), (0.5, 2)])
def test_the_mean_step_of_a_session_costs_no_more_than_its_overhead_and_nine_tenths_of_the_gain(
    overhead, seed
):
    session = Training(seed, overhead=overhead)
    steps = len(session.session())
    settled_s, first_s = session.step_s(session.winners()), session.step_s(session.plans[0])
    best = {name: min(each, key=session.own_ms.__getitem__) for name, each in session.contexts.items()}
    assert session.ended_s[-1] / steps <= (1 + overhead) * settled_s
    assert first_s - settled_s >= 0.9 * (first_s - session.step_s(best))
    cost, spent_s = session.tuning.pace.cost, session.ended_s[-1] - steps * settled_s
    assert cost.steps == steps
    assert 0.4 * spent_s < cost.total_s <= 1.05 * spent_s  # the rest: steps before a fast config was known


def test_compilers_beside_steps_are_a_part_of_the_overhead():
    session = Training(overhead=0.15, compile_s=0.2)
    steps = len(session.session())
    compiled_s, settled_s = CANDIDATES * KEYS * session.compile_s, session.step_s(session.winners())
    assert session.compiled_s >= compiled_s
    assert session.ended_s[-1] / steps <= 1.15 * settled_s
    assert session.tuning.pace.cost.compiling_s > 1.0


@pytest.mark.parametrize("slowed", [1.05, 1.3])
def test_compilers_that_take_less_than_the_overhead_go_on_while_trials_are_held(slowed):
    pace = Pace(0.15, free_s=0.0)
    for _ in range(5):
        pace.record(StepKind.COMPILING, slowed)
        pace.record(StepKind.TRIAL, 4.0)
        pace.record(StepKind.QUIET, 1.0, steps=3)
    assert (pace.holds, pace.pauses) == (True, slowed == 1.3)


def test_between_trials_a_step_runs_the_fastest_that_is_known():
    session = Training(overhead=0.15)
    session.session()
    quiet = [plan for plan, tries in zip(session.plans, session.tried, strict=True) if not tries]
    took_s = [session.step_s(plan) for plan in quiet]
    assert len(took_s) > 100
    assert statistics.median(took_s) <= 1.02 * session.step_s(session.winners()) < session.step_s(quiet[0])


def test_without_a_limit_every_step_is_a_trial():
    session = Training()
    session.session()
    assert all(session.tried)


@pytest.mark.parametrize(("seconds", "is_held"), [(5.0, True), (60.0, False)])
def test_no_step_of_a_short_session_is_held_back(seconds, is_held):
    session = Training(overhead=0.15, free_s=seconds)
    session.session()
    assert all(session.tried) != is_held


def test_a_pause_of_the_program_is_not_paid_back():
    steps = []
    for pause_s in (0.0, 60.0):
        session = Training(overhead=0.15, pause_s=pause_s)
        steps.append(len(session.session()))
    assert steps[1] <= 1.3 * steps[0]  # 60 s are 400 steps


@pytest.mark.parametrize(("overhead", "tuned_ms"), [(0.15, 4.0), (0.15, 8.0)], ids=["gains", "gains nothing"])
def test_an_online_session_ends_with_the_step_as_it_was_and_is(bench, overhead, tuned_ms):
    kernel = bench.kernel({16: 8.0, 32: tuned_ms, 64: 30.0})
    step = bench.tune(lambda: launch(kernel, numbers()), mode="online", overhead=overhead)
    while not step.settled:
        step()
    gain, cost = step.report.gain, step.report.cost
    text = str(step.report)
    if tuned_ms == 8.0:
        assert gain is None
    else:
        assert (gain.before_ms, gain.after_ms, gain.steps) == (8.0, 4.0, 20)
        assert "Step 8.000 -> 4.000 ms (medians of 20 interleaved steps each), pays off after" in text
    assert text.count("Tuning took ") == 1
    assert cost.steps == step.report.runs


def test_all_that_a_rank_does_between_two_runs_is_a_cost_of_their_exchange(bench, monkeypatch):
    genuine, applied = RankRun.apply_outcomes, []

    def slow(self, run):
        applied.append(time.sleep(0.01))
        genuine(self, run)

    monkeypatch.setattr(RankRun, "apply_outcomes", slow)
    kernel = bench.kernel({16: 8.0, 32: 4.0, 64: 30.0})
    step = bench.tune(lambda: launch(kernel, numbers()), mode="online", overhead=0.15)
    while not step.settled:
        step()
    assert step.report.cost.exchanges_s >= 0.01 * (len(applied) - 2)  # the last one is reported no more


def test_a_gain_inside_the_noise_is_called_none_and_others_say_when_they_pay_off():
    assert StepGain(108.1, 92.4, 1.0).text(28.0).endswith("each), pays off after 1,784 steps")
    assert StepGain(92.3, 92.1, 0.4).text(28.0).endswith("no gain beyond the noise of 0.4000 ms")
    assert StepGain(92.3, 95.0, 0.4).text(28.0).endswith("slower than with the first configs")


def test_a_cost_reads_as_seconds_whatever_its_size():
    cost = Cost(trials_s=128.4, compiling_s=0.00005, exchanges_s=2.34, steps=470)
    parts = "128 s trials, 0.00 s compiling beside steps, 2.3 s exchanges"
    assert str(cost) == f"tuning took 131 s of 470 steps: {parts}"
