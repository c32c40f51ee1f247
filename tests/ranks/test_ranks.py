"""The rank harness: how each rank ends is reported, whatever the rank does, and within the time allowed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from ranks import Result, assert_all_ok, assert_killed, describe, meet, run_ranks


def sum_of_ranks(rank):
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, {}), (2, {"init": "tcp"}), (4, {}), (2, {"fresh": True})],
    ids=["alone", "tcp", "file", "new interpreters"],
)
def test_ranks_share_a_process_group_and_return_values(world_size, options):
    results = run_ranks(sum_of_ranks, world_size, **options)
    assert assert_all_ok(results) == [sum(range(world_size))] * world_size
    assert [result.rank for result in results] == list(range(world_size))


def test_an_exception_on_one_rank_is_reported_and_the_other_returns():
    def fail_on_one(rank):
        if rank == 1:
            raise ValueError("no such config")
        return "fine"

    zero, one = run_ranks(fail_on_one, 2, init="none")
    assert (zero.value, zero.error, zero.exitcode) == ("fine", None, 0)
    assert (one.error, one.error_type, one.exitcode) == ("ValueError: no such config", "ValueError", 1)
    assert "fail_on_one" in one.traceback
    with pytest.raises(AssertionError, match="rank 1: ValueError: no such config"):
        assert_all_ok([zero, one])


@pytest.mark.parametrize(
    ("leave", "exitcode", "error"),
    [
        (lambda: sys.exit(3), 3, "SystemExit: 3"),
        (lambda: sys.exit("bye"), 1, "SystemExit: bye"),
        (lambda: os._exit(4), 4, None),
    ],
    ids=["sys.exit", "sys.exit with text", "os._exit"],
)
def test_leaving_early_gives_the_exit_code(leave, exitcode, error):
    (result,) = run_ranks(lambda rank: leave(), 1, init="none")
    assert (result.exitcode, result.error, result.ok) == (exitcode, error, False)


def test_a_killed_rank_is_reported_by_its_signal_and_its_peer_hears_of_it():
    def die_in_the_middle(rank):
        meet()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    zero, one = run_ranks(die_in_the_middle, 2, timeout_s=30)
    assert (one.signal, one.exitcode, one.timed_out, one.error) == (signal.SIGKILL, None, False, None)
    assert zero.error_type is not None
    assert zero.exitcode == 1
    assert zero.elapsed_s < 20  # run_ranks would end it after 30


@pytest.mark.parametrize("init", ["file", "tcp"])
def test_the_store_outlives_rank_0(init):
    def outlive_rank_0(rank, note):
        if rank == 0:
            note.write_text(str(os.getpid()))
        meet()
        if rank == 0:
            os._exit(0)
        while _is_alive(int(note.read_text())):
            time.sleep(0.001)
        store = dist.distributed_c10d._get_default_store()
        store.set("still", "here")
        return store.get("still")

    _, one = run_ranks(outlive_rank_0, 2, Path.cwd() / "pid", init=init)
    assert assert_all_ok([one]) == [b"here"]


def test_a_rank_that_never_ends_is_killed_at_the_deadline_and_says_where_it_stood():
    def spin_on_one(rank):
        while rank == 1:
            pass
        return "done"

    zero, one = run_ranks(spin_on_one, 2, timeout_s=1.0, init="none")
    assert (zero.value, zero.timed_out) == ("done", False)
    assert (one.timed_out, one.signal, one.value) == (True, signal.SIGKILL, None), describe(one)
    assert one.elapsed_s >= 1.0
    assert "in spin_on_one" in one.stderr


@pytest.mark.parametrize("blocks", [False, True], ids=["rank returns", "rank is killed"])
def test_what_a_rank_started_ends_with_it(blocks):
    def start_a_sleeper(rank, note):
        sleeper = subprocess.Popen(["sleep", "1000"])
        note.write_text(str(sleeper.pid))
        if blocks:
            sleeper.wait()

    note = Path.cwd() / "pid"
    run_ranks(start_a_sleeper, 1, note, timeout_s=1.0, init="none")
    deadline = time.monotonic() + 30  # init reaps it
    while _is_alive(int(note.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_stderr_and_a_crash_are_captured():
    def write_and_crash(rank):
        print("before", file=sys.stderr)
        os.write(2, b"from C\n")
        os.kill(os.getpid(), signal.SIGSEGV)

    (result,) = run_ranks(write_and_crash, 1, init="none")
    assert result.signal == signal.SIGSEGV
    assert result.stderr.startswith("before\nfrom C\nFatal Python error: Segmentation fault")


class Unwilling:
    """An object that one end of the journey cannot pickle."""

    def __init__(self, end):
        self.end = end

    def __reduce__(self):
        if self.end == "rank":
            raise TypeError("not from here")
        return int, ("not a number",)


@pytest.mark.parametrize("end", ["rank", "parent"])
def test_a_value_that_cannot_be_pickled_is_an_error_not_a_hang(end):
    (result,) = run_ranks(lambda rank: Unwilling(end), 1, init="none")
    assert not result.ok
    assert result.error_type == {"rank": "TypeError", "parent": "UnpicklingError"}[end]


def test_an_open_process_group_in_the_parent_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="a process group is open here"):
        run_ranks(sum_of_ranks, 2)


def test_an_interrupted_call_leaves_no_rank_behind(monkeypatch):
    def interrupt(pid):
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "_has_ended", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(lambda rank: signal.pause(), 2, init="none")
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_nobody_leaves_a_meeting_before_the_last_has_come():
    def program(rank, directory):
        complete = []
        for turn in range(3):
            if rank == turn:
                time.sleep(0.05)  # on purpose: another one is late in each turn
            (directory / f"{turn} {rank}").touch()
            meet()
            complete.append(len(list(directory.glob(f"{turn} *"))))
        if rank != 1:
            (directory / f"two {rank}").touch()
            meet(0, 2)  # without rank 1, which is gone
        return complete, len(list(directory.glob("two *")))

    for rank, (complete, without_one) in enumerate(assert_all_ok(run_ranks(program, 3, Path.cwd()))):
        assert complete == [3, 3, 3]
        assert without_one == 2 or rank == 1


def test_ctrl_c_reaches_a_rank_whatever_pytest_was_started_with():
    def interrupt_myself(rank):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what a shell gives to `pytest &`
    try:
        (result,) = run_ranks(interrupt_myself, 1, init="none")
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.error_type == "KeyboardInterrupt", describe(result)


def test_a_result_says_how_it_ended():
    with pytest.raises(AssertionError, match=r"rank 0: killed after 2\.0 s without an end\nstderr:\nhere"):
        assert_all_ok([Result(rank=0, signal=signal.SIGKILL, timed_out=True, elapsed_s=2.0, stderr="here")])
    with pytest.raises(AssertionError, match="rank 1: ended by SIGSEGV"):
        assert_all_ok([Result(rank=1, signal=signal.SIGSEGV)])
    with pytest.raises(AssertionError, match="rank 2: exit code 7"):
        assert_all_ok([Result(rank=2, exitcode=7)])
    assert describe(Result(rank=3, exitcode=0, value=[1, 2])) == "rank 3: returned [1, 2]"


def test_a_rank_that_was_not_killed_by_the_test_is_described():
    assert_killed(Result(rank=0, signal=signal.SIGKILL))
    for other in (
        Result(rank=0, exitcode=1, error="ValueError: no"),
        Result(rank=0, signal=signal.SIGKILL, timed_out=True),
    ):
        with pytest.raises(AssertionError, match="not ended by SIGKILL from the test:\nrank 0: "):
            assert_killed(other)
