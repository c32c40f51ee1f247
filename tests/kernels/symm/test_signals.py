"""That waits wait, end, and say why; that epochs may wrap."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import triton
import triton.language as tl

from dist_autotune.kernels.signals import (
    GIVEN_UP,
    Failure,
    read_failure,
    wait_until,
)

FOREVER = 2**31 - 1
LAST_EPOCH, FIRST_EPOCH = 2**31 - 1, -(2**31)  # of an int32 that wraps around


@triton.jit
def wait_and_tell(signal_ptr, data_ptr, out_ptr, error_ptr, epoch, patience_ticks, KIND: tl.constexpr):
    reached = wait_until(signal_ptr, epoch, error_ptr, KIND, patience_ticks)
    tl.store(out_ptr, tl.load(data_ptr))
    tl.store(out_ptr + 1, reached.to(tl.int32))


class Words:
    """The memory of one waiting kernel."""

    def __init__(self, signal: int = 0) -> None:
        self.signal = torch.tensor([signal], dtype=torch.int32)
        self.data = torch.zeros(1, dtype=torch.int32)
        self.out = torch.zeros(2, dtype=torch.int32)
        self.error = torch.zeros(1, dtype=torch.int64)

    def wait(self, epoch: int, patience_ticks: int = FOREVER, kind: int = 1) -> bool:
        wait_and_tell[(1,)](self.signal, self.data, self.out, self.error, epoch, patience_ticks, KIND=kind)
        return bool(self.out[1])

    @property
    def failure(self) -> Failure | None:
        return read_failure(int(self.error))


def test_a_wait_sees_what_was_written_before_the_signal():
    words = Words(signal=4)

    def write_late():
        time.sleep(0.1)  # on purpose: the kernel is to find the signal unset
        words.data.fill_(7)
        words.signal.fill_(5)

    writer = threading.Thread(target=write_late)
    writer.start()
    assert words.wait(5)
    writer.join()
    assert int(words.out[0]) == 7


def test_the_end_of_patience_is_recorded_with_kind_epoch_and_what_was_seen():
    words = Words(signal=4)
    assert not words.wait(5, patience_ticks=2, kind=3)
    assert words.failure == Failure(kind=3, epoch=5, seen=4)


def test_nobody_waits_again_for_a_signal_that_was_given_up():
    words = Words(signal=4)
    words.wait(5, patience_ticks=2)
    words.error.zero_()
    assert int(words.signal) == 5 + GIVEN_UP.value
    assert words.wait(5, patience_ticks=0)
    assert words.wait(1000, patience_ticks=0)
    assert words.failure is None


@pytest.mark.parametrize(
    ("signal", "epoch", "reached"),
    [
        pytest.param(LAST_EPOCH, FIRST_EPOCH, False, id="not yet around"),
        pytest.param(FIRST_EPOCH, LAST_EPOCH, True, id="one further"),
        pytest.param(FIRST_EPOCH, FIRST_EPOCH, True, id="just around"),
    ],
)
def test_epochs_compare_across_the_end_of_int32(signal, epoch, reached):
    assert Words(signal).wait(epoch, patience_ticks=1) is reached
