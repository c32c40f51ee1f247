"""What the CUDA backends share: streams, copies by the copy engine and stream memory operations."""

from __future__ import annotations

from typing import Any

import torch

from .base import SideStream, SymmetricMemory, SymmetricTensor
from .ranks import RankGroup, SymmetricMemoryError

GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ
WITH_BARRIER = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: a system-scope barrier comes before the write


# What was abandoned. Streams, a peer's among them, may still write there: it is never used for anything else.
_abandoned: list[SymmetricTensor] = []


class CudaStream:
    """A high-priority stream, ordered against the caller's current stream by events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority, or its copies could queue behind those of the stream it is to overtake.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()
        self.handle = self._stream.cuda_stream

    def fork(self) -> None:
        self._forked.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forked)

    def join(self) -> None:
        self._joined.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._joined)


class CudaMemory(SymmetricMemory):
    """Peer memory that this GPU's copy engines, streams and kernels reach directly.

    None of `copy`, `write_signal` and `wait_signal` needs an SM, so they make progress beside a kernel
    that holds all of them. (Measured on an H200, driver 580: copies between GPUs, write-value and
    memset run then; any kernel, a one-block one included, does not.)
    """

    def __init__(self, ranks: RankGroup, device: torch.device, reason: str) -> None:
        super().__init__(ranks, device, reason)
        self._driver = _load_driver()

    def side_stream(self) -> CudaStream:
        self._check_open()
        return CudaStream(self.device)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: SideStream) -> None:
        # The driver's call, not Tensor.copy_: no stream guard and no dispatch, microseconds for each peer.
        size = dst.numel() * dst.element_size()
        self._succeed(self._driver.cuMemcpyAsync(dst.data_ptr(), src.data_ptr(), size, _handle(stream)))

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

    def abandon(self) -> None:
        if not self._is_closed:
            _abandoned.extend(self._allocations)
        super().abandon()

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def _succeed(self, result: tuple[Any, ...]) -> None:
        if result[0] != 0:
            raise SymmetricMemoryError(f"{self._ranks}, {self.device}: the CUDA driver reports {result[0]!r}")


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
