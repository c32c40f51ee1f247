"""A launch that never ends, or breaks the device: who says so, what is named, how every rank ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeDevice
from kernels_for_tests import Bench, double, is_outside, launch, numbers, only, records
from rank_programs import TIMEOUT_S, ending, run_until_settled, set_patience, tune, wait_for

from dist_autotune import EventClock, PeerFailed, TuningError, is_tuning
from dist_autotune.errors import LaunchFailed, LaunchTimeout
from dist_autotune.logs.records import Note, RunFailed, SessionClosed
from dist_autotune.timing.samples import READ_WITHIN_RUNS
from ranks import assert_all_ok, run_ranks

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"
NEVER_MS = 1e9


def log_of(rank: int = 0) -> str:
    path = Path(f".autotune_logs/rank-{rank}.log")
    return path.read_text() if path.exists() else ""


def stuck_at(block: int, until: Callable[[], Any]) -> dict[int, Any]:
    """Return the times of a kernel whose launches with `block` end only when `until` is true."""

    def ms(launched: Any) -> float:
        if launched.block == block:
            wait_for(until)
        return 1.0

    return dict.fromkeys((16, 32, 64), ms)


# ---- a run that takes too long, on its own


def test_ranks_that_are_all_stuck_are_all_told(quick_heartbeats):
    def program(rank):
        bench = Bench()
        both = lambda: all(f"Rank {r} has been in run 1" in log_of(r) for r in (0, 1))  # noqa: E731
        kernel = bench.kernel(stuck_at(32, both))
        step = tune(bench, lambda: (launch(kernel, numbers()), set_patience(step, TIMEOUT_S)), mode="online")
        step()
        set_patience(step, 0.5)  # of run 1, not of the exchange behind it
        end = ending(step)
        run_until_settled(step)
        return end, only(step.report).status

    results = run_ranks(program, 2)
    for rank, (end, status) in enumerate(assert_all_ok(results)):
        assert end.startswith("returned")
        assert status == "tuned"
        assert f"Rank {rank} has been in run 1 of" in results[rank].stderr
        assert "with BLOCK: 32" in results[rank].stderr


# ---- a launch that the device never ends


def on_device(
    device: FakeDevice, ms: Callable[[int], float], *, is_dist: bool = False, **options: Any
) -> Any:
    """Return a tuned function of two kernels; launches of the first take `ms` of the device, by BLOCK."""
    bench = Bench()
    first = bench.kernel(dict.fromkeys((16, 32), lambda made: device.launch(ms(made.block)) or 0.0))
    second = bench.kernel(dict.fromkeys((16, 32), lambda made: device.launch(0.01) or 0.0), double)

    def step() -> Any:
        y = launch(first, numbers())
        launch(second, numbers())
        return y

    decorate = tune if is_dist else lambda bench, thunk, **chosen: bench.tune(thunk, **chosen)
    clock = EventClock(timeout_s=0.5)
    return decorate(bench, step, **{"clock": clock, "cache": False, "name": "step", **options})


def assert_named(text: str, *, rank: int = 0, config: str = "BLOCK: 32") -> None:
    assert f"Rank {rank}: run 1 of step: " in text
    assert f"add[64, float32, float32] with {config}" in text
    assert f"{Path('.autotune_logs').absolute()}/rank-{rank}.log" in text


def test_a_launch_that_never_ends_ends_the_call_and_names_the_one_that_runs(monkeypatch):
    device = FakeDevice().install(monkeypatch)
    hangs = [True]
    tuned = on_device(device, lambda block: NEVER_MS if block == 32 and hangs else 0.01)
    with pytest.raises(LaunchTimeout) as caught:
        tuned()
    text = str(caught.value)
    assert_named(text)
    assert "double" not in text  # it waits behind the first
    assert "cuda:0 did not end a launch within 0.5 s" in text
    assert "end the process" in text
    assert isinstance(caught.value, TimeoutError)
    assert (is_outside(), is_tuning(), tuned.settled) == (True, False, False)
    (failed,) = records(RunFailed)
    assert "add[64, float32, float32] with BLOCK: 32" in failed.error
    assert records(SessionClosed)[-1].outcome == "LaunchTimeout"
    hangs.clear()
    device.idle_ms = device.host_ms
    assert torch.equal(tuned(), numbers() + 1)  # a session of its own, from the start
    assert tuned.settled


def test_online_a_launch_that_is_overdue_ends_the_call_and_is_named(monkeypatch):
    device = FakeDevice().install(monkeypatch)
    hangs = [True]
    tuned = on_device(device, lambda block: NEVER_MS if block == 32 and hangs else 0.01, mode="online")
    ends: list[str] = []
    while len(ends) < 100 and not (ends and ends[-1].startswith("LaunchTimeout")):
        ends.append(ending(tuned))
        device.pass_ms(100.0)
    assert 1 + READ_WITHIN_RUNS <= len(ends) < 10  # the incumbent ran meanwhile, before it was waited for
    text = ends[-1]
    assert "add[64, float32, float32] with BLOCK: 32" in text
    assert "double" not in text
    hangs.clear()
    device.idle_ms = device.host_ms
    while not tuned.settled:
        tuned()
        device.pass_ms(1.0)


def test_peers_of_a_rank_whose_launch_never_ends_learn_its_name(quick_heartbeats):
    def program(rank):
        device = FakeDevice().install(pytest.MonkeyPatch())
        hangs = [True]
        step = on_device(
            device, lambda block: NEVER_MS if rank == 1 and block == 32 and hangs else 0.01, is_dist=True
        )
        end = ending(step)
        assert (is_outside(), is_tuning()) == (True, False)
        hangs.clear()
        device.idle_ms = device.host_ms
        return end, ending(step).partition("(")[0]

    (zero, after_zero), (one, after_one) = assert_all_ok(run_ranks(program, 2))
    assert one.startswith("LaunchTimeout: ")
    assert_named(one, rank=1)
    assert zero.startswith("PeerFailed: rank 1 failed, so this call ends on rank 0 too: LaunchTimeout: ")
    assert_named(zero, rank=1)
    assert (after_zero, after_one) == ("returned tensor", "returned tensor")


# ---- an error that the device reports


def broken_at(device: FakeDevice, kind: type[BaseException], block: int) -> Callable[[int], float]:
    def ms(launched: int) -> float:
        if launched == block:
            device.breaks_ms, device.trouble = device.host_ms + 0.2, lambda: kind(ILLEGAL)
        return 0.5

    return ms


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError], ids=lambda kind: kind.__name__)
def test_an_error_of_the_device_found_at_the_end_of_a_run_names_what_was_launched(monkeypatch, kind):
    device = FakeDevice().install(monkeypatch)
    tuned = on_device(device, broken_at(device, kind, 32))
    with pytest.raises(kind) as caught:
        tuned()
    text = str(caught.value)
    assert isinstance(caught.value, LaunchFailed)
    assert isinstance(caught.value, TuningError)
    assert type(caught.value.__cause__) is kind
    assert caught.value.__cause__.args == (ILLEGAL,)
    assert_named(text)
    assert f"cuda:0 reports {kind.__name__}: CUDA error: an illegal memory access was encountered." in text
    assert "double[64, float32, float32] with BLOCK: 32" in text
    assert "start it again" in text
    assert (is_outside(), is_tuning(), tuned.settled) == (True, False, False)
    assert_named(records(RunFailed)[-1].error + f"{Path('.autotune_logs').absolute()}/rank-0.log")


def test_an_error_of_the_device_that_the_function_raises_is_left_alone_and_told_elsewhere(quick_heartbeats):
    error = torch.AcceleratorError(ILLEGAL)

    def program(rank):
        bench, runs = Bench(), []
        kernel = bench.kernel({16: 1.0, 32: 1.0})

        def step():
            runs.append(None)
            y = launch(kernel, numbers())
            if rank == 1 and len(runs) == 2:
                raise error
            return y

        tuned = tune(bench, step, name="step")
        with pytest.raises((torch.AcceleratorError, PeerFailed)) as caught:
            tuned()
        if rank == 1:
            assert caught.value is error
            assert error.args == (ILLEGAL,)
            assert error.__cause__ is None
            assert not hasattr(error, "__notes__")
            notes = [record.text for record in records(Note, rank=1)]
            assert any("with BLOCK: 32" in text for text in notes)
        return str(caught.value)

    results = run_ranks(program, 2)
    zero, _ = assert_all_ok(results)
    assert "Rank 1: run 1 of step: raised AcceleratorError: CUDA error: an illegal memory access" in zero
    assert "add[64, float32, float32] with BLOCK: 32" in zero
    assert "with BLOCK: 32" in results[1].stderr


def test_online_an_error_of_the_device_names_settled_kernels_where_nothing_else_was_launched(bench, capsys):
    kernel = bench.kernel({16: 1.0, 32: 3.0})
    other = bench.kernel(dict.fromkeys((16, 32, 64, 128), 1.0), double)

    def step():
        launch(kernel, numbers())
        if len(bench.blocks("double")) == 3:
            raise torch.AcceleratorError(ILLEGAL)
        launch(other, numbers())

    tuned = bench.tune(step, mode="online")
    assert [ending(tuned).partition(":")[0] for _ in range(4)] == ["returned None"] * 3 + ["AcceleratorError"]
    assert "This run had launched: add with a settled config. " in capsys.readouterr().err
