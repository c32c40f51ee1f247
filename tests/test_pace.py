"""What share of an online session's time goes to trials, and how it is bounded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dist_autotune import chronicle, contextual_autotune, history, replay, settings, tunable
from dist_autotune.errors import TuningError
from dist_autotune.pace import Pace
from kernels_for_tests import Bench, ScriptedClock, launch, numbers
from rank_programs import ending, tune
from ranks import assert_all_ok, run_ranks

SHARE = "DIST_AUTOTUNE_ONLINE_SHARE"


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that a session sees; a step adds to it what it takes."""
    now = [0.0]
    monkeypatch.setattr(chronicle, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def assert_replays() -> None:
    sessions, _ = history.read_sessions(Path(".autotune_logs"))
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


class LateClock(ScriptedClock):
    """A clock whose device has done its work two looks later."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: dict[int, int] = {}

    def ready(self, mark: list[int]) -> bool:
        self.looks[id(mark)] = self.looks.get(id(mark), 0) + 1
        return self.looks[id(mark)] > 2


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
    chronicle.time = SimpleNamespace(monotonic=lambda: now[0])  # this process is the rank's own
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
    assert before + after == whole
    assert settled
