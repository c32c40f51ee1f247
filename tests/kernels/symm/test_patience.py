"""How long a wait on the device lasts: the source of `poll_until` in the model, and seconds on a GPU."""

from __future__ import annotations

import time

import gluon_model
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from gluon_instructions import TURN_NS
from gluon_machine import machine
from gluon_memory import Pointer
from operation_runs import on_ranks

from dist_autotune.kernels.signals import as_patience, poll_until

SIGNALS = gluon_model.load_kernel_module("signals")
ROUND, MOST_ROUNDS_PER_TICK = SIGNALS.POLLS_PER_ROUND, SIGNALS.MOST_ROUNDS_PER_TICK
TURNS_PER_TICK = 2**20 / TURN_NS


class Wait:
    """A wait of one warp for a word to become 5, in the model, where a poll is a turn."""

    def __init__(self, *, patience_ticks: int, comes_at_poll: int = -1) -> None:
        self.polls, self.readings = 0, 0
        self._word, self._comes_at_poll = Pointer(np.zeros(1, dtype=np.int64)), comes_at_poll
        with pytest.MonkeyPatch.context() as monkeypatch:
            self._load, self._clock = SIGNALS.tl.atomic_add, SIGNALS.ticks
            monkeypatch.setattr(SIGNALS.tl, "atomic_add", self._poll)
            monkeypatch.setattr(SIGNALS, "ticks", self._read)
            gluon_model.launch(lambda: self._run(patience_ticks), 1, seed=0, warps=1)

    def _run(self, patience_ticks: int) -> None:
        began = machine().turns
        self.value = int(SIGNALS.poll_until(self._word, 5, patience_ticks, False))
        self.lasted_ticks = (machine().turns - began) / TURNS_PER_TICK

    def _poll(self, *args, **options):
        self.polls += 1
        if self.polls == self._comes_at_poll:
            self._word.set(5)
        return self._load(*args, **options)

    def _read(self):
        self.readings += 1
        return self._clock()


@pytest.mark.parametrize("poll", [1, 2, ROUND])
def test_the_clock_is_not_read_before_a_round_of_polls_has_failed(poll):
    wait = Wait(patience_ticks=1000, comes_at_poll=poll)
    assert (wait.value, wait.polls, wait.readings) == (5, poll, 0)


@pytest.mark.parametrize("patience_ticks", [1, 20, 150])
def test_patience_ends_by_the_clock_and_never_early(patience_ticks):
    wait = Wait(patience_ticks=patience_ticks)
    assert wait.value == 0
    # Two rounds of polls, the first of them before the clock is read, and the part of a tick cut off.
    assert patience_ticks <= wait.lasted_ticks < patience_ticks + 2 * ROUND / TURNS_PER_TICK + 2
    assert wait.readings == wait.polls // ROUND


# ---- on a GPU


@triton.jit
def poll_alone(signal_ptr, seen_ptr, patience_ticks):
    """Each program waits for itself: nobody lets the others pass."""
    tl.store(seen_ptr + tl.program_id(0), poll_until(signal_ptr, 5, patience_ticks, False))


class Clock:
    """Seconds until the device has done what is launched inside."""

    def __enter__(self) -> Clock:
        torch.cuda.synchronize()
        self._began = time.monotonic()
        return self

    def __exit__(self, *exception: object) -> None:
        torch.cuda.synchronize()
        self.took_s = time.monotonic() - self._began


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("programs", [1, 132])
@on_ranks(1, init="none", timeout_s=60.0)
def test_a_wait_for_what_never_comes_lasts_as_long_as_was_said(rank, programs, warps):
    signal = torch.zeros(1, dtype=torch.int32, device="cuda")
    seen = torch.zeros(programs, dtype=torch.int32, device="cuda")
    poll_alone[(programs,)](signal, seen, as_patience(0.001), num_warps=warps)  # compiles
    with Clock() as clock:
        poll_alone[(programs,)](signal, seen, as_patience(2.0), num_warps=warps)
    assert 2.0 <= clock.took_s <= 1.3 * 2.0 + 1
    assert not seen.any()


@pytest.mark.gpu
@on_ranks(1, init="none", timeout_s=60.0)
def test_what_comes_after_the_clock_was_read_still_ends_the_wait(rank):
    signal = torch.zeros(1, dtype=torch.int32, device="cuda")
    seen = torch.zeros(132, dtype=torch.int32, device="cuda")
    poll_alone[(132,)](signal, seen, as_patience(0.001))
    five = torch.full((1,), 5, dtype=torch.int32, pin_memory=True)
    other = torch.cuda.Stream()
    with Clock() as clock:
        poll_alone[(132,)](signal, seen, as_patience(30.0))
        time.sleep(1.0)  # on purpose: the clock is read many times before the signal comes
        with torch.cuda.stream(other):
            signal.copy_(five, non_blocking=True)
    assert (seen == 5).all()
    assert 1.0 <= clock.took_s < 20.0
