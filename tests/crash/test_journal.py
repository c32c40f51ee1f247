"""The journals of sessions under way: whose they are, when one is written, and what the command line says."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from crash_programs import EXHAUSTIVE, MS, alone, die, journals, program, value_of
from kernels_for_tests import Bench, launch, numbers
from rank_programs import blocks_of, wait_for
from typer.testing import CliRunner

from dist_autotune import CacheWarning
from dist_autotune.cli import commands
from dist_autotune.search.unfinished import EXACT
from dist_autotune.storage import orphans
from dist_autotune.storage.journal import Journal, Try
from ranks import assert_all_ok, run_ranks

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
        assert found["blocks"] == [16] + [64] * 4  # the first run of a process that goes on is no trial
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


# ---- what is written, and when


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


def test_what_many_threads_launch_first_at_once_is_in_one_journal(tmp_path):
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for session in range(20):
                directory = tmp_path / str(session)
                directory.mkdir()
                written = Journal(directory, {}, "f", 0, lambda directory, reason: pytest.fail(reason))
                written.begin("abc", "cpu")
                written.run(0, {})
                contexts = [f"{context:016}" for context in range(16)]
                list(pool.map(lambda name, to=written: to.launching(name, Try("d", "text")), contexts))
                (path,) = directory.iterdir()
                lines = map(json.loads, path.read_text().splitlines())
                assert sorted([line["tries"] for line in lines if "tries" in line][-1]) == contexts
                written.discard()
                assert not directory.exists()
    finally:
        sys.setswitchinterval(interval_s)


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


# ---- the command line


def test_cache_list_tells_of_what_is_unfinished_and_clear_deletes_it(tmp_cache):
    run = CliRunner(env={"COLUMNS": "200"}).invoke
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    listed = run(commands.app, ["cache", "list"])
    assert listed.exit_code == 0
    assert "1 session left unfinished: the next start goes on there." in listed.output
    cleared = run(commands.app, ["cache", "clear", "--yes"])
    assert cleared.output == f"Deleted 0 entries and 1 journal in {tmp_cache}\n"
    assert journals(tmp_cache) == []


def test_cache_clear_leaves_a_session_that_is_under_way(tmp_cache):
    def busy(rank):
        run = CliRunner().invoke
        texts = []

        def look():
            texts.extend(
                [
                    run(commands.app, ["cache", "list"]).output,
                    run(commands.app, ["cache", "clear", "-y"]).output,
                ]
            )

        program(rank, {(32, 1): look})
        return texts

    listed, cleared = value_of(busy)
    assert "1 session under way." in listed
    assert cleared == f"Deleted 0 entries in {tmp_cache}\n"
