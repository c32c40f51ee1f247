"""One rank fails in the middle of a tuned call: how every rank ends, and that the next call works."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from triton.runtime.autotuner import Autotuner

from dist_autotune import AgreementTimeout, PeerFailed, TuningError, attendant, exchange, is_tuning, launches
from kernels_for_tests import Bench, double, launch, numbers, records
from rank_programs import (
    IN_TIME_S,
    SHORT_S,
    SOON_S,
    TIMEOUT_S,
    blocks_of,
    ending,
    interrupt_when_waiting,
    is_gone,
    set_patience,
    statuses_of,
    tune,
    wait_for,
)
from ranks import assert_all_ok, assert_killed, describe, meet, run_ranks

STOCK_RUN = Autotuner.run


@pytest.fixture
def quick_heartbeats(monkeypatch):
    """Let the thread that looks after a busy rank look often; peers wait for it three times as long."""
    monkeypatch.setattr(attendant, "HEARTBEAT_S", SHORT_S / 3)


class Boom(Exception):
    """What a thunk of these tests raises."""


def failing_step(rank, *, fails, at_run, **options):
    """Return a tuned function of two kernels that calls `fails[rank]` in the middle of its n-th run."""
    bench, x, runs = Bench(), numbers(), []
    first = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    second = bench.kernel({16: 1.0, 32: 2.0}, double)

    def thunk():
        runs.append(None)
        y = launch(first, x)
        if len(runs) == at_run and rank in fails:
            fails[rank]()
        launch(second, x)
        return y

    return tune(bench, thunk, **options), runs, x


def raise_(error):
    raise error


def assert_next_call_works(step, x):
    assert Autotuner.run is STOCK_RUN
    assert not is_tuning()
    assert torch.equal(step(), x + 1)
    assert sorted(statuses_of(step).values()) == ["tuned", "tuned"]
    return sorted(blocks_of(step).items())


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("at_run", [1, 2, 4], ids="run {}".format)  # the first, a trial, the final one
def test_an_exception_raises_where_it_was_and_PeerFailed_on_the_others(failing, at_run):
    def program(rank):
        step, runs, x = failing_step(rank, fails={failing: lambda: raise_(Boom("no more"))}, at_run=at_run)
        with pytest.raises(Boom if rank == failing else PeerFailed) as caught:
            step()
        error = caught.value
        if rank == failing:
            assert error.args == ("no more",)
            assert error.__cause__ is None
        else:
            assert (error.rank, error.error) == (failing, "Boom: no more")
            assert isinstance(error, TuningError)
            assert f"Rank {failing} failed" in str(error)
        assert len(runs) == at_run
        assert not step.settled
        return assert_next_call_works(step, x), step.report.runs

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero == one == two


def test_the_first_failure_is_known_before_a_slow_rank_has_come():
    def program(rank, note):
        fails = {0: lambda: raise_(Boom("early")), 2: lambda: wait_for(note.exists)}
        step, _, _ = failing_step(rank, fails=fails, at_run=2)
        text = ending(step)
        if rank == 1:
            note.touch()  # rank 2 is still in its function: rank 1 did not wait for it
        return text

    zero, one, two = assert_all_ok(run_ranks(program, 3, Path.cwd() / "told"))
    assert zero == "Boom: early"
    for text in (one, two):
        assert text.startswith("PeerFailed: Rank 0 failed")
        assert "Boom: early" in text


def test_an_exception_on_all_ranks_is_everybodys_own():
    def program(rank):
        fail = lambda: raise_(Boom(f"rank {rank}"))  # noqa: E731
        step, _, x = failing_step(rank, fails={0: fail, 1: fail, 2: fail}, at_run=2)
        began = time.monotonic()
        assert ending(step) == f"Boom: rank {rank}"
        assert time.monotonic() - began < SOON_S
        return assert_next_call_works(step, x)

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero == one == two


def flow_failing_on(ranks, rank):
    """Return a search that raises on some ranks once it has a time."""

    def flow(candidates, *, n_warmup, n_repeat):
        yield 0
        if rank in ranks:
            raise Boom("in the flow")
        yield 1
        return 1

    return flow


def test_a_search_of_the_users_that_raises_on_one_rank_is_told_to_the_others_at_once():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        ranks = {1}
        step = tune(bench, lambda: launch(kernel, x), search=flow_failing_on(ranks, rank))
        began = time.monotonic()
        text = ending(step)
        assert time.monotonic() - began < SOON_S
        ranks.clear()
        return text, torch.equal(step(), x + 1), blocks_of(step)

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero[0].startswith("PeerFailed: Rank 1 failed")
    assert two[0].startswith("PeerFailed: Rank 1 failed")
    assert "Boom: in the flow" in zero[0]
    assert one[0].startswith("FlowFailed: search=")
    assert zero[1:] == one[1:] == two[1:] == (True, {"add64": 32})


def test_a_search_of_the_users_that_raises_on_all_ranks_is_everybodys_own():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        ranks = {0, 1}
        step = tune(bench, lambda: launch(kernel, x), search=flow_failing_on(ranks, rank))
        texts = [ending(step), ending(step)]
        ranks.clear()
        return texts, torch.equal(step(), x + 1), blocks_of(step)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert all(text.startswith("FlowFailed: search=") for text in zero[0])
    assert zero[1:] == (True, {"add64": 32})


@pytest.mark.parametrize(
    ("leave", "text"),
    [
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: raise_(KeyboardInterrupt()), "KeyboardInterrupt"),
        (lambda: raise_(GeneratorExit()), "GeneratorExit"),
        (lambda: raise_(StopIteration(7)), "StopIteration: 7"),
    ],
    ids=["sys.exit", "KeyboardInterrupt", "GeneratorExit", "StopIteration"],
)
def test_leaving_by_any_exception_releases_the_peers(leave, text):
    def program(rank):
        step, _, x = failing_step(rank, fails={1: leave}, at_run=2)
        end = ending(step)
        assert_next_call_works(step, x)
        return end

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == f"PeerFailed: Rank 1 failed, so this call ends on rank 0 too: {text}"
    assert one.startswith(text.partition(":")[0])


def test_ctrl_c_while_a_rank_waits_for_its_peers():
    def program(rank, note):
        fails = {0: interrupt_when_waiting, 1: lambda: wait_for(note.exists)}
        step, _, x = failing_step(rank, fails=fails, at_run=2)
        began = time.monotonic()
        end = ending(step)
        waited_s = time.monotonic() - began
        note.touch()
        return end, waited_s, assert_next_call_works(step, x)

    (zero, waited_s, first), (one, _, second) = assert_all_ok(run_ranks(program, 2, Path.cwd() / "note"))
    assert zero.startswith("KeyboardInterrupt")
    assert waited_s < SOON_S
    assert one == "PeerFailed: Rank 0 failed, so this call ends on rank 1 too: KeyboardInterrupt"
    assert first == second


@pytest.mark.parametrize("init", ["file", "tcp"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_named_by_the_others_in_time(init, killed, monkeypatch):
    monkeypatch.setattr(exchange, "SIGNING_S", SOON_S)  # a busy survivor is not to be named too
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
        assert Autotuner.run is STOCK_RUN
        return time.monotonic() - began, str(caught.value)

    results = run_ranks(program, 3, init=init)
    assert_killed(results[killed])
    for waited_s, text in assert_all_ok([results[rank] for rank in survivors]):
        assert waited_s < IN_TIME_S
        assert "run 1 of" in text
        assert f"rank-{killed}.jsonl" in text


def test_a_stopped_rank_is_named_by_the_others_and_everybody_goes_on_when_it_wakes(monkeypatch):
    # SIGSTOP on the rank that runs the hub: nothing there answers, and nothing is closed.
    monkeypatch.setattr(exchange, "SILENCE_S", 1.0)
    monkeypatch.setattr(exchange, "SIGNING_S", SOON_S)  # a busy survivor is not to be named too

    def program(rank, directory):
        def stop():
            (directory / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

        def lose_patience():
            set_patience(step, SHORT_S)
            meet(1, 2)

        step, _, _ = failing_step(rank, fails={0: stop, 1: lose_patience, 2: lose_patience}, at_run=2)
        began = time.monotonic()
        text = ending(step)
        waited_s = time.monotonic() - began
        set_patience(step, TIMEOUT_S)
        (directory / f"ended {rank}").touch()
        if rank == 1:
            wait_for(lambda: (directory / "ended 2").exists())
            os.kill(int((directory / "pid").read_text()), signal.SIGCONT)
        wait_for(lambda: (directory / "ended 0").exists())
        calls = [ending(step).partition("(")[0] for _ in range(3)]
        return text, waited_s, calls[-1]

    results = run_ranks(program, 3, Path.cwd())
    for rank, (text, waited_s, last) in enumerate(assert_all_ok(results)):
        if rank:
            assert text.startswith("AgreementTimeout: ")
            assert "for rank 0 to agree" in text
            assert waited_s < TIMEOUT_S
        assert last == "returned tensor"


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


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_ends_too_and_the_next_call_works(late):
    others = [rank for rank in range(3) if rank != late]

    def program(rank, given_up):
        def lose_patience():
            set_patience(step, SHORT_S)
            meet(*others)

        fails = dict.fromkeys(others, lose_patience)
        fails[late] = lambda: wait_for(given_up.exists)
        step, _, x = failing_step(rank, fails=fails, at_run=2)
        with pytest.raises(AgreementTimeout, match=f"for rank {late} to agree"):
            step()
        given_up.touch()
        set_patience(step, TIMEOUT_S)
        return assert_next_call_works(step, x)

    zero, one, two = assert_all_ok(run_ranks(program, 3, Path.cwd() / "given up"))
    assert zero == one == two


def test_a_rank_that_is_late_by_less_costs_nothing():
    def program(rank):
        step, _, x = failing_step(rank, fails={1: lambda: time.sleep(0.5)}, at_run=2)
        return assert_next_call_works(step, x)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one


@pytest.mark.parametrize("failing", [0, 1])
def test_failing_in_a_settled_call(failing):
    def program(rank):
        step, runs, x = failing_step(rank, fails={failing: lambda: raise_(Boom("later"))}, at_run=6)
        step()
        assert len(runs) == 4
        step()
        end = ending(step)
        assert step.settled
        assert Autotuner.run is STOCK_RUN
        assert torch.equal(step(), x + 1)
        return end, len(runs)

    results = assert_all_ok(run_ranks(program, 3))
    for rank, (end, runs) in enumerate(results):
        assert runs == 7
        if rank == failing:
            assert end == "Boom: later"
        else:
            assert end.startswith(f"PeerFailed: Rank {failing} failed")


def test_a_rank_absent_from_a_settled_call_is_named_by_the_vote():
    def program(rank):
        step, _, x = failing_step(rank, fails={}, at_run=0)
        step()
        set_patience(step, SHORT_S)
        if rank == 1:
            wait_for(lambda: Path("given up").exists())
        else:
            meet(0, 2)
        with pytest.raises(AgreementTimeout, match="for rank 1 to agree on a call of"):
            step()
        Path("given up").touch()
        set_patience(step, TIMEOUT_S)
        assert step.settled
        return torch.equal(step(), x + 1)

    assert assert_all_ok(run_ranks(program, 3)) == [True] * 3


def test_failures_call_after_call():
    def program(rank):
        bench, x, calls = Bench(), numbers(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

        def thunk():
            y = launch(kernel, x)
            if len(calls) < 6 and rank == len(calls) % 3:
                raise Boom(f"call {len(calls)}")
            return y

        step, endings = tune(bench, thunk), []
        for _ in range(6):
            endings.append(ending(step).partition(":")[0])
            calls.append(None)
        assert torch.equal(step(), x + 1)
        return endings, blocks_of(step)

    for rank, (endings, blocks) in enumerate(assert_all_ok(run_ranks(program, 3))):
        assert endings == ["Boom" if n % 3 == rank else "PeerFailed" for n in range(6)]
        assert blocks == {"add64": 32}


def test_what_was_settled_before_a_failure_is_kept():
    def program(rank):
        bench, x, runs = Bench(), numbers(), []
        short = bench.kernel({16: 1.0, 32: 2.0}, name="short")
        long = bench.kernel({16: 1.0, 32: 2.0, 64: 3.0, 128: 4.0}, name="long")

        def thunk():
            runs.append(None)
            launch(short, x), launch(long, x)
            if len(runs) == 4 and rank:
                raise Boom

        step = tune(bench, thunk)
        end = ending(step)
        bench.forget()
        step()
        return end.partition(":")[0], bench.blocks("short"), bench.blocks("long")

    again = [16] * 5, [16, 32, 64, 128, 16]
    assert assert_all_ok(run_ranks(program, 2)) == [("PeerFailed", *again), ("Boom", *again)]


@pytest.mark.parametrize("what", ["disk", "preserve", "log"])
def test_an_exception_of_ours_outside_the_thunk_is_told_too(what, monkeypatch):
    import dist_autotune.domain
    import dist_autotune.session

    def program(rank):
        if rank == 1:
            place = {
                "disk": (dist_autotune.domain.DiskCache, "load_all"),
                "preserve": (dist_autotune.session, "Snapshot"),
                "log": (dist_autotune.chronicle.Chronicle, "step"),
            }[what]
            monkeypatch.setattr(*place, lambda *args, **kwargs: raise_(MemoryError("no room")))
        step, _, x = failing_step(rank, fails={}, at_run=0)
        end = ending(step)
        monkeypatch.undo()
        return end, assert_next_call_works(step, x)

    (zero, first), (one, second) = assert_all_ok(run_ranks(program, 2))
    assert one == "MemoryError: no room"
    assert zero == "PeerFailed: Rank 1 failed, so this call ends on rank 0 too: MemoryError: no room"
    assert first == second


def test_the_logs_say_who_failed_and_what_was_tried():
    def program(rank):
        step, _, _ = failing_step(rank, fails={1: lambda: raise_(Boom("no more"))}, at_run=2)
        ending(step)
        return [(event.event, getattr(event, "by_rank", None)) for event in records(rank=rank)][-2:], [
            event.error for event in records(rank=rank) if event.event == "run_failed"
        ]

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == ([("run_failed", 1), ("session_closed", None)], ["rank 1: Boom: no more"])
    assert one == ([("run_failed", 1), ("session_closed", None)], ["Boom: no more"])


# ---- slow, because it compiles


@pytest.mark.parametrize("where", ["preflight", "first launch"])
def test_a_rank_that_compiles_is_not_given_up(where, monkeypatch, quick_heartbeats):
    # Nothing compiles in the interpreter: the two places where it would are made slow on one rank.
    def program(rank):
        def compiles(*args, **kwargs):
            time.sleep(2 * SHORT_S if rank == 1 and not slow else 0)
            slow.append(None)
            return launches.compiling.Preflight()

        slow = []
        if where == "preflight":
            monkeypatch.setattr(launches.intercept, "is_interpreted", lambda: False)
            monkeypatch.setattr(launches.compiling, "preflight", compiles)
            monkeypatch.setattr(launches.compiling, "current_device", lambda: -1)
        else:
            monkeypatch.setattr(launches.compiling, "current_device", lambda: 0)
            monkeypatch.setattr(launches.intercept, "compiled", compiles)
        step, _, x = failing_step(rank, fails={}, at_run=0, timeout_s=SHORT_S)
        meet()
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
    assert one.startswith("PeerFailed: Rank 0 failed")
    assert "dist_autotune: Rank 1 is still in run 1 of" in results[1].stderr
    assert "rank 0 has failed (Boom: before the barrier)" in results[1].stderr
    assert "is still in" not in results[0].stderr


@pytest.mark.parametrize("settled", [False, True], ids=["tuning", "settled"])
def test_a_stuck_peer_is_ended_when_asked_for(settled, quick_heartbeats):
    def program(rank, pid):
        bench, x, runs = Bench(), numbers(), []
        kernel = bench.kernel({16: 1.0, 32: 2.0})

        def thunk():
            runs.append(None)
            launch(kernel, x)
            if len(runs) == (5 if settled else 2):
                if rank == 0:
                    raise Boom
                pid.write_text(str(os.getpid()))
                dist.barrier()

        step = tune(bench, thunk, on_stuck="abort", timeout_s=SHORT_S)
        meet()
        for _ in range(3):
            end = ending(step)
            if not end.startswith("returned"):
                break
        wait_for(lambda: pid.exists() and pid.read_text() and is_gone(int(pid.read_text())))
        return end.partition(":")[0]

    zero, one = run_ranks(program, 2, Path.cwd() / "pid")
    assert assert_all_ok([zero]) == ["Boom"]
    assert one.exitcode == 1, describe(one)
    assert "is ended: it is still in" in one.stderr
    assert "in thunk" in one.stderr  # the traceback of where it hung
    assert one.elapsed_s < 30  # rank 0 would wait for its end until the time-out of run_ranks
