"""One rank raises in the middle of a tuned call: how every rank ends, and that the next call works."""

import itertools
import sys
import time
from pathlib import Path

import pytest
import torch
from kernels_for_tests import Bench, is_outside, launch, numbers, records
from rank_programs import (
    SOON_S,
    Boom,
    assert_next_call_works,
    blocks_of,
    ending,
    failing_step,
    interrupt_when_waiting,
    left,
    raise_,
    tune,
    wait_for,
)

from dist_autotune import PeerFailed, TuningError
from dist_autotune.errors import NotRepeatable
from dist_autotune.logs.records import SessionClosed, SessionOpened
from ranks import assert_all_ok, run_ranks


@pytest.mark.parametrize("failing", [0, 2])
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
            assert f"rank {failing} failed" in str(error)
        assert len(runs) == at_run
        assert not step.settled
        return assert_next_call_works(step, x), step.report.runs

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero == one == two


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
    assert zero == f"PeerFailed: rank 1 failed, so this call ends on rank 0 too: {text}"
    assert one.startswith(text.partition(":")[0])


def test_ctrl_c_while_a_rank_waits_for_its_peers():
    def program(rank, note):
        exchanges = lambda: step._calls.state.function.group._exchanges  # noqa: E731
        fails = {0: lambda: interrupt_when_waiting(exchanges()), 1: lambda: wait_for(note.exists)}
        step, _, x = failing_step(rank, fails=fails, at_run=2)
        began = time.monotonic()
        end = ending(step)
        waited_s = time.monotonic() - began
        note.touch()
        works = assert_next_call_works(step, x)
        wait_for(lambda: not left())  # one rank has dropped the session that the other would have resumed
        return end, waited_s, works

    (zero, waited_s, first), (one, _, second) = assert_all_ok(run_ranks(program, 2, Path.cwd() / "note"))
    assert zero.startswith("KeyboardInterrupt")
    assert waited_s < SOON_S
    assert one == "PeerFailed: rank 0 failed, so this call ends on rank 1 too: KeyboardInterrupt"
    assert first == second


@pytest.mark.parametrize("failing", [0, 1])
def test_failing_in_a_settled_call_raises_there_alone(failing):
    def program(rank):
        step, runs, x = failing_step(rank, fails={failing: lambda: raise_(Boom("later"))}, at_run=6)
        step()
        assert len(runs) == 4
        step()
        end = ending(step)
        assert step.settled
        assert is_outside()
        assert torch.equal(step(), x + 1)
        return end, len(runs)

    results = assert_all_ok(run_ranks(program, 3))
    for rank, (end, runs) in enumerate(results):
        assert runs == 7
        if rank == failing:
            assert end == "Boom: later"
        else:
            assert end.startswith("returned tensor")  # nobody waits for it


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_a_step_that_raises_every_few_calls_and_is_caught_costs_those_runs_alone(mode):
    def program(rank):
        bench, batches, endings = Bench(), itertools.count(), []

        def ms_of(launch):  # what a run that fails measures would make 32 the slowest
            return 1000.0 if is_bad(batch) else {16: 3.0, 32: 1.0, 64: 2.0}[launch.block]

        def is_bad(batch):
            return batch % 3 == 2

        kernel = bench.kernel({16: ms_of, 32: ms_of, 64: ms_of})

        def thunk():
            nonlocal batch
            batch = next(batches)
            launch(kernel, numbers())
            if is_bad(batch) and rank == batch // 3 % 2:
                raise Boom(f"batch {batch}")

        batch = 0
        step = tune(bench, thunk, mode=mode, n_warmup=1, n_repeat=2, name="step")
        while not step.settled:
            endings.append(ending(step).partition(":")[0])
        (context,) = step.report.contexts
        opened = [record for record in records(SessionOpened, rank=rank) if record.thunk == "step"]
        assert is_outside()
        return bench.blocks(), sorted(context.timings.values()), blocks_of(step), len(opened), endings

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero[:4] == one[:4]
    blocks, timings, winner, opened, _ = zero
    bad = [block for batch, block in enumerate(blocks) if batch % 3 == 2]
    good = [block for batch, block in enumerate(blocks) if batch % 3 != 2]
    assert good[:9] == [16] * 3 + [32] * 3 + [64] * 3
    assert len(bad) == 4
    assert (timings, winner, opened) == ([1.0, 2.0, 3.0], {"add64": 32}, 1)
    failed = [sorted(pair) for pair in zip(zero[4], one[4], strict=True) if pair != ("returned None",) * 2]
    assert failed == [["Boom", "PeerFailed"]] * 4


def test_a_rank_that_comes_back_without_the_session_makes_all_begin_anew():
    def program(rank):
        step, runs, x = failing_step(rank, fails={1: lambda: raise_(Boom("no more"))}, at_run=3)
        ends = [ending(step).partition(":")[0]]
        if rank == 1:
            step._calls._session.close()  # as after an interrupt in the tuner's own lines
            step._calls._session = None
        runs_before = len(runs)
        assert_next_call_works(step, x)
        return ends, len(runs) - runs_before, [r.outcome for r in records(SessionClosed, rank=rank)][-1]

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero[0] == two[0] == ["PeerFailed"]
    assert zero[1:] == one[1:] == two[1:]


@pytest.mark.parametrize("what", ["disk", "preserve", "log"])
def test_an_exception_of_ours_outside_the_thunk_is_told_too(what, monkeypatch):
    import dist_autotune.tuner.function_state
    import dist_autotune.tuner.session

    def program(rank):
        if rank == 1:
            place = {
                "disk": (dist_autotune.tuner.function_state.Winners, "launched_by"),
                "preserve": (dist_autotune.tuner.session, "Snapshot"),
                "log": (dist_autotune.tuner.recorder.Recorder, "record_contexts"),
            }[what]
            monkeypatch.setattr(*place, lambda *args, **kwargs: raise_(MemoryError("no room")))
        step, _, x = failing_step(rank, fails={}, at_run=0)
        end = ending(step)
        monkeypatch.undo()
        return end, assert_next_call_works(step, x)

    (zero, first), (one, second) = assert_all_ok(run_ranks(program, 2))
    assert one == "MemoryError: no room"
    assert zero == "PeerFailed: rank 1 failed, so this call ends on rank 0 too: MemoryError: no room"
    assert first == second


def test_a_rank_whose_arguments_are_refused_opens_the_session_with_its_next_call():
    def program(rank):
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        step = tune(bench, lambda batches: launch(kernel, numbers()))
        if rank == 1:
            with pytest.raises(NotRepeatable):
                step([iter([1])])
        step([1])
        return blocks_of(step)

    assert assert_all_ok(run_ranks(program, 2)) == [{"add64": 32}] * 2
