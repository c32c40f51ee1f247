"""What share of an online session's time goes to trials, and how it is bounded."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernels_for_tests import Bench, ScriptedClock, launch, numbers
from rank_programs import ending, tune

from dist_autotune import contextual_autotune, settings, tunable
from dist_autotune.cli import replay
from dist_autotune.errors import TuningError
from dist_autotune.logs import reader
from dist_autotune.search.budget import Pace
from dist_autotune.search.outlook import RunsSpent
from dist_autotune.timing.samples import READ_WITHIN_RUNS
from dist_autotune.tuner import recorder, time_spent
from ranks import assert_all_ok, run_ranks

SHARE = "DIST_AUTOTUNE_ONLINE_SHARE"


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a session sees; a step adds to it what it takes."""
    now = [0.0]
    for module in (recorder, time_spent):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def assert_replays() -> None:
    sessions, _ = reader.read_sessions(Path(".autotune_logs"))
    assert [verdict.differences for verdict in replay.verify(sessions)] == [()] * len(sessions)


# ---- the account


def test_without_a_bound_nothing_is_ever_held_back():
    pace = Pace(1.0)
    assert not any(pace.take(float(second), was_trial=True) for second in range(1, 50))


def test_trials_are_held_back_until_the_other_steps_make_up_for_them():
    pace, trials = Pace(0.1), []
    held = False
    for second in range(1, 101):
        is_trial = not held
        trials.append(is_trial)
        held = pace.take(float(second), was_trial=is_trial)
    assert sum(trials) == 10
    assert trials[:12] == [True, *[False] * 9, True, False]


def test_a_slow_trial_is_made_up_for_by_more_steps():
    pace = Pace(0.5)
    assert pace.take(10.0, was_trial=True)
    assert [pace.take(10.0 + step, was_trial=False) for step in range(1, 12)] == [*[True] * 9, False, False]


def test_a_clock_that_goes_backwards_takes_nothing_away():
    pace = Pace(0.5)
    pace.take(4.0, was_trial=False)
    pace.take(3.0, was_trial=True)
    assert (pace.elapsed_s, pace.trials_s) == (4.0, 0.0)


def steps_until_free(pace: Pace, now: float, step_s: float) -> int:
    """Return how many steps without a trial are made until there may be another."""
    for number in range(1, 100_000):
        now += step_s
        if not pace.take(now, was_trial=False):
            return number
    raise AssertionError("trials are held back for ever")


@pytest.mark.parametrize("compiling_s", [0.0, 5.0])
def test_compiling_is_neither_paid_for_nor_credited(compiling_s):
    pace, now = Pace(0.1), 0.0
    for was_trial in (False, True):  # at first, and when a trial launches a kernel that is new
        now += 0.01 + compiling_s
        pace.take(now, was_trial=was_trial, compiling_s=compiling_s)
    assert pace.trials_s == pytest.approx(0.01)
    assert steps_until_free(pace, now, 0.01) in (8, 9)  # ten steps for one trial


def test_steps_that_wait_for_a_sample_are_no_trials():
    pace, now = Pace(0.1), 0.0
    for number in range(40):
        now += 0.01
        pace.take(now, was_trial=number == 10, waited=number > 10)
    assert pace.trials_s == pytest.approx(0.01)


def test_a_slow_trial_that_is_felt_while_its_sample_is_awaited_is_paid_for():
    """The host is ahead of its device by ten steps: it waits for the slow one when its queue is full."""
    pace, now = Pace(0.1), 0.0
    for number in range(40):
        now += 0.5 if number == 20 else 0.01
        pace.take(now, was_trial=number == 10, waited=10 < number <= 20)
    assert pace.trials_s == pytest.approx(0.01 + 0.49)


def test_steps_are_usual_if_most_are():
    pace, now = Pace(0.1), 0.0
    for number in range(30):
        now += 0.3 if number % 10 == 5 else 0.01  # the program saves its state now and then
        pace.take(now, was_trial=number == 21, waited=21 < number < 25)
    assert pace.trials_s == pytest.approx(0.01)


def test_before_a_usual_step_is_known_waiting_counts_as_the_trial():
    pace = Pace(0.1)
    pace.take(9.0, was_trial=False)  # a program's first step is none like the others
    pace.take(10.0, was_trial=True)
    pace.take(12.0, was_trial=False, waited=True)
    assert pace.trials_s == pytest.approx(3.0)


# ---- sessions


@pytest.mark.parametrize("share", ["1", ""], ids=["one", "empty"])
def test_by_default_every_call_may_be_a_trial(share, seconds, monkeypatch):
    monkeypatch.setenv(SHARE, share)
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    step = bench.tune(lambda: launch(kernel, numbers()), mode="online")
    for _ in range(3):
        step()
    assert bench.blocks() == [16, 32, 64]
    assert step.settled


def test_trials_keep_to_their_share_and_the_incumbent_runs_in_between(seconds, monkeypatch):
    monkeypatch.setenv(SHARE, "0.25")
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

    def thunk():
        launch(kernel, numbers())
        seconds[0] += 1.0

    step = bench.tune(thunk, mode="online", n_repeat=2)
    while not step.settled:
        step()
        assert len(bench.blocks()) < 40
    blocks = bench.blocks()
    assert [number for number, block in enumerate(blocks) if block != 16] == [2, 4, 8, 12]
    assert [block for block in blocks if block != 16] == [32, 32, 64, 64]
    step()
    assert bench.blocks()[-1] == 32
    assert_replays()


def test_a_slow_candidate_is_followed_by_more_steps_without_a_trial(seconds, monkeypatch):
    monkeypatch.setenv(SHARE, "0.5")
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 90.0, 64: 2.0})

    def thunk():
        launch(kernel, numbers())
        seconds[0] += bench.launches[-1].ms

    step = bench.tune(thunk, mode="online")
    while not step.settled:
        step()
        assert len(bench.blocks()) < 80
    assert bench.blocks() == [16, 32, *[16] * 29, 64]  # 90 of 93 s, and then 87 s of the incumbent


@pytest.mark.parametrize("compiling_s", [0.0, 5.0])
def test_what_is_compiled_in_a_trial_holds_nothing_back(compiling_s, seconds, monkeypatch):
    monkeypatch.setenv(SHARE, "0.25")
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

    def thunk():
        launch(kernel, numbers())
        with step._calls.domain.compiling():  # as a launch of a kernel that is new does
            seconds[0] += compiling_s if bench.blocks()[-1] not in bench.blocks()[:-1] else 0.0
        seconds[0] += 1.0

    step = bench.tune(thunk, mode="online", n_repeat=2, cache=False)
    while not step.settled:
        step()
        assert len(bench.blocks()) < 40
    assert [number for number, block in enumerate(bench.blocks()) if block != 16] == [2, 4, 8, 12]
    assert step.report.spent.compiling_s == pytest.approx(3 * compiling_s)
    assert step.report.spent.runs_s == pytest.approx(len(bench.blocks()))
    assert_replays()


class LateClock(ScriptedClock):
    """A clock whose device has done its work some looks later."""

    def __init__(self, late: int = 2) -> None:
        super().__init__()
        self.late = late
        self.looks: dict[int, int] = {}

    def ready(self, mark: list[int]) -> bool:
        self.looks[mark[0]] = self.looks.get(mark[0], 0) + 1  # by the number of the launch
        return self.looks[mark[0]] > self.late


def train_far_ahead(
    seconds: list[float], share: str, late: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], RunsSpent]:
    """Train with a device so many steps behind; return the blocks, and what runs before the last were for."""
    monkeypatch.setenv(SHARE, share)
    bench = Bench()
    bench.clock = LateClock(late)
    bench.launches = bench.clock.launches
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

    def thunk() -> None:
        launch(kernel, numbers())
        seconds[0] += 1.0

    step = bench.tune(thunk, mode="online", n_repeat=8, cache=False)
    spent = RunsSpent()
    while not step.settled:
        step()
        assert len(bench.blocks()) < 600
        if not step.settled:
            spent = step.report.outlook.spent
    assert_replays()
    return bench.blocks(), spent


@pytest.mark.parametrize("late", [0, 2, 20])
def test_without_a_bound_what_holds_trials_back_is_the_device_alone(late, seconds, monkeypatch):
    blocks, spent = train_far_ahead(seconds, "1", late, monkeypatch)
    assert len(blocks) == 24 * (1 + min(late, READ_WITHIN_RUNS))
    assert (spent.runs, spent.holds) == (len(blocks) - 1, 0)
    assert spent.trials + spent.waits == spent.runs


@pytest.mark.parametrize(("late", "steps_a_trial"), [(0, 10), (2, 10), (20, 10)])
def test_steps_that_wait_for_the_device_are_a_part_of_those_that_make_up_for_a_trial(
    late, steps_a_trial, seconds, monkeypatch
):
    blocks, _ = train_far_ahead(seconds, "0.1", late, monkeypatch)
    rivals = [number for number, block in enumerate(blocks) if block != 16]
    assert len(rivals) == 16
    apart = [after - before for before, after in itertools.pairwise(rivals)]
    assert statistics.median(apart[-5:]) == steps_a_trial  # the first ones may use what has been saved
    assert len(rivals) <= 0.1 * len(blocks) + 1


def test_a_sample_that_is_read_while_trials_are_held_back_counts(seconds, monkeypatch):
    monkeypatch.setenv(SHARE, "0.2")
    bench = Bench()
    bench.clock = LateClock()
    bench.launches = bench.clock.launches
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

    def thunk():
        launch(kernel, numbers())
        seconds[0] += 1.0

    step = bench.tune(thunk, mode="online")
    while not step.settled:
        step()
        assert len(bench.blocks()) < 80
    assert [block for block in bench.blocks() if block != 16] == [32, 64]
    assert step.report.contexts[0].timings.keys() == {str(config) for config in kernel.configs}
    assert_replays()


def test_the_whole_run_is_judged_and_plans_are_compared_as_without_a_bound(seconds, monkeypatch):
    def train(share: str) -> tuple[list[str], list[int]]:
        monkeypatch.setenv(SHARE, share)
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

        def thunk() -> None:
            launch(kernel, numbers())
            bench.spend({1: 2.0, 2: 1.0}[tunable(f"chunks {share}", [1, 2])])
            seconds[0] += 1.0

        step = bench.tune(thunk, mode="online", objective="thunk", cache=False)
        while not step.settled:
            step()
            assert len(bench.blocks()) < 200
        return [str(context.config) for context in step.report.contexts], bench.blocks()

    winners, blocks = train("1")
    bounded_winners, bounded_blocks = train("0.3")
    assert sorted(bounded_winners) == sorted(winners)
    assert len(bounded_blocks) > len(blocks)
    assert_replays()


def test_all_ranks_hold_their_trials_back_in_the_same_steps(monkeypatch):
    monkeypatch.setenv(SHARE, "0.4")

    def program(rank):
        bench, x, calls = Bench(), numbers(), 0
        kernel = bench.kernel({16: 3.0, 32: 1.0 + rank, 64: 9.0})
        step = tune(bench, lambda: launch(kernel, x), mode="online")
        while not step.settled:
            step()
            calls += 1
            assert calls < 10_000
        return bench.blocks()

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert [block for block in zero if block != 16] == [32, 64]


def test_ranks_with_different_bounds_are_a_mismatch_on_both(monkeypatch):
    def program(rank):
        monkeypatch.setenv(SHARE, ["0.5", "1"][rank])
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        return ending(tune(bench, lambda: launch(kernel, numbers()), mode="online"))

    for text in assert_all_ok(run_ranks(program, 2)):
        assert text.startswith("RankMismatch")
        assert SHARE in text


def test_a_replay_session_knows_no_bound(seconds, monkeypatch):
    monkeypatch.setenv(SHARE, "0.01")
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks() == [16, 32, 64, 32]


@pytest.mark.parametrize("share", ["0", "-0.1", "1.5", "nan", "much"])
def test_a_share_that_is_none_is_an_error_with_its_value(share, monkeypatch):
    monkeypatch.setenv(SHARE, share)
    with pytest.raises(TuningError, match=f"{SHARE}='{share}'"):
        settings.online_share()
    with pytest.raises(TuningError, match=SHARE):
        contextual_autotune(lambda: None)()


def some_steps(rank, calls, cache):
    """Make so many steps of a second each; the samples differ from candidate to candidate only."""
    now = [0.0]
    recorder.time = SimpleNamespace(monotonic=lambda: now[0])  # this process is the rank's own
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

    def thunk():
        launch(kernel, numbers())
        now[0] += 1.0

    step = bench.tune(thunk, mode="online", n_repeat=2, cache=cache, name="steps")
    while len(bench.blocks()) < calls and not step.settled:
        step()
    return bench.blocks(), step.settled


@pytest.mark.parametrize("calls", [1, 3, 4, 6, 7, 8, 12])
def test_a_program_that_is_restarted_holds_back_as_it_would_have_done(calls, tmp_path, monkeypatch):
    monkeypatch.setenv(SHARE, "0.25")
    ((whole, settled),) = assert_all_ok(run_ranks(some_steps, 1, 50, False, init="none"))
    assert settled
    ((before, _),) = assert_all_ok(run_ranks(some_steps, 1, calls, tmp_path / "cache", init="none"))
    ((after, settled),) = assert_all_ok(run_ranks(some_steps, 1, 50, tmp_path / "cache", init="none"))
    assert settled
    found = before + after
    assert after[0] == 16  # a process's first step is no trial; that it makes none counts as any other
    assert [block for block in found if block != 16] == [block for block in whole if block != 16]
    assert len(found) - len(whole) in (0, 1)
    rivals = itertools.accumulate(block != 16 for block in found)
    assert all(count <= 0.25 * steps + 1 for steps, count in enumerate(rivals, 1))
