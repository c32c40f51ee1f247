"""The rank harness: how each rank ends is reported, whatever the rank does, and within the time allowed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import assert_all_ok, describe, meet, run_ranks


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
