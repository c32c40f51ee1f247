"""A rank fails at an exchange, with nothing to tune: all others are told at once, and the next one works."""

import os
import time
from pathlib import Path

import pytest
from rank_programs import SOON_S, TIMEOUT_S, ending, exchange, interrupt_when_waiting, is_gone, join, wait_for

from dist_autotune import NoValidConfig, PeerFailed
from dist_autotune.ranks.group import GROUPS
from ranks import assert_all_ok, describe, run_ranks


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("init", ["file", "tcp"])
def test_a_failing_rank_is_told_at_once_and_the_next_exchange_works(init, failing):
    def program(rank):
        exchange(rank)
        if rank == failing:
            GROUPS.of(None).fail(ValueError("no such tensor"))
            return "failed", 0.0, exchange(rank)
        began = time.monotonic()
        with pytest.raises(PeerFailed) as caught:
            exchange(rank)
        assert (caught.value.rank, caught.value.error) == (failing, "ValueError: no such tensor")
        return str(caught.value), time.monotonic() - began, exchange(rank)

    results = assert_all_ok(run_ranks(program, 3, init=init))
    for rank, (text, waited_s, then) in enumerate(results):
        assert then == [0, 1, 2]
        if rank != failing:
            assert text.startswith(f"rank {failing} failed")
            assert "ValueError: no such tensor" in text
            assert waited_s < SOON_S


def test_all_ranks_may_fail_at_once_and_the_next_exchange_works():
    def program(rank):
        for n in range(5):
            GROUPS.of(None).fail(ValueError(f"rank {rank}, {n}"))
        return exchange(rank)

    results = run_ranks(program, 3)
    assert assert_all_ok(results) == [[0, 1, 2]] * 3
    assert max(result.elapsed_s for result in results) < SOON_S


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


def test_a_rank_without_a_config_leaves_its_peers_without_one():
    def program(rank):
        if rank == 1:
            GROUPS.of(None).fail(NoValidConfig("matmul[64]: all 2 configs failed on some rank."))
            return
        with pytest.raises(NoValidConfig, match=r"matmul\[64\]: all 2 configs failed") as caught:
            exchange(rank)
        assert isinstance(caught.value, PeerFailed)
        assert caught.value.rank == 1

    assert_all_ok(run_ranks(program, 2))


def test_a_slow_peer_still_hears_of_a_failure_when_the_failing_host_has_left():
    def program(rank, note):
        exchange(rank)
        if rank == 0:  # serves the store
            note.write_text(str(os.getpid()))
            GROUPS.of(None).fail(ValueError("boom"))
            os._exit(1)
        wait_for(lambda: note.exists() and note.read_text() and is_gone(int(note.read_text())))
        return [ending(lambda: exchange(rank)) for _ in range(2)]

    zero, *others = run_ranks(program, 3, Path.cwd() / "pid")
    assert zero.exitcode == 1, describe(zero)
    for first, second in assert_all_ok(others):
        assert first.startswith("PeerFailed: rank 0 failed")
        assert "ValueError: boom" in first
        assert second.startswith("AgreementTimeout: ")  # and it is still gone at the next
        assert "rank 0" in second


def test_ctrl_c_while_waiting_is_raised_soon_and_told():
    def program(rank, note):
        exchange(rank)
        if rank == 0:
            interrupt_when_waiting()
            began = time.monotonic()
            end = ending(lambda: exchange(rank))
            waited_s = time.monotonic() - began
            note.touch()
            return end, waited_s
        wait_for(note.exists)
        return ending(lambda: exchange(rank))

    (zero, waited_s), one = assert_all_ok(run_ranks(program, 2, Path.cwd() / "interrupted"))
    assert zero.startswith("KeyboardInterrupt")
    assert waited_s < SOON_S
    assert one.startswith("PeerFailed: rank 0 failed")
    assert "KeyboardInterrupt" in one


def test_a_merge_that_raises_is_a_failure_of_the_rank_that_merges():
    def program(rank):
        def refuse(*payloads: bytes) -> bytes:
            raise KeyError("payload")

        merge_ = refuse if rank == 0 else join
        return ending(lambda: GROUPS.of(None).exchange(b"x", merge_, TIMEOUT_S, "a test")), exchange(rank)

    (zero, _), (one, then) = assert_all_ok(run_ranks(program, 2))
    assert zero == "KeyError: 'payload'"
    assert one.startswith("PeerFailed: rank 0 failed")
    assert then == [0, 1]
