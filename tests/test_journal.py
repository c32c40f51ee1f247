"""A process ends in the middle of tuning: what the next one bans, and what it need not do again."""

import json
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dist_autotune import CacheWarning, cli, decisions, journal, orphans, tunable
from dist_autotune.flows import STRATEGIES
from dist_autotune.journal import Journal, Try
from dist_autotune.payload import Announcement, Part, Payload, femtoseconds
from dist_autotune.protocol import Tuning
from dist_autotune.resume import relive
from dist_autotune.search import Rules
from dist_autotune.unfinished import EXACT, INEXACT, Crash, Past, merged_crashes
from kernels_for_tests import EMULATIONS, Bench, add, double, launch, numbers, records
from rank_programs import TIMEOUT_S, blocks_of, ending, tune, wait_for
from ranks import assert_all_ok, run_ranks

MS = {16: 3.0, 32: 2.0, 64: 1.0}
EXHAUSTIVE = {"n_warmup": 1, "n_repeat": 2}  # 3 configs: 9 runs and the final one
RACING = {"search": "racing", "n_warmup": None, "n_repeat": None}
DEADLY = [signal.SIGKILL, signal.SIGSEGV]


def die(number):
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)


def raise_(error):
    raise error


def scripted(bench, ms, events):
    """Return what launches of each BLOCK take; `events`: (BLOCK, n) -> called in the n-th launch of it."""
    counts = dict.fromkeys(ms, 0)

    def time_of(block):
        def launched(_):
            counts[block] += 1
            events.get((block, counts[block]), lambda: None)()
            return ms[block]

        return launched

    return {block: time_of(block) for block in ms}


def program(rank, events=None, options=EXHAUSTIVE, ms=MS, function=add):
    """Tune one kernel; return what was launched and found."""
    bench, x = Bench(), numbers()
    kernel = bench.kernel(scripted(bench, ms, events or {}), function)

    def thunk():
        return launch(kernel, x)

    step = bench.tune(thunk, **options)
    step()
    return summary(bench, step)


def summary(bench, step, rank=0):
    return {
        "blocks": bench.blocks(),
        "runs": step.report.runs,
        "winners": {f"{c.kernel}{n_of(c.key)}": block_of(c.config) for c in step.report.contexts},
        "timings": {c.kernel: sorted(c.timings.values()) for c in step.report.contexts},
        "banned": {
            f"{context.kernel} {text.split(',')[0]}": reason
            for context in step.report.contexts
            for text, reason in context.banned.items()
        },
        "notes": [event.text for event in records(rank=rank) if event.event == "note"],
        "warning": step.report.warning,
    }


def n_of(key):
    return key[0] if key else ""


def block_of(config):
    return config.kwargs["BLOCK"] if isinstance(config, triton.Config) else config


def alone(function, *arguments):
    """Return how `function` ended in a process of its own."""
    (result,) = run_ranks(function, 1, *arguments, init="none")
    return result


def value_of(function, *arguments):
    return assert_all_ok([alone(function, *arguments)])[0]


def journals(cache):
    return sorted((cache / "journal").glob("*.jsonl"))


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
    assert before + second["runs"] == without["runs"]
    assert not (tmp_cache / "journal").exists()


def test_a_candidate_that_has_completed_runs_before_is_banned_when_it_was_the_only_one(tmp_cache):
    assert alone(program, {(32, 3): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    second = value_of(program)
    assert list(second["banned"]) == ["add BLOCK: 32"]
    assert second["blocks"] == [64] * 4


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
    assert third["blocks"] == [64] * 4
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
    assert second["blocks"] == [32] * 2 + [64] * 4  # 16 three times and 32 once are known
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
    second = value_of(online, 5)
    assert second["banned"] == {}
    assert second["blocks"] == [32] * 2 + [64] * 3


# ---- as if nothing had happened


def noisy(rank, options, calls, start):
    """Make `calls` online runs, beginning with the `start`-th of all; samples differ from run to run."""
    bench, runs, x = Bench(), [start], numbers()

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
        assert before + after == whole
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
    found = [value_of(comparing, 6) for _ in range(4)]  # 3 + 4 runs that search, 12 that compare
    assert [is_settled for _, is_settled in found] == [False, False, False, True]
    assert found[-1][0] == [16, 16]
    assert journals(tmp_cache) == []


# ---- several ranks


def ranks_program(rank, cache, dies=None, timeout_s=TIMEOUT_S, leave=lambda: die(signal.SIGKILL)):
    bench, x = Bench(), numbers()
    ms = {block: value + rank / 10 for block, value in MS.items()}
    events = {dies[1]: leave} if dies is not None and dies[0] == rank else {}
    kernel = bench.kernel(scripted(bench, ms, events))

    def thunk():
        return launch(kernel, x)

    step = tune(bench, thunk, cache=cache, timeout_s=timeout_s, **EXHAUSTIVE)
    text = ending(step)
    if dies is not None:
        return text
    return {**summary(bench, step, rank), "text": text}


@pytest.mark.parametrize("number", DEADLY, ids=lambda number: number.name)
@pytest.mark.parametrize("dying", [0, 1])
def test_after_one_rank_has_crashed_all_ban_its_candidate_and_resume(tmp_cache, dying, number):
    leave = lambda: die(number)  # noqa: E731
    results = run_ranks(ranks_program, 2, tmp_cache, (dying, (32, 1)), 3.0, leave, init="tcp")
    survivor = results[1 - dying]
    assert results[dying].signal == number
    assert survivor.value.startswith("AgreementTimeout: ")
    assert len(journals(tmp_cache)) == 2
    zero, one = assert_all_ok(run_ranks(ranks_program, 2, tmp_cache))
    for found in (zero, one):
        assert found["blocks"] == [64] * 4
        assert found["winners"] == {"add64": 64}
        assert list(found["banned"]) == ["add BLOCK: 32"]
        assert (
            f"when rank {dying}'s process ended without a word (run 3 of " in found["banned"]["add BLOCK: 32"]
        )
        assert found["timings"] == {"add": [1.1, 3.1]}
    assert zero["notes"] == one["notes"]
    assert journals(tmp_cache) == []


def test_an_exception_on_one_rank_bans_nothing_anywhere_and_is_resumed(tmp_cache):
    leave = lambda: raise_(ArithmeticError("no"))  # noqa: E731
    one, zero = run_ranks(ranks_program, 2, tmp_cache, (1, (32, 2)), TIMEOUT_S, leave)
    assert {one.value.partition(":")[0], zero.value.partition(":")[0]} == {"ArithmeticError", "PeerFailed"}
    for found in assert_all_ok(run_ranks(ranks_program, 2, tmp_cache)):
        assert found["blocks"] == [32] * 2 + [64] * 4
        assert found["banned"] == {}


def test_ranks_that_are_killed_because_another_raised_ban_nothing(tmp_cache, tmp_path):
    def killed_or_failing(rank):
        def leave():
            if rank == 1:
                raise ArithmeticError("no")
            wait_for((tmp_path / "raised").exists)
            die(signal.SIGTERM)  # as a launcher does when a rank has failed

        bench, x = Bench(), numbers()
        kernel = bench.kernel(MS)

        def thunk():
            launch(kernel, x)
            if len(bench.blocks()) == 5 and not (tmp_path / "second").exists():
                leave()

        step = tune(bench, thunk, cache=tmp_cache, timeout_s=TIMEOUT_S, **EXHAUSTIVE)
        text = ending(step)
        (tmp_path / "raised").touch()
        return text if text.startswith("ArithmeticError") else summary(bench, step, rank)

    zero, one = run_ranks(killed_or_failing, 2, init="tcp")
    assert (zero.signal, one.value) == (signal.SIGTERM, "ArithmeticError: no")
    (tmp_path / "second").touch()
    for found in assert_all_ok(run_ranks(killed_or_failing, 2)):
        assert found["banned"] == {}
        assert found["blocks"] == [32] * 2 + [64] * 4


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_without_a_journal_follows_the_others(tmp_cache, lost):
    run_ranks(ranks_program, 2, tmp_cache, (1, (64, 1)), 3.0, init="tcp")
    (path,) = [path for path in journals(tmp_cache) if f"-rank-{lost}-" in path.name]
    path.unlink()
    zero, one = assert_all_ok(run_ranks(ranks_program, 2, tmp_cache))
    assert zero["winners"] == one["winners"] == {"add64": 32 if lost == 0 else 64}
    for rank, found in enumerate((zero, one)):
        assert found["blocks"] == ([32] if lost == 0 else [64] * 4)
        assert list(found["banned"]) == (["add BLOCK: 64"] if lost == 0 else [])
        assert ("no samples of its own" in found["notes"][0]) is (rank == lost)
    assert journals(tmp_cache) == []


def twice(rank, cache, event, timeout_s):
    """Call a tuned function, and once more where the first call raised; `event` happens on one rank."""
    bench, x = Bench(), numbers()
    failing, when, what = event
    kernel = bench.kernel(scripted(bench, MS, {when: what} if failing == rank else {}))

    def thunk():
        return launch(kernel, x)

    step = tune(bench, thunk, cache=cache, timeout_s=timeout_s, **EXHAUSTIVE)
    first = ending(step)
    if first.startswith("AgreementTimeout"):
        return None
    bench.forget()
    step()
    return first.partition(":")[0], summary(bench, step, rank)


def test_after_a_dropped_session_the_next_of_these_processes_starts_anew_but_keeps_bans(tmp_cache):
    dying = (1, (32, 1), lambda: die(signal.SIGKILL))
    assert run_ranks(twice, 2, tmp_cache, dying, 3.0, init="tcp")[1].signal == signal.SIGKILL
    failing = (0, (64, 1), lambda: raise_(ArithmeticError("no")))
    zero, one = assert_all_ok(run_ranks(twice, 2, tmp_cache, failing, TIMEOUT_S))
    assert (zero[0], one[0]) == ("ArithmeticError", "PeerFailed")
    for _, found in (zero, one):
        assert found["blocks"] == [16] * 3 + [64] * 4
        assert list(found["banned"]) == ["add BLOCK: 32"]
    assert journals(tmp_cache) == []


# ---- what is not resumed


@triton.jit
def shifted(x_ptr, y_ptr, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask) + SHIFT, mask=mask)


EMULATIONS[shifted] = lambda x, y: x + 1


def test_samples_of_another_kernel_source_are_ignored(tmp_cache):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    second = value_of(program, None, EXHAUSTIVE, MS, double)
    assert second["blocks"] == [16] * 3 + [32] * 3 + [64] * 4
    assert second["banned"] == {}
    assert second["warning"] == ""
    assert journals(tmp_cache) == []


def test_samples_and_bans_are_ignored_when_the_configs_have_changed(tmp_cache):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    second = value_of(program, None, EXHAUSTIVE, {16: 3.0, 64: 1.0})
    assert second["blocks"] == [16] * 3 + [64] * 4
    assert second["banned"] == {}
    assert journals(tmp_cache) == []


def test_ranks_whose_configs_have_changed_on_one_of_them_agree_on_those_that_all_have(tmp_cache):
    def each(rank, of_rank, events):
        return program(rank, events if rank == 1 else None, {**EXHAUSTIVE, "is_dist": True}, of_rank[rank])

    ended = run_ranks(each, 2, [MS, MS], {(64, 1): lambda: raise_(ValueError("edit the configs"))})
    assert [result.error_type for result in ended] == ["PeerFailed", "ValueError"]
    again = assert_all_ok(run_ranks(each, 2, [MS, {16: 3.0, 64: 1.0, 128: 0.5}], {}))
    assert [rank["winners"] for rank in again] == [{"add64": 64}] * 2
    assert again[0]["blocks"][1:] == again[1]["blocks"][1:]


def test_samples_of_other_constants_are_ignored(tmp_cache):
    def shift(rank, by, dies):
        bench, x = Bench(), numbers()
        kernel = bench.kernel(
            scripted(bench, MS, {(64, 1): lambda: die(signal.SIGKILL)} if dies else {}), shifted
        )

        def thunk():
            kernel[(4,)](x, torch.empty_like(x), x.numel(), SHIFT=by)

        step = bench.tune(thunk, **EXHAUSTIVE)
        step()
        return summary(bench, step)

    everything = [16] * 3 + [32] * 3 + [64] * 4
    assert alone(shift, 1, True).signal == signal.SIGKILL
    assert value_of(shift, 2, False)["blocks"] == everything
    assert alone(shift, 3, True).signal == signal.SIGKILL
    assert value_of(shift, 3, False)["blocks"] == [32]


def test_what_is_older_than_a_day_is_ignored_and_deleted(tmp_cache):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    (path,) = journals(tmp_cache)
    old = time.time() - journal.MAX_AGE_S - 60
    os.utime(path, (old, old))
    assert value_of(program)["blocks"] == [16] * 3 + [32] * 3 + [64] * 4
    assert journals(tmp_cache) == []


def test_retune_ignores_it(tmp_cache):
    def retuned(rank, dies):
        bench, x = Bench(), numbers()
        kernel = bench.kernel(scripted(bench, MS, {(64, 1): lambda: die(signal.SIGKILL)} if dies else {}))

        def thunk():
            return launch(kernel, x)

        step = bench.tune(thunk, **EXHAUSTIVE)
        if not dies:
            step.retune()
        step()
        return summary(bench, step)

    assert alone(retuned, True).signal == signal.SIGKILL
    assert value_of(retuned, False)["blocks"] == [16] * 3 + [32] * 3 + [64] * 4
    assert journals(tmp_cache) == []


def test_a_line_cut_short_is_left_out(tmp_cache):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    (path,) = journals(tmp_cache)
    whole = path.read_bytes().splitlines(keepends=True)
    assert b'"tries"' in whole[-1]
    path.write_bytes(
        b"".join(whole[:-1]) + whole[-1][:40]
    )  # what the seventh run tried: 64, for the first time
    second = value_of(program)
    assert second["blocks"] == [64] * 4
    assert second["banned"] == {}  # what the run before had tried is not to blame


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text.replace('"merged"', '"merged', 1), "damaged journal"),
        (lambda text: text.replace('"schema":1', '"schema":99', 1), "schema 99, expected 1"),
        (lambda text: "", "damaged journal"),
        (lambda text: "[]\n[]\n", "damaged journal"),
        (lambda text: text.replace('"entries":{"', '"entries":["', 1), "damaged journal"),
    ],
    ids=["a broken line", "another schema", "empty", "no objects", "another type"],
)
def test_a_damaged_journal_is_a_warning_with_its_path_and_tuning_begins_anew(tmp_cache, damage, reason):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    (path,) = journals(tmp_cache)
    path.write_text(damage(path.read_text()))

    def warned(rank):
        with pytest.warns(CacheWarning, match=f"Ignored and deleted {path}: {reason}") as caught:
            found = program(rank)
        return found["blocks"], len(caught)

    assert value_of(warned) == ([16] * 3 + [32] * 3 + [64] * 4, 1)
    assert journals(tmp_cache) == []


def test_a_journal_that_makes_no_sense_is_a_note_and_tuning_begins_anew(tmp_cache):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    (path,) = journals(tmp_cache)
    path.write_text(path.read_text().replace('"order":[[', '"disorder":[[', 1))
    second = value_of(program)
    assert second["blocks"] == [16] * 3 + [32] * 3 + [64] * 4
    assert any("cannot be taken up (" in note for note in second["notes"])
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
    assert value_of(online, [8, 64, 8]) == ({8: 64, 64: 64}, True)


# ---- who may use which file


def test_two_living_processes_of_one_rank_number_do_not_disturb_each_other(tmp_cache, tmp_path):
    def living(number):
        def meet():
            (tmp_path / f"in {number}").touch()
            wait_for(lambda: (tmp_path / f"in {1 - number}").exists())

        return program(number, {(32, 1): meet})

    for found in assert_all_ok(run_ranks(living, 2, init="none")):
        assert found["blocks"] == [16] * 3 + [32] * 3 + [64] * 4
        assert found["banned"] == {}
    assert journals(tmp_cache) == []


def test_of_two_that_crashed_each_successor_takes_up_one(tmp_cache, tmp_path):
    def dying(number):
        def meet_and_die():
            (tmp_path / f"in {number}").touch()
            wait_for(lambda: (tmp_path / f"in {1 - number}").exists())
            die(signal.SIGKILL)

        return program(number, {(32, 1): meet_and_die})

    def successor(number):
        return program(number, {(64, 1): lambda: meet(number)})

    def meet(number):
        (tmp_path / f"after {number}").touch()
        wait_for(lambda: (tmp_path / f"after {1 - number}").exists())

    assert [result.signal for result in run_ranks(dying, 2, init="none")] == [signal.SIGKILL] * 2
    assert len(journals(tmp_cache)) == 2
    for found in assert_all_ok(run_ranks(successor, 2, init="none")):
        assert found["blocks"] == [64] * 4
    assert journals(tmp_cache) == []


def test_a_forked_child_that_outlives_the_owner_does_not_keep_the_journal(tmp_path):
    reading, writing = os.pipe()

    def owner(rank):
        written = Journal(tmp_path, {}, "f", 0, lambda directory, reason: pytest.fail(reason))
        written.begin("abc", "cpu")
        written.run(0, {"c" * 16: Try("d", "text")})
        if os.fork() == 0:
            os.setsid()
            os.close(writing)
            os.read(reading, 1)  # until the test lets go
            os._exit(0)
        die(signal.SIGKILL)

    assert alone(owner).signal == signal.SIGKILL
    (path,) = tmp_path.glob("*.jsonl")
    assert orphans.is_orphan(path)  # while the child lives
    assert orphans.remove_orphans(tmp_path) == 1
    os.close(writing)
    os.close(reading)


def test_a_candidate_that_kills_the_process_as_it_is_loaded_is_the_one_to_blame(tmp_path):
    def owner(rank):
        written = Journal(tmp_path, {}, "f", 0, lambda directory, reason: pytest.fail(reason))
        written.begin("abc", "cpu")
        written.run(0, {"c" * 16: Try("on trial", "text")})
        written.ran()
        with written.aside("d" * 16, Try("well loaded", "text")):
            pass
        with written.aside("d" * 16, Try("deadly", "text")):
            die(signal.SIGSEGV)

    assert alone(owner).signal == signal.SIGSEGV
    found = Journal(tmp_path, {}, "f", 0, lambda directory, reason: pytest.fail(reason)).look()
    assert found.crash.kind == EXACT
    assert found.crash.suspects == {"d" * 16: "deadly"}
    found.remove()


@pytest.mark.parametrize("options", [{"cache": False}, {}], ids=["no cache", "cached mode"])
def test_without_a_cache_or_without_trials_nothing_is_written(tmp_cache, tmp_path, monkeypatch, options):
    if not options:
        monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
    bench, x = Bench(), numbers()
    seen = []
    kernel = bench.kernel({16: lambda _: seen.append((tmp_cache / "journal").exists()) or 1.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, x), **options)()
    assert seen
    assert not any(seen)


def test_a_session_that_finds_everything_on_disk_writes_no_journal(tmp_cache):
    value_of(program)
    bench, x, seen = Bench(), numbers(), []
    kernel = bench.kernel({b: lambda _: seen.append((tmp_cache / "journal").exists()) or 1.0 for b in MS})
    bench.tune(lambda: launch(kernel, x))()
    assert seen == [False]


@pytest.mark.parametrize("call", ["write", "pwrite", "rename"])
def test_a_full_disk_is_one_warning_and_no_journal_is_left_that_accuses_anyone(tmp_cache, monkeypatch, call):
    bench, x = Bench(), numbers()
    kernel = bench.kernel(MS)
    step = bench.tune(lambda: launch(kernel, x), **EXHAUSTIVE, log_dir=None)
    original, calls = getattr(os, call), []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) >= (1 if call == "rename" else 3):
            raise OSError(28, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(os, call, full)
    with pytest.warns(
        CacheWarning, match=f"Cannot write the cache in {tmp_cache / 'journal'}: No space"
    ) as caught:
        step()
    monkeypatch.undo()
    assert len(caught) == 1
    assert blocks_of(step) == {"add64": 64}
    assert journals(tmp_cache) == []


# ---- what ranks tell each other


def test_pasts_and_crashes_merge_in_any_order():
    pasts = [
        Past("b", 1, "cpu", 5, "x"),
        Past("b", 0, "cpu", 5, "x"),
        Past("a", 2, "cpu", 5, "z"),
        Past("a", 3, "cpu", 4, "y"),
    ]
    crashes = [
        Crash(1, 7, "then", EXACT, {"c": "1"}),
        Crash(0, 7, "then", INEXACT, {"c": "1", "d": "2"}),
        Crash(2, 7, "later", EXACT, {"e": "3"}),
        Crash(3, 6, "before", EXACT, {"f": "4"}),
    ]
    for one, two, three in [(0, 1, 2), (3, 2, 0), (1, 3, 2)]:
        left = pasts[one].merged(pasts[two]).merged(pasts[three])
        assert left == pasts[three].merged(pasts[two].merged(pasts[one]))
        maps = [{"s": crashes[each]} for each in (one, two, three)]
        left = merged_crashes(merged_crashes(maps[0], maps[1]), maps[2])
        assert left == merged_crashes(maps[2], merged_crashes(maps[1], maps[0]))
    everything = crashes[3].merged(crashes[2]).merged(crashes[1]).merged(crashes[0])
    assert everything == Crash(1, 7, "then", EXACT, {"c": "1", "e": "3"})  # of the last run, the exact


# ---- the same state from the same words


NAMES = ("first", "second")
DIGESTS = ("a", "b", "c")


def announcement(name):
    order = tuple((digest, f"config {digest}") for digest in DIGESTS)
    return Announcement(0, name, "64", order, DIGESTS, kernel_id=name, family=name, slot="64")


def what_is_said(draw, tuning, name):
    """Draw what the ranks say of one context after a run: mostly that they ran what was planned."""
    context = tuning.contexts.get(name)
    planned = context.digests[context.planned] if context is not None else DIGESTS[0]
    ms = draw(st.sampled_from([0.5, 1.0, 1.01, 2.0, 3.0]))
    part = Part(
        ran=draw(st.sampled_from([planned] * 6 + ["b", None])),
        worst_ms=ms,
        best_ms=ms,
        total_fs=femtoseconds(ms),
        measured=draw(st.sampled_from([1, 1, 1, 0])),
        pending=draw(st.sampled_from([0, 0, 1])) if tuning.rules.mode == "online" else 0,
        bans=draw(st.sampled_from([{}] * 8 + [{"c": (0, "too large")}])),
    )
    return part if context is not None else replace(part, announcement=announcement(name))


def state_of(tuning):
    contexts = {
        name: (context.status, context.winner, context.trial, context.waiting, context.planned, context.count,
               context.banned, context.times.ms, context.times.warmup_ms)
        for name, context in tuning.contexts.items()
    }  # fmt: skip
    plan = decisions.plan_of(tuning), tuning.judged_run, tuning.planned_runs, tuning.has_trial
    return contexts, plan, tuning.runs, tuning.done, tuning.closing


@given(st.data())
@settings(max_examples=300)
def test_the_same_words_make_the_same_state(data):
    search = data.draw(st.sampled_from(["exhaustive", "racing"]))
    rules = Rules(
        strategy=STRATEGIES[search],
        search=search,
        n_warmup=1,
        n_repeat=2,
        rank_reduce="max",
        objective=data.draw(st.sampled_from(["kernel", "thunk"])),
        mode=data.draw(st.sampled_from(["replay", "online"])),
        max_runs=data.draw(st.sampled_from([None, 7])),
    )
    tuning = Tuning(rules)
    events = [{"open": "session"}]
    tuning.open()
    for run in range(data.draw(st.integers(1, 40))):
        names = data.draw(st.sampled_from([NAMES, NAMES, NAMES[:1], ()]))
        parts = {name: what_is_said(data.draw, tuning, name) for name in names}
        whole = replace(parts[names[0]], ran=None, bans={}, announcement=None) if names else Part()
        said = Payload("run", parts=parts, run=whole, elapsed_s=run / 10)
        events.append({"merged": said.decisive()})
        tuning.step(tuning.kernels.unite(said, tuning.contexts)[0])
        if tuning.done or (tuning.closing and data.draw(st.booleans())):
            events.append({"open": "session"})
            tuning.open()
    past = Past.of("session", 0, "cpu", events)
    again = Tuning(rules)
    relive(again, past.events)
    assert state_of(again) == state_of(tuning)


# ---- the command line


def test_cache_list_tells_of_what_is_unfinished_and_clear_deletes_it(tmp_cache):
    run = CliRunner(env={"COLUMNS": "200"}).invoke
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    listed = run(cli.app, ["cache", "list"])
    assert listed.exit_code == 0
    assert "1 session left unfinished: the next start goes on there." in listed.output
    cleared = run(cli.app, ["cache", "clear", "--yes"])
    assert cleared.output == f"Deleted 0 entries and 1 journal in {tmp_cache}\n"
    assert journals(tmp_cache) == []


def test_cache_clear_leaves_a_session_that_is_under_way(tmp_cache):
    def busy(rank):
        run = CliRunner().invoke
        texts = []

        def look():
            texts.extend(
                [run(cli.app, ["cache", "list"]).output, run(cli.app, ["cache", "clear", "-y"]).output]
            )

        program(rank, {(32, 1): look})
        return texts

    listed, cleared = value_of(busy)
    assert "1 session under way." in listed
    assert cleared == f"Deleted 0 entries in {tmp_cache}\n"
