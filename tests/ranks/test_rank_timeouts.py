"""One rank dies, stops, is late or stuck in a tuned call: who names it, and how every rank ends."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kernels_for_tests import Bench, is_outside, launch, numbers, records
from operation_runs import on_ranks
from process_states import has_ended
from rank_programs import (
    IN_TIME_S,
    SHORT_S,
    TIMEOUT_S,
    Boom,
    assert_next_call_works,
    ending,
    failing_step,
    set_patience,
    tune,
    wait_for,
)

from dist_autotune import AgreementTimeout
from dist_autotune.launch import dispatcher
from ranks import assert_all_ok, assert_killed, describe, meet, run_ranks

# ---- gone


@pytest.mark.parametrize("init", ["file", "tcp"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_named_by_the_others_in_time(init, killed):
    survivors = [rank for rank in range(3) if rank != killed]

    def program(rank):
        began = 0.0

        def lose_patience():
            nonlocal began
            set_patience(step, SHORT_S)
            meet(*survivors)
            began = time.monotonic()

        fails = dict.fromkeys(survivors, lose_patience)
        fails[killed] = lambda: os.kill(os.getpid(), signal.SIGKILL)
        step, _, _ = failing_step(rank, fails=fails, at_run=2)
        with pytest.raises(AgreementTimeout, match=rf"rank {killed}\b") as caught:
            step()
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.missing_ranks == (killed,)
        assert is_outside()
        return time.monotonic() - began, str(caught.value)

    results = run_ranks(program, 3, init=init)
    assert_killed(results[killed])
    for waited_s, text in assert_all_ok([results[rank] for rank in survivors]):
        assert waited_s < IN_TIME_S
        assert "run 1 of" in text
        assert f"rank-{killed}.jsonl" in text


@pytest.mark.parametrize("handled", [False, True], ids=["default", "handler that exits"])
def test_a_rank_that_is_told_to_terminate_in_the_middle_of_a_run_releases_its_peers(handled):
    def program(rank):
        bench, x, runs = Bench(), numbers(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def leave(number, frame):
            raise SystemExit(143)

        def thunk():
            runs.append(None)
            y = launch(kernel, x)
            if rank == 1 and len(runs) == 2:
                if handled:
                    signal.signal(signal.SIGTERM, leave)
                os.kill(os.getpid(), signal.SIGTERM)
            elif len(runs) == 2 and not handled:
                set_patience(step, SHORT_S)
                meet(0, 2)
            return y

        step = tune(bench, thunk)
        end = ending(step)
        assert is_outside()
        return end

    results = run_ranks(program, 3)
    others = assert_all_ok([results[0], results[2]])
    if handled:
        (end,) = assert_all_ok([results[1]])
        assert end == "SystemExit: 143"
    else:
        assert_killed(results[1], signal.SIGTERM)
    for end in others:
        expected = "PeerFailed: rank 1 failed" if handled else "AgreementTimeout: "
        assert end.startswith(expected)
        assert "ank 1" in end
    started = [record for record in records(rank=1) if record.event == "run_started"]
    assert [record.run for record in started] == [0, 1]  # what the rank was doing is on disk
    assert list(started[-1].plan.values()) == [1]


# ---- late


@pytest.mark.parametrize(
    ("absent", "init"), [((0,), "file"), ((1,), "tcp"), ((0, 3), "file"), ((0, 3), "tcp")], ids=str
)
def test_ranks_that_never_call_are_named(init, absent):
    present = [rank for rank in range(4) if rank not in absent]

    def program(rank):
        if rank in absent:
            return None
        step, runs, _ = failing_step(rank, fails={}, at_run=0, timeout_s=SHORT_S)
        meet(*present)
        began = time.monotonic()
        with pytest.raises(AgreementTimeout) as caught:
            step()
        assert caught.value.missing_ranks == absent
        assert not runs  # nothing was tried
        return str(caught.value), time.monotonic() - began

    results = assert_all_ok(run_ranks(program, 4, init=init))
    texts, waited_s = zip(*(results[rank] for rank in present), strict=True)
    for text in texts:
        assert (f"rank {absent[0]} " if len(absent) == 1 else f"ranks {list(absent)} ") in text
    # Whoever came later than the first waited for less.
    assert SHORT_S - 0.1 < max(waited_s) < IN_TIME_S


@on_ranks(3)
def test_a_rank_absent_from_a_settled_call_is_missed_by_nobody(rank):
    step, _, x = failing_step(rank, fails={}, at_run=0)
    step()
    set_patience(step, SHORT_S)
    if rank == 1:
        wait_for(lambda: Path("done-0").exists() and Path("done-2").exists())
    for _ in range(3):
        step()
    Path(f"done-{rank}").touch()
    assert step.settled
    assert torch.equal(step(), x + 1)


# ---- slow, because it compiles


@pytest.mark.parametrize("where", ["preflight", "first launch"])
def test_a_rank_that_compiles_is_not_given_up(where, monkeypatch, quick_heartbeats):
    # Nothing compiles in the interpreter: the two places where it would are made slow on one rank.
    def program(rank):
        def compiles(*args, **kwargs):
            if not slow:
                meet()  # here each has sent its first heartbeat
                set_patience(step, SHORT_S)
                time.sleep(2 * SHORT_S * rank)
            slow.append(None)
            return dispatcher.preflight.Planned()

        slow = []
        if where == "preflight":
            monkeypatch.setattr(dispatcher.interception, "is_interpreted", lambda: False)
            monkeypatch.setattr(dispatcher.preflight, "plan", compiles)
            monkeypatch.setattr(dispatcher.preflight, "current_device", lambda: -1)
        else:
            monkeypatch.setattr(dispatcher.preflight, "current_device", lambda: 0)
            monkeypatch.setattr(dispatcher.Launch, "compile", compiles)
        patient = dict.fromkeys((0, 1), lambda: set_patience(step, TIMEOUT_S))
        step, _, x = failing_step(rank, fails=patient, at_run=2)
        began = time.monotonic()
        winners = assert_next_call_works(step, x)
        return winners, time.monotonic() - began

    (zero, waited_s), (one, _) = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert waited_s > 1.5 * SHORT_S


# ---- stuck in a collective of the user's own


def test_a_peer_in_a_collective_of_its_own_is_told_why_on_stderr_and_in_the_log(quick_heartbeats):
    def program(rank):
        bench, x, runs = Bench(), numbers(), []
        kernel = bench.kernel({16: 1.0, 32: 2.0})

        def thunk():
            runs.append(None)
            launch(kernel, x)
            if rank == 0 and len(runs) == 2:
                raise Boom("before the barrier")
            dist.barrier()

        step = tune(bench, thunk)
        end = ending(step)
        if rank == 0:
            note = lambda: Path(".autotune_logs/rank-1.jsonl").read_text()  # noqa: E731
            wait_for(lambda: "is still in run 1 of" in note())
            dist.barrier()  # lets rank 1 go
        meet()
        return end

    results = run_ranks(program, 2)
    zero, one = assert_all_ok(results)
    assert zero == "Boom: before the barrier"
    assert one.startswith("PeerFailed: rank 0 failed")
    assert "dist_autotune: Rank 1 is still in run 1 of" in results[1].stderr
    assert "rank 0 has failed (Boom: before the barrier)" in results[1].stderr
    assert "is still in" not in results[0].stderr


@pytest.mark.parametrize("when", ["tuning", "settled", "settled, heard between calls"])
def test_a_stuck_peer_is_ended_when_asked_for(when, quick_heartbeats):
    def program(rank, pid):
        bench, x, runs = Bench(), numbers(), []
        kernel = bench.kernel({16: 1.0, 32: 2.0})
        store, letter = dist.distributed_c10d._get_default_store(), "dist_autotune/letters/1/0"

        def thunk():
            runs.append(None)
            launch(kernel, x)
            if len(runs) == (1 if when == "tuning" else 3):
                meet()
                set_patience(step, SHORT_S)
            if len(runs) == (2 if when == "tuning" else 5):
                if rank == 0:
                    raise Boom
                pid.write_text(str(os.getpid()))
                dist.barrier()

        step = tune(bench, thunk, on_stuck="abort")
        for _ in range(3):
            if rank == 1 and when == "settled, heard between calls" and len(runs) == 4:
                wait_for(lambda: store.check(["raised"]) and not store.check([letter]))  # it has heard of it
            end = ending(step)
            if not end.startswith("returned"):
                break
        store.set("raised", "")
        assert end.startswith("Boom"), end
        wait_for(lambda: pid.exists() and pid.read_text() and has_ended(int(pid.read_text())))
        return end.partition(":")[0]

    zero, one = run_ranks(program, 2, Path.cwd() / "pid")
    assert assert_all_ok([zero]) == ["Boom"]
    assert one.exitcode == 1, describe(one)
    assert "ends: it is still in" in one.stderr
    assert "in thunk" in one.stderr  # the traceback of where it hung
    assert one.elapsed_s < 30  # rank 0 would wait for its end until the time-out of run_ranks
