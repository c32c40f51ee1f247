"""A process ends in the middle of tuning: what the next one bans, and what it need not do again."""

import json
import signal
import sys

import pytest
from crash_programs import EXHAUSTIVE, MS, alone, die, journals, program, summary, value_of
from kernels_for_tests import Bench, double, launch, numbers, records
from rank_programs import raise_

from dist_autotune import tunable

RACING = {"search": "racing", "n_warmup": None, "n_repeat": None}
FIRST_RUN = 1  # of a process that goes on: no trial, as it is slow for reasons of its own
DEADLY = [signal.SIGKILL, signal.SIGSEGV]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- one process


@pytest.mark.parametrize("number", DEADLY, ids=lambda number: number.name)
@pytest.mark.parametrize("options", [EXHAUSTIVE, RACING], ids=["exhaustive", "racing"])
def test_the_candidate_whose_launch_killed_the_process_is_banned_and_the_rest_resumed(
    tmp_cache, number, options
):
    first = alone(program, {(32, 1): lambda: die(number)}, options)
    assert first.signal == number
    (path,) = journals(tmp_cache)
    *_, last = lines(path)
    (tried,) = last["tries"].values()
    assert tried["text"].startswith("add[64, float32, float32]: BLOCK: 32,")
    assert lines(path)[0] == {"now": next(iter(last["tries"])), "run": last["run"]}
    started = [event for event in records() if event.event == "run_started"][-1]
    (config_id,) = started.plan.values()
    (admitted,) = [event for event in records() if event.event == "context_admitted"]
    assert admitted.candidates[config_id].startswith("BLOCK: 32,")
    before = last["run"]  # runs that were completed

    second = value_of(program, None, options)
    assert 32 not in second["blocks"]
    (reason,) = second["banned"].values()
    assert list(second["banned"]) == ["add BLOCK: 32"]
    session = started.session
    assert (
        f"was running when rank 0's process ended without a word (run {before} of session {session}, "
        in reason
    )
    assert reason.endswith(" UTC)")
    assert second["notes"][0].startswith(f"resumed {before} of ")
    assert "BLOCK: 32" in second["notes"][1]
    without = value_of(program, None, {**options, "cache": False}, {16: 3.0, 64: 1.0})
    assert second["winners"] == without["winners"] == {"add64": 64}
    assert before + second["runs"] == without["runs"] + FIRST_RUN
    assert not (tmp_cache / "journal").exists()


def test_a_candidate_that_has_completed_runs_before_is_banned_when_it_was_the_only_one(tmp_cache):
    assert alone(program, {(32, 3): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    second = value_of(program)
    assert list(second["banned"]) == ["add BLOCK: 32"]
    assert second["blocks"] == [16] * FIRST_RUN + [64] * 4


def test_a_crash_in_the_first_run_bans_the_first_config(tmp_cache):
    assert alone(program, {(16, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    second = value_of(program)
    assert list(second["banned"]) == ["add BLOCK: 16"]
    assert second["blocks"] == [32] * 3 + [64] * 4
    assert second["winners"] == {"add64": 64}


def test_bans_stand_until_the_function_settles_through_another_crash(tmp_cache):
    alone(program, {(16, 1): lambda: die(signal.SIGKILL)})
    alone(program, {(32, 2): lambda: die(signal.SIGKILL)})
    third = value_of(program)
    assert sorted(third["banned"]) == ["add BLOCK: 16", "add BLOCK: 32"]
    assert third["blocks"] == [64] * (FIRST_RUN + 4)
    (path,) = tmp_cache.glob("add-*.json")
    path.unlink()
    assert value_of(program)["blocks"] == [16] * 3 + [32] * 3 + [64] * 4


def test_when_all_candidates_have_crashed_all_are_named_and_the_next_start_begins_anew(tmp_cache):
    for block in MS:
        assert alone(program, {(block, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    fourth = alone(program)
    assert fourth.error_type == "NoValidConfig"
    assert fourth.error.count("was running when rank 0's process ended without a word") == 3
    assert value_of(program)["blocks"] == [16] * 3 + [32] * 3 + [64] * 4


@pytest.mark.parametrize(
    "leave",
    [
        lambda: raise_(KeyboardInterrupt()),
        lambda: raise_(ArithmeticError("no")),
        lambda: sys.exit(3),
    ],
    ids=["KeyboardInterrupt", "exception", "sys.exit"],
)
def test_an_orderly_end_bans_nothing_and_is_resumed(tmp_cache, leave):
    assert alone(program, {(32, 2): leave}).error is not None
    assert len(journals(tmp_cache)) == 1
    second = value_of(program)
    assert second["banned"] == {}
    assert second["blocks"] == [16] * FIRST_RUN + [32] * 2 + [64] * 4  # 16 three times and 32 once are known
    assert second["winners"] == {"add64": 64}
    assert journals(tmp_cache) == []


def two_kernels(rank, dies_in=None):
    bench, x = Bench(), numbers()
    first = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

    def kill(block, value):
        if dies_in == "second launch" and block == 32:
            die(signal.SIGKILL)
        return value

    second = bench.kernel(
        {16: lambda _: kill(16, 1.0), 32: lambda _: kill(32, 2.0), 64: lambda _: kill(64, 3.0)}, double
    )

    def thunk():
        y = launch(first, x)
        launch(second, x)
        if dies_in == "between" and bench.blocks("add")[-1] == 32:
            die(signal.SIGKILL)
        return y

    step = bench.tune(thunk)
    step()
    return summary(bench, step)


def test_of_several_candidates_on_trial_the_one_inside_its_launch_is_banned(tmp_cache):
    assert alone(two_kernels, "second launch").signal == signal.SIGKILL
    second = value_of(two_kernels)
    assert list(second["banned"]) == ["double BLOCK: 32"]
    assert second["winners"] == {"add64": 32, "double64": 16}


def test_a_crash_outside_every_launch_bans_all_that_were_new_in_that_run(tmp_cache):
    assert alone(two_kernels, "between").signal == signal.SIGKILL
    second = value_of(two_kernels)
    assert sorted(second["banned"]) == ["add BLOCK: 32", "double BLOCK: 32"]
    assert second["winners"] == {"add64": 64, "double64": 16}


def test_a_death_between_two_runs_bans_nothing(tmp_cache):
    def online(rank, calls):
        bench, x = Bench(), numbers()
        kernel = bench.kernel(MS)
        step = bench.tune(lambda: launch(kernel, x), mode="online", **EXHAUSTIVE)
        for _ in range(calls):
            step()
        if not step.settled:
            die(signal.SIGKILL)
        return summary(bench, step)

    assert alone(online, 4).signal == signal.SIGKILL
    second = value_of(online, FIRST_RUN + 5)
    assert second["banned"] == {}
    assert second["blocks"] == [16] * FIRST_RUN + [32] * 2 + [64] * 3


# ---- as if nothing had happened


def noisy(rank, options, calls, start):
    """Make `calls` online runs, beginning with the `start`-th of all; samples differ from run to run.

    The first run of a process that goes on is none of them.
    """
    bench, runs, x = Bench(), [start - FIRST_RUN if start else 0], numbers()

    def noise(base):
        return lambda _: base * (1 + 0.13 * ((runs[0] * 7919) % 11))

    kernel = bench.kernel({block: noise(ms) for block, ms in MS.items()})

    def thunk():
        launch(kernel, x)
        way = tunable("way", ["left", "right"]) if options.get("objective") == "thunk" else "left"
        bench.spend(noise({"left": 1.0, "right": 2.0}[way])(None))
        runs[0] += 1

    step = bench.tune(thunk, mode="online", name="noisy", **options)
    while runs[0] < start + calls and not step.settled:
        step()
    return bench.blocks(), step.settled, summary(bench, step)


@pytest.mark.parametrize(
    ("options", "steps"),
    [(EXHAUSTIVE, 1), (RACING, 4), ({**EXHAUSTIVE, "objective": "thunk"}, 5)],
    ids=["exhaustive", "racing", "whole run"],
)
def test_wherever_a_program_was_restarted_it_does_what_it_would_have_done(tmp_cache, options, steps):
    whole, is_settled, found = value_of(noisy, {**options, "cache": False}, 200, 0)
    assert is_settled
    for calls in range(1, len(whole), steps):
        before, _, _ = value_of(noisy, options, calls, 0)
        after, is_settled, resumed = value_of(noisy, options, 200, calls)
        assert before + after[FIRST_RUN:] == whole
        assert set(after[:FIRST_RUN]) <= {16, 64}  # the first config, or the winner so far
        assert is_settled
        assert resumed["winners"] == found["winners"]
        assert resumed["timings"] == found["timings"]
        assert journals(tmp_cache) == []
        for path in tmp_cache.glob("*.json"):
            path.unlink()


def comparing(rank, max_runs):
    """Make one call with so many runs; a search finds 32, and the default plan beats it in the comparison."""
    bench, x = Bench(), numbers()
    kernel = bench.kernel({16: 2.0, 32: 1.0})
    second = bench.kernel({16: 2.0, 32: 1.0}, double)

    def thunk():
        launch(kernel, x)
        launch(second, x)
        bench.spend({(16, 16): 0.0, (32, 32): 50.0}.get(tuple(bench.blocks()[-2:]), 60.0))

    step = bench.tune(thunk, objective="thunk", name="comparing", max_runs=max_runs)
    step()
    return bench.blocks()[-2:], step.settled


def test_a_comparison_of_plans_goes_on_in_the_next_process(tmp_cache):
    # 3 + 4 runs that search, 12 that compare; of each process's six the last is final, and the first no trial
    found = [value_of(comparing, 6) for _ in range(5)]
    assert [is_settled for _, is_settled in found] == [False, False, False, False, True]
    assert found[-1][0] == [16, 16]
    assert journals(tmp_cache) == []


def test_a_result_from_before_the_restart_is_published_when_it_is_first_launched(tmp_cache):
    def online(rank, sizes):
        bench = Bench()
        kernel = bench.kernel(MS)
        size = []

        def thunk():
            launch(kernel, numbers(size[-1]))

        step = bench.tune(thunk, mode="online")
        for n in sizes:
            size.append(n)
            step()
        return {key[0]: config.kwargs["BLOCK"] for key, config in kernel.cache.items()}, step.settled

    assert value_of(online, [64, 64, 8, 64]) == ({64: 64}, False)
    (path,) = tmp_cache.glob("*.json")
    path.unlink()
    assert value_of(online, [8] * FIRST_RUN + [64, 8, 8]) == ({8: 64, 64: 64}, True)
