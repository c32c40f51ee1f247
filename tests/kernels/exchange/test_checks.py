"""That failures of calls are raised before a step takes their results, and that checks and calls end."""

import contextlib
import gc
import itertools
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
from dense_runs import SCATTERING_SUMS
from operation_runs import message_of, on_ranks
from operations import factors
from pretended_cuda import PretendedDriver, install_for_operations

from dist_autotune import StepTuner
from dist_autotune.kernels.agreement.errors import PeerTimeout
from dist_autotune.kernels.exchange.flags import NO_PERMIT
from dist_autotune.kernels.exchange.streams import StreamOrder
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.signals import as_patience
from dist_autotune.kernels.symm import cuda
from dist_autotune.kernels.tp import check_calls
from dist_autotune.script.boundaries import OptimizerSteps
from ranks import meet


@contextlib.contextmanager
def stepping(how):
    if how == "StepTuner":
        warnings.simplefilter("ignore")  # each rank tunes alone: one comes to a step that the other misses
        with StepTuner(cache=False, log_dir=None, progress=False).step():
            yield
    else:
        with OptimizerSteps().watched(lambda: None):
            yield


@pytest.mark.parametrize("how", ["StepTuner", "run"])
@on_ranks(2)
def test_an_optimizer_takes_no_result_without_a_peer(rank, how):
    SCATTERING_SUMS.begin(rank)
    op = GemmReduceScatter(16, 24, torch.float16)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with stepping(how):
        op(*factors(16, 24, 16, torch.float16))
        optimizer.step()
    meet()
    if rank == 0:
        op._patience_ticks = as_patience(0.5)
        message_of(lambda: op(*factors(16, 24, 16, torch.float16)))
        with contextlib.suppress(TimeoutError), stepping(how):
            text = message_of(optimizer.step)
        for told in (text, message_of(check_calls)):
            assert told.startswith("PeerTimeout: GemmReduceScatter, rank 0: rank 1")
        assert weight.tolist() == [-1.0, -1.0]
    meet()
    op.abandon()
    check_calls()  # what is closed is not asked


class Streams:
    """Streams of a device that there is not: what is ordered behind what."""

    def __init__(self, monkeypatch):
        self.now, self.capturing, self.waits = 1, set(), []
        new = itertools.count(100)  # what torch makes of the default stream's handle
        for name, stand_in in {
            "is_current_stream_capturing": lambda: self.now in self.capturing,
            "current_stream": lambda device=None: self.stream(self.now),
            "ExternalStream": lambda number, device: self.stream(number or next(new)),
            "stream": self.made_current,
            "Event": self.event,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.now, raising=False)

    @contextlib.contextmanager
    def made_current(self, stream):
        before, self.now = self.now, stream.cuda_stream
        yield
        self.now = before

    def stream(self, number):
        wait = lambda event: self.waits.append((number, event.on))  # noqa: E731
        return SimpleNamespace(cuda_stream=number, wait_event=wait)

    def event(self):
        event = SimpleNamespace(on=None)
        event.record = lambda: vars(event).update(on=self.now)
        return event


def test_a_call_on_another_stream_waits_on_the_device_for_the_last_one(monkeypatch):
    streams, order = Streams(monkeypatch), StreamOrder()

    def call(stream):
        streams.now = stream
        order.follow(torch.device("cuda", 0), is_capturing=stream in streams.capturing)
        made, streams.waits = streams.waits, []
        return made

    assert [call(stream) for stream in (0, 0, 2, 2, 0, 1)] == [[], [], [(2, 0)], [], [(0, 2)], [(1, 0)]]
    streams.capturing = {3, 4}
    assert [call(stream) for stream in (3, 4)] == [[], [(4, 3)]], "two streams of one capture"
    streams.capturing = {5}
    assert call(5) == [], "another capture, which may not wait for what is outside"
    assert call(2) == [(2, 1)], "eager calls among themselves"


def test_a_check_ends_once_a_call_has_failed_though_the_device_does_not(monkeypatch):
    install_for_operations(monkeypatch, PretendedDriver(), 2)
    with GemmReduceScatter(16, 24, torch.float16, timeout_s=0.1, collective=False) as op:
        done, polls = iter([False, False, True]), []
        monkeypatch.setattr(op._memory, "mark", lambda: lambda: polls.append(0) or next(done))
        op.check()
        assert len(polls) == 3  # as long as no call has failed it waits for the device
        monkeypatch.setattr(op._memory, "mark", lambda: lambda: False)
        op._failures.words[1] = NO_PERMIT.value << 60
        for end in (op.check, check_calls, op.close):
            began = time.monotonic()
            with pytest.raises(PeerTimeout, match="rank 0: rank 1, or one that it waits for"):
                end()
            assert 2 * 2 * 0.1 <= time.monotonic() - began < 30


def test_a_check_ends_where_a_call_was_not_carried_out_and_the_device_does_not(monkeypatch):
    """Let no kernel be launched beside what waits for a peer that does not come: nobody gives it up."""
    install_for_operations(monkeypatch, PretendedDriver(), 2)
    op = GemmReduceScatter(16, 24, torch.float16, timeout_s=0.1, collective=False)
    began = time.monotonic()
    monkeypatch.setattr(op._memory, "mark", lambda: lambda: time.monotonic() > began + 30)
    op.refuse("call 1 was not carried out")
    with pytest.raises(RuntimeError, match="GemmReduceScatter, rank 0: call 1 was not carried out"):
        op.close()
    assert 2 * 2 * 0.1 <= time.monotonic() - began < 30


ENDS = {
    "open": lambda operations: None,
    "closed": lambda operations: operations[0].abandon(),
    "dropped": lambda operations: operations.clear(),
}


@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("end", ENDS)
def test_a_check_of_another_operation_ends_too(monkeypatch, end, fails):
    install_for_operations(monkeypatch, PretendedDriver(), 2)
    sizes = (16, 24, torch.float16)
    operations = [GemmReduceScatter(*sizes, timeout_s=0.1, collective=False)]
    memory, errors = operations[0]._memory, operations[0]._failures.words
    is_stuck, began = True, time.monotonic()
    monkeypatch.setattr(memory, "mark", lambda: lambda: not is_stuck or time.monotonic() > began + 30)
    with GemmReduceScatter(*sizes, timeout_s=0.1, collective=False) as op:
        if fails == "before":
            errors[1] = NO_PERMIT.value << 60
        ENDS[end](operations)
        gc.collect()
        errors[1] = NO_PERMIT.value << 60
        text = (
            "rank 0: rank 1, or one that it waits for" if end == "open" else "of an operation that is closed"
        )
        for check in (op.check, check_calls):
            with pytest.raises(TimeoutError, match=text):
                check()
        assert 2 * 2 * 2 * 0.1 <= time.monotonic() - began < 30
        is_stuck = False
        op.check()
    for each in operations:
        each.abandon()


def test_an_operation_that_is_dropped_keeps_its_memory_where_kernels_may_still_run(monkeypatch):
    install_for_operations(monkeypatch, PretendedDriver(), 2)
    op = GemmReduceScatter(16, 24, torch.float16, collective=False)
    kept = {id(op._flags), id(op._held.partial)}
    del op
    gc.collect()
    assert kept <= {*map(id, cuda._abandoned)}


@pytest.mark.parametrize(
    ("name", "value", "in_steps"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("LD_PRELOAD", "/usr/lib/libsanitizer-collection.so", True),
    ],
)
def test_where_launches_block_no_kernel_waits_for_a_push_behind_it(monkeypatch, name, value, in_steps):
    monkeypatch.setenv(name, value)
    install_for_operations(monkeypatch, PretendedDriver(), 2)
    with GemmReduceScatter(16, 24, torch.float16, collective=False) as op:
        assert op._in_steps(is_capturing=False) is in_steps  # each push is enqueued behind its chunk's launch
