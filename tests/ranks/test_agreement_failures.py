"""A rank fails at an exchange, with nothing to tune: all others are told at once, and the next one works."""

import os
import time
from pathlib import Path

from process_states import has_ended
from rank_programs import ending, exchange, wait_for

from dist_autotune.ranks.group import GROUPS
from ranks import assert_all_ok, describe, run_ranks


def test_a_rank_may_fail_before_its_first_exchange():
    def program(rank, first):
        if rank == first:
            GROUPS.of(None).fail(ValueError("early"))
        else:
            time.sleep(0.2 if rank == 1 else 0.0)  # on purpose: it comes when the failure is known
            assert ending(lambda: exchange(rank)).startswith(f"PeerFailed: rank {first} failed")
        return exchange(rank)

    for first in (0, 2):
        assert assert_all_ok(run_ranks(program, 3, first)) == [[0, 1, 2]] * 3


def test_a_slow_peer_still_hears_of_a_failure_when_the_failing_host_has_left():
    def program(rank, note):
        exchange(rank)
        if rank == 0:  # serves the store
            note.write_text(str(os.getpid()))
            GROUPS.of(None).fail(ValueError("boom"))
            os._exit(1)
        wait_for(lambda: note.exists() and note.read_text() and has_ended(int(note.read_text())))
        return [ending(lambda: exchange(rank)) for _ in range(2)]

    zero, *others = run_ranks(program, 3, Path.cwd() / "pid")
    assert zero.exitcode == 1, describe(zero)
    for first, second in assert_all_ok(others):
        assert first.startswith("PeerFailed: rank 0 failed")
        assert "ValueError: boom" in first
        assert second.startswith("AgreementTimeout: ")  # and it is still gone at the next
        assert "rank 0" in second
