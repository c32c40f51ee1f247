"""A candidate kills the process in its first launch, twice: the next start bans it."""

import json
import os
import signal
import sys
import time

import pytest
from kernels_for_tests import Bench, block_of, launch, numbers, records
from rank_programs import SHORT_S, TIMEOUT_S, ending, raise_, set_patience, tune

from dist_autotune import CacheWarning
from dist_autotune.search.messages import EXACT
from dist_autotune.storage.crash_guard import FOLDER, CrashGuard
from dist_autotune.storage.winners import Winners
from ranks import assert_all_ok, run_ranks

MS = {16: 3.0, 32: 2.0, 64: 1.0}
EXHAUSTIVE = {"n_warmup": 1, "n_repeat": 2}  # 3 configs: 9 runs and the final one


def die(number):
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)


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


def program(rank, events=None, options=EXHAUSTIVE):
    """Tune one kernel; return what was launched and found."""
    bench, x = Bench(), numbers()
    kernel = bench.kernel(scripted(bench, MS, events or {}))
    step = bench.tune(lambda: launch(kernel, x), **options)
    step()
    return summary(bench, step)


def summary(bench, step, rank=0):
    return {
        "blocks": bench.blocks(),
        "winners": {f"{c.kernel}{c.key[0]}": block_of(c.config) for c in step.report.contexts},
        "timings": {c.kernel: sorted(c.timings.values()) for c in step.report.contexts},
        "banned": {
            f"{context.kernel} {text.split(',')[0]}": reason
            for context in step.report.contexts
            for text, reason in context.banned.items()
        },
        "notes": [event.text for event in records(rank=rank) if event.event == "note"],
    }


def alone(function, *arguments):
    """Return how `function` ended in a process of its own."""
    (result,) = run_ranks(function, 1, *arguments, init="none")
    return result


def value_of(function, *arguments):
    return assert_all_ok([alone(function, *arguments)])[0]


def guards(cache):
    return sorted((cache / FOLDER).glob("*.json"))


RACING = {"search": "racing", "n_warmup": None, "n_repeat": None}
DEADLY = [signal.SIGKILL, signal.SIGSEGV]
EVERYTHING = [16] * 3 + [32] * 3 + [64] * 4


def last_crash(path):
    return list(json.loads(path.read_text().splitlines()[0])["crashes"].values())[-1]


def kill():
    die(signal.SIGKILL)


def dies_twice(*arguments):
    for _ in range(2):
        assert alone(*arguments).signal in DEADLY


# ---- what the next start bans


@pytest.mark.parametrize("number", [signal.SIGTERM, *DEADLY], ids=lambda number: number.name)
def test_one_death_convicts_no_candidate(tmp_cache, number):
    assert alone(program, {(64, 1): lambda: die(number)}).signal == number  # the best one
    assert len(guards(tmp_cache)) == 1
    second = value_of(program)
    assert (second["banned"], second["winners"]) == ({}, {"add64": 64})
    assert guards(tmp_cache) == []


def test_a_death_is_forgotten_once_the_candidate_has_completed_a_run(tmp_cache):
    assert alone(program, {(32, 1): kill}).signal == signal.SIGKILL
    assert alone(program, {(64, 1): kill}).signal == signal.SIGKILL
    assert alone(program, {(32, 1): kill}).signal == signal.SIGKILL
    assert value_of(program)["banned"] == {}


@pytest.mark.parametrize(
    ("number", "options"), [*zip(DEADLY, (EXHAUSTIVE, RACING), strict=True)], ids=["killed", "racing"]
)
def test_the_candidate_whose_first_launch_killed_the_process_is_banned(tmp_cache, number, options):
    dies_twice(program, {(32, 1): lambda: die(number)}, options)
    (path,) = guards(tmp_cache)
    started = records()[-1]
    crash = last_crash(path)
    assert (crash["run"], list(crash["suspects"])) == (started.run, list(started.plan))
    second = value_of(program, None, options)
    assert 32 not in second["blocks"]
    assert list(second["banned"]) == ["add BLOCK: 32"]
    (reason,) = second["banned"].values()
    assert "was running when rank 0's process was killed (run " in reason
    assert f"run {started.run} of session {started.session}, " in reason
    assert reason.endswith(" UTC)")
    assert second["winners"] == {"add64": 64}
    assert guards(tmp_cache) == []


@pytest.mark.parametrize(
    "leave",
    [lambda: raise_(KeyboardInterrupt()), lambda: raise_(ArithmeticError("no")), lambda: sys.exit(3)],
    ids=["KeyboardInterrupt", "exception", "sys.exit"],
)
def test_an_orderly_end_bans_nothing(tmp_cache, leave):
    assert alone(program, {(32, 1): leave}).error is not None
    second = value_of(program)
    assert (second["banned"], second["blocks"]) == ({}, EVERYTHING)
    assert guards(tmp_cache) == []


# ---- whose guard is whose


def open_guard(directory):
    return CrashGuard(Winners(directory), {}, "f", 0)


@pytest.mark.parametrize(("days", "left"), [(29, 1), (31, 0)])
def test_a_guard_that_no_start_takes_over_for_a_month_goes(tmp_path, days, left):
    def owner(rank):
        written = CrashGuard(Winners(tmp_path), {}, "gone", 0)
        written.begin_session("abc", {})
        written.begin_run(0, {"c" * 16: "d"})
        kill()

    assert alone(owner).signal == signal.SIGKILL
    (guard,) = tmp_path.glob("crash-guard/*")
    os.utime(guard, (time.time() - days * 86400,) * 2)
    open_guard(tmp_path).recover()
    assert len([*tmp_path.glob("crash-guard/gone-*")]) == left


def test_a_candidate_that_kills_the_process_as_it_is_loaded_is_the_one_to_blame(tmp_path):
    def owner(rank):
        written = open_guard(tmp_path)
        written.begin_session("abc", {})
        written.begin_run(0, {"c" * 16: "on trial"})
        written.end_run()
        with written.paused():
            with written.launching("d" * 16, "well loaded", loads=True):
                pass
            with written.launching("d" * 16, "deadly", loads=True):
                die(signal.SIGSEGV)

    assert alone(owner).signal == signal.SIGSEGV
    found = open_guard(tmp_path)
    crash = found.recover().crashes["abc"]
    assert (crash.kind, crash.suspects) == (EXACT, {"d" * 16: "deadly"})
    found.close()


# ---- files


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text.replace('"schema":4', '"schema":99', 1), "schema 99, expected 4"),
        (lambda text: "{", "damaged JSON"),
        (
            lambda text: text.replace('"suspects":{', '"suspects":3,"others":{', 1),
            r"got `int` - at `\$\.crashes\[\.\.\.\]\.suspects",
        ),
        (lambda text: "[" * 5000 + "\n", ""),
    ],
    ids=["another schema", "cut off", "another type", "endless nesting"],
)
def test_a_damaged_guard_is_a_warning_with_its_path_and_nothing_is_banned(tmp_cache, damage, reason):
    assert alone(program, {(64, 1): kill}).signal == signal.SIGKILL
    (path,) = guards(tmp_cache)
    path.write_text(damage(path.read_text()))

    def warned(rank):
        with pytest.warns(CacheWarning, match=f"Ignored {path}: .*({reason})") as caught:
            found = program(rank)
        return found["blocks"], len(caught)

    assert value_of(warned) == (EVERYTHING, 1)
    assert guards(tmp_cache) == []


def test_a_rank_that_raised_before_its_first_launch_clears_what_its_peers_have_launched():
    def job(rank, *, fails):
        bench, x = Bench(), numbers()
        kernel = bench.kernel(MS)

        def thunk():
            if rank == 0 and fails:
                raise_(FileNotFoundError("tokens.bin"))
            launch(kernel, x)
            if fails:
                die(signal.SIGTERM)  # it waits in a collective, and the launcher ends it
            return x

        tuned = bench.tune(thunk, is_dist=True, timeout_s=20.0)
        tuned()
        return bench.blocks()[0], [context.banned for context in tuned.report.contexts]

    ended = run_ranks(lambda rank: job(rank, fails=True), 2)
    assert ended[1].signal == signal.SIGTERM
    assert "FileNotFoundError" in str(ended[0].error)
    assert assert_all_ok(run_ranks(lambda rank: job(rank, fails=False), 2)) == [(16, [{}])] * 2


def test_suspicion_goes_on_after_a_pause_that_raised(tmp_path):
    guard = open_guard(tmp_path)
    guard.begin_session("abc", {})
    guard.begin_run(0, {"c" * 16: "on trial"})
    with pytest.raises(KeyboardInterrupt), guard.paused():
        raise KeyboardInterrupt
    (path,) = tmp_path.rglob("*-rank-*.json")
    assert last_crash(path)["suspects"] == {"c" * 16: "on trial"}
    guard.close()


# ---- of several ranks one is killed


def ranks_program(rank, cache, dies=None, leave=None):
    bench, x = Bench(), numbers()
    ms = {block: value + rank / 10 for block, value in MS.items()}
    lose_patience = lambda: set_patience(step, SHORT_S)  # noqa: E731 - of the exchange that a peer does not come to
    events = {} if dies is None else {dies[1]: leave if dies[0] == rank else lose_patience}
    kernel = bench.kernel(scripted(bench, ms, events))
    step = tune(bench, lambda: launch(kernel, x), cache=cache, timeout_s=TIMEOUT_S, **EXHAUSTIVE)
    text = ending(step)
    return summary(bench, step, rank) if dies is None else text


@pytest.mark.parametrize(("dying", "number"), [(0, signal.SIGKILL), (1, signal.SIGSEGV)], ids=str)
def test_after_one_rank_has_crashed_all_ban_its_candidate(tmp_cache, dying, number):
    leave = lambda: die(number)  # noqa: E731
    for _ in range(2):
        results = run_ranks(ranks_program, 2, tmp_cache, (dying, (32, 1)), leave, init="tcp")
        survivor = results[1 - dying]
        assert results[dying].signal == number
        assert survivor.value.startswith("AgreementTimeout: ")
    assert len(guards(tmp_cache)) == 2
    zero, one = assert_all_ok(run_ranks(ranks_program, 2, tmp_cache))
    for found in (zero, one):
        assert found["blocks"] == [16] * 3 + [64] * 4
        assert found["winners"] == {"add64": 64}
        assert list(found["banned"]) == ["add BLOCK: 32"]
        assert f"when rank {dying}'s process was killed (run 3 of " in found["banned"]["add BLOCK: 32"]
        assert found["timings"] == {"add": [1.1, 3.1]}
    assert zero["notes"] == one["notes"]
    assert guards(tmp_cache) == []
