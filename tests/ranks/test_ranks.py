"""The rank harness: how each rank ends is reported, whatever the rank does, and within the time allowed."""

import signal
import time
from pathlib import Path

from ranks import assert_all_ok, describe, meet, run_ranks


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
