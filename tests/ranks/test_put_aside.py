"""A session whose peers make no call any more is put aside: the call returns, and a later one goes on."""

import re
import time

import pytest
import torch.distributed as dist
from kernels_for_tests import Bench, launch, numbers, records
from rank_programs import TIMEOUT_S, blocks_of, settled_step, tune, tuned_step

from dist_autotune.ranks import questions
from dist_autotune.tuner import calls, session_exchanges
from ranks import assert_all_ok, meet, run_ranks

WAIT_S = session_exchanges.PATIENCE_S + 2.0  # on a busy machine


@pytest.fixture
def short_patience(monkeypatch, quick_heartbeats):
    """Let ranks wait briefly for peers that make no call, however long a run takes on a busy machine."""
    for each in (session_exchanges, calls):
        monkeypatch.setattr(each, "PATIENCE_S", 0.5)
    monkeypatch.setattr(session_exchanges, "PATIENCE_RUNS", 0)
    monkeypatch.setattr(questions, "ANSWER_S", 0.5)


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("mode", ["online", "replay"])
def test_ranks_that_call_less_often_cost_the_others_short_waits_and_keys_are_tuned_or_told(mode):
    def program(rank):
        bench, sizes = Bench(), [64]
        kernel = bench.kernel({16: 3.0, 32: 1.0, 48: 2.0, 64: 4.0, 80: 5.0, 96: 6.0})
        step = tune(bench, lambda: [launch(kernel, numbers(n)) for n in sizes], mode=mode)
        took_s = []
        for _ in range(6):
            for _ in range((3, 2)[rank]):
                began = time.monotonic()
                step()
                took_s.append(time.monotonic() - began)
            dist.barrier()
        untuned = [key[0] for _, key, _ in step.untuned]
        return max(took_s), blocks_of(step) == {"add64": 32} or untuned == [64], step.settled

    results = run_ranks(program, 2)
    for took_s, *ended in assert_all_ok(results):
        assert took_s < WAIT_S
        assert ended == [True, True]
    if mode == "online":
        assert re.search("rank 1 made no call .* for no rank. The next call goes on.", results[0].stderr)


def test_a_rank_whose_loader_is_slow_is_waited_for_over_all_steps_between_two_exchanges():
    def program(rank):
        step, _ = tuned_step({16: 3.0, 32: 1.0, 48: 2.0, 64: 4.0}, mode="online", overhead=0.001)
        for _ in range(40):
            time.sleep(0.2 * rank)  # the loader
            step()
        apart = 40 - sum(event.event == "exchanged" for event in records(rank=rank))
        return apart > session_exchanges.PATIENCE_S / 0.2, step.untuned

    results = run_ranks(program, 2)
    assert assert_all_ok(results) == [(True, ())] * 2
    assert not any("made no call" in result.stderr for result in results)


@pytest.mark.usefixtures("short_patience")
def test_after_three_calls_in_a_row_the_keys_stay_untuned_until_all_meet_again():
    def program(rank):
        step, _ = tuned_step({16: 3.0, 32: 1.0, 48: 2.0, 64: 4.0}, mode="online")
        step()
        took_s, told = [], []
        if rank == 0:
            for _ in range(8):
                began = time.monotonic()
                step()
                took_s.append(time.monotonic() - began)
                told.append(step.settled == bool(step.untuned))
        meet()
        return sum(took_s), step.settled, [key[0] for _, key, _ in step.untuned], all(told)

    zero, one = assert_all_ok(run_ranks(program, 2, timeout_s=4 * TIMEOUT_S))
    assert zero[0] < 8 * WAIT_S
    assert zero[1:] == (True, [64], True)
    assert one == (0, False, [], True)


@pytest.mark.usefixtures("short_patience")
def test_so_they_do_where_all_ranks_have_agreed_on_a_session_that_one_of_them_never_comes_to():
    def program(rank):
        step, _, sizes = settled_step(mode="online")
        sizes[:] = [96]
        step()
        took_s = []
        for _ in range(5 if rank == 0 else 0):
            began = time.monotonic()
            step()
            took_s.append(time.monotonic() - began)
        meet()
        return max(took_s, default=0.0) < WAIT_S, step.settled, [key[0] for _, key, _ in step.untuned]

    results = run_ranks(program, 2, timeout_s=4 * TIMEOUT_S)
    assert assert_all_ok(results) == [(True, True, [96]), (True, False, [])]
    assert re.search("opening of a session of .* for no rank. The next call goes on.", results[0].stderr)
    assert "3 times in a row. No session is opened" in results[0].stderr
