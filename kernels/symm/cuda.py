"""Base of the CUDA backends: streams, copies by the copy engine, stream memory operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .base import Copy, Lowered, SideStream, Step, SymmetricMemory, SymmetricTensor, Wait, Write
from .ranks import SharingRanks, SymmetricMemoryError

GREATER_OR_EQUAL, EQUAL = 0, 1  # CU_STREAM_WAIT_VALUE_GEQ and _EQ
BATCH = 255  # operations that one cuStreamBatchMemOp takes
KEPT = 512  # handles of one kind
WITH_BARRIER = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: a system-scope barrier comes before the write


# Abandoned memory is never given back: kernels and streams, also of peers, may still write to it.
_abandoned: list[SymmetricTensor | torch.Tensor] = []
_abandoned_streams: list[CudaStream] = []


class CudaStream:
    """A high-priority stream of its own, ordered against the caller's current stream by events.

    Not one of torch's, which hands out 32 in turn: another user's work on it, such as a collective that waits
    for SMs, could come before copies for which our kernel waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, _load_driver()
        self.handle = _new_stream(self._driver, device)
        self._stream = torch.cuda.ExternalStream(self.handle, device)
        self._events = torch.cuda.Event(), torch.cuda.Event()
        for event in self._events:
            event.record(self._stream)  # which makes its handle
        # Of a number the binding makes a handle in each call.
        self._forked, self._joined = (self._driver.CUevent(event.cuda_event) for event in self._events)
        self._side = self._driver.CUstream(self.handle)

    def close(self) -> None:
        """Destroy the stream, on which nothing may be enqueued any more; a second call does nothing."""
        handle, self.handle = self.handle, 0
        if handle:
            _check(self._driver.cuStreamDestroy(handle), self._device)

    def fork(self) -> None:
        self._order(self._forked, torch._C._cuda_getCurrentRawStream(self._device.index), self._side)

    def join(self) -> None:
        self._order(self._joined, self._side, torch._C._cuda_getCurrentRawStream(self._device.index))

    def _order(self, event: Any, first: Any, then: Any) -> None:
        # The driver's calls, not torch's: no device guard and no stream objects, microseconds in each call.
        recorded = self._driver.cuEventRecord(event, first)
        waited = self._driver.cuStreamWaitEvent(then, event, 0)
        if recorded[0] != 0 or waited[0] != 0:
            _check(recorded, self._device)
            _check(waited, self._device)


class _Handles:
    """Handles of the binding by their numbers: of a number it makes one in each call, which takes 0.7 us."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def of(self, kind: Callable[[int], Any], number: int) -> Any:
        """Return the handle; with more of them than layers have, all are made anew."""
        found = self._known.get(number)
        if found is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            found = self._known[number] = kind(number)
        return found


class CudaMemory(SymmetricMemory):
    """Peer memory that this GPU's copy engines, streams and kernels reach directly.

    None of `copy`, `write_signal` and `wait_signal` needs an SM, so they make progress beside a kernel
    that holds all of them (measured on an H200, driver 580).
    """

    def __init__(self, ranks: SharingRanks, device: torch.device, reason: str) -> None:
        super().__init__(ranks, device, reason)
        self._driver = _load_driver()
        self._streams: list[CudaStream] = []
        self._handles = _Handles()

    def side_stream(self) -> CudaStream:
        self._check_open()
        stream = CudaStream(self.device)
        self._streams.append(stream)
        return stream

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: SideStream) -> None:
        self._copy_bytes(*_extent(dst, src), _handle(stream))

    def prepare_copy_here(self, dst: torch.Tensor) -> Callable[[torch.Tensor], None]:
        address, places = self._driver.CUdeviceptr, _Handles()
        to = address(dst.data_ptr())

        def run(src: torch.Tensor) -> None:
            at = places.of(address, src.data_ptr())
            result = self._driver.cuMemcpyAsync(to, at, src.nbytes, self._here())
            if result[0] != 0:
                self._succeed(result)

        return run

    def mark(self) -> Callable[[], bool]:
        streams = torch.cuda.current_stream(self.device), *(each._stream for each in self._streams)
        events = [stream.record_event() for stream in streams]
        return lambda: all(event.query() for event in events)

    def _here(self) -> Any:
        """Return the caller's current stream."""
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        return self._handles.of(self._driver.CUstream, raw)

    def prepare_here(self, steps: Sequence[Write | Lowered]) -> Callable[[], None]:
        operations = [_operation(self._driver, step) for step in steps]

        def run() -> None:
            result = self._driver.cuStreamBatchMemOp(self._here(), len(operations), operations, 0)
            if result[0] != 0:
                self._succeed(result)

        return run

    def write_signal(self, word: torch.Tensor, value: int, stream: SideStream) -> None:
        value %= 2**32
        self._succeed(
            self._driver.cuStreamWriteValue32(_handle(stream), word.data_ptr(), value, WITH_BARRIER)
        )

    def wait_signal(self, word: torch.Tensor, value: int, stream: SideStream) -> None:
        value %= 2**32
        self._succeed(
            self._driver.cuStreamWaitValue32(_handle(stream), word.data_ptr(), value, GREATER_OR_EQUAL)
        )

    def prepare(self, steps: Sequence[Step], stream: SideStream) -> Callable[[], None]:
        """Return a function that enqueues the steps, with one call of the driver for signals between copies.

        The order and each write's barrier stay. (On an H200 a write and a wait take 1.7 us, else 2.9.)
        """
        handle = self._driver.CUstream(_handle(stream))  # of a number the binding makes one in each call
        calls = [self._prepared(part, handle) for part in _parts(steps)]

        def run() -> None:
            for call, arguments in calls:
                result = call(*arguments)
                if result[0] != 0:
                    self._succeed(result)

        return run

    def _prepared(
        self, part: Copy | list[Write | Wait], handle: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return a call of the driver and its arguments."""
        driver = self._driver
        if isinstance(part, Copy):
            dst, src, size = _extent(part.dst, part.src)
            return driver.cuMemcpyAsync, (driver.CUdeviceptr(dst), driver.CUdeviceptr(src), size, handle)
        operations = [_operation(driver, step) for step in part]
        return driver.cuStreamBatchMemOp, (handle, len(operations), operations, 0)

    def _copy_bytes(self, dst: Any, src: Any, size: int, handle: Any) -> None:
        # The driver's call, not Tensor.copy_: no stream guard and no dispatch, microseconds for each peer.
        result = self._driver.cuMemcpyAsync(dst, src, size, handle)
        if result[0] != 0:
            self._succeed(result)

    def close(self) -> None:
        if self._is_closed:
            return
        super().close()
        # Streams of abandoned memory stay, and so do the events that they wait for.
        while self._streams:
            self._streams.pop().close()

    def abandon(self) -> None:
        if not self._is_closed:
            _abandoned.extend([*self._allocations, *self._held])
            _abandoned_streams.extend(self._streams)
        super().abandon()

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _succeed(self, result: tuple[Any, ...]) -> None:
        if result[0] != 0:
            _check(result, f"{self._ranks}, {self.device}")


def _new_stream(driver: Any, device: torch.device) -> int:
    """Return a stream of the highest priority, on which no other code of the process enqueues."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the driver's calls below need a context to be current
        lowest, highest = _checked(driver.cuCtxGetStreamPriorityRange(), device)
        assert highest <= lowest
        # At a lower priority its copies could queue after those of the stream it is to overtake.
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        (stream,) = _checked(driver.cuStreamCreateWithPriority(flags, highest), device)
    return int(stream)


def _checked(result: tuple[Any, ...], who: object) -> tuple[Any, ...]:
    """Return the results of the driver's call, after its status."""
    _check(result, who)
    return result[1:]


def _check(result: tuple[Any, ...], who: object) -> None:
    if result[0] != 0:
        raise SymmetricMemoryError(f"{who}: the CUDA driver reports {result[0]!r}")


def _extent(dst: torch.Tensor, src: torch.Tensor) -> tuple[int, int, int]:
    """Return where a copy goes, where it comes from and how many bytes it has."""
    return dst.data_ptr(), src.data_ptr(), src.numel() * src.element_size()


def _parts(steps: Sequence[Step]) -> Iterator[Copy | list[Write | Wait]]:
    """Return copies, and signals in as few batches as the driver takes, in the order of the steps."""
    batch: list[Write | Wait] = []
    for step in steps:
        if batch and (isinstance(step, Copy) or len(batch) == BATCH):
            yield batch
            batch = []
        if isinstance(step, Copy):
            yield step
        else:
            batch.append(step)
    if batch:
        yield batch


def _operation(driver: Any, step: Write | Wait | Lowered) -> Any:
    """Return the driver's form of a step."""
    kinds, made = driver.CUstreamBatchMemOpType, driver.CUstreamBatchMemOpParams()
    value = 0 if isinstance(step, Lowered) else step.value % 2**32
    if isinstance(step, Write):
        kind, operand, flags = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, made.writeValue, WITH_BARRIER
    else:
        kind, operand = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32, made.waitValue
        flags = EQUAL if isinstance(step, Lowered) else GREATER_OR_EQUAL
    made.operation = operand.operation = kind
    operand.address = driver.CUdeviceptr(step.word.data_ptr())
    operand.value, operand.flags = value, flags
    return made


def _handle(stream: SideStream) -> int:
    assert isinstance(stream, CudaStream)
    return int(stream.handle)


def _load_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        what = "stream memory operations need the package cuda-bindings"
        raise SymmetricMemoryError(f"{what} ({error}); install cuda-bindings>=13.0.3") from error
    return driver
