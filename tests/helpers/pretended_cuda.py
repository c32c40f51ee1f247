"""A GPU whose driver remembers what it is asked; nothing is copied."""

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from dist_autotune.kernels.agreement import ballots
from dist_autotune.kernels.exchange import calls, operation
from dist_autotune.kernels.gemm import launch as gemm_launch
from dist_autotune.kernels.launches.settled import TunedLaunch
from dist_autotune.kernels.symm import SymmetricMemoryError, SymmetricTensor, cuda
from dist_autotune.kernels.symm.ranks import SharingRanks

NON_BLOCKING, LOWEST, HIGHEST = 1, 0, -5
CALLER = 1  # the handle of the caller's stream


class Signal:
    """The driver's form of a write or a wait."""

    def __init__(self) -> None:
        self.writeValue, self.waitValue = types.SimpleNamespace(), types.SimpleNamespace()


class PretendedDriver:
    """Answers what the memory asks of CUDA's driver and remembers it."""

    CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=NON_BLOCKING)
    CUdeviceptr = CUstream = CUevent = int
    CUstreamBatchMemOpParams = Signal
    CUstreamBatchMemOpType = types.SimpleNamespace(
        CU_STREAM_MEM_OP_WRITE_VALUE_32="write", CU_STREAM_MEM_OP_WAIT_VALUE_32="wait"
    )

    def __init__(self) -> None:
        self.made: dict[int, tuple[int, int]] = {}  # by handle: flags and priority
        self.destroyed: list[int] = []
        self._handles = itertools.count(7000)

    def cuCtxGetStreamPriorityRange(self):
        return 0, LOWEST, HIGHEST

    def cuStreamCreateWithPriority(self, flags, priority):
        handle = next(self._handles)
        self.made[handle] = (flags, priority)
        return 0, handle

    def cuStreamDestroy(self, stream):
        self.destroyed.append(stream)
        return (0,)

    def __getattr__(self, name):
        return lambda *_: (0,)


class PretendedMemory(cuda.CudaMemory):
    name = "pretended"

    def __init__(self) -> None:
        super().__init__(SharingRanks(), torch.device("cpu"), "a test")

    def _map(self, shape, dtype):
        alone = torch.zeros(shape, dtype=dtype)
        return SymmetricTensor(alone, (alone,))

    def _release(self):
        """Nothing to do."""

    def _synchronize(self):
        """Nothing to do."""


class Gpu(str):
    """A device that torch takes for the CPU, and an operation for a GPU."""

    __slots__ = ()
    type, index = "cuda", 0

    def __eq__(self, other: object) -> bool:
        return str(other) == "cpu"

    def __ne__(self, other: object) -> bool:
        return str(other) != "cpu"

    __hash__ = str.__hash__


class MemoryOfGpus(PretendedMemory):
    """Memory of rank 0 of some, which hears nothing of its peers."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world_size, self.device = world, Gpu("cpu")

    def _map(self, shape, dtype):
        ranks = tuple(torch.zeros(shape, dtype=dtype) for _ in range(self.world_size))
        return SymmetricTensor(ranks[0], ranks)


def install(monkeypatch: pytest.MonkeyPatch, driver: PretendedDriver) -> None:
    """Put the driver, and events and streams without a GPU, in the place of CUDA's."""
    events = itertools.count(9000)
    done = types.SimpleNamespace(query=lambda: True)
    stream = types.SimpleNamespace(query=lambda: True, record_event=lambda: done)

    def event(**_: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(record=lambda stream: None, cuda_event=next(events))

    monkeypatch.setattr(cuda, "_load_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: stream)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(
        torch.cuda,
        "ExternalStream",
        lambda handle, device: types.SimpleNamespace(cuda_stream=handle, **vars(stream)),
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: CALLER, raising=False)
    monkeypatch.setattr(cuda, "_abandoned", [])
    monkeypatch.setattr(cuda, "_abandoned_streams", [])


def install_for_operations(monkeypatch: pytest.MonkeyPatch, driver: PretendedDriver, world: int) -> None:
    """Let operations open for rank 0 of `world` GPUs that run no kernel; the warp-specialised ones can."""
    monkeypatch.setattr(calls, "_OPEN", weakref.WeakSet())  # later tests ask none of these operations
    monkeypatch.setattr(calls, "_LEFT", [])
    install(monkeypatch, driver)
    zeros, nothing = torch.zeros, lambda *_, **__: None

    def unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*size, **options)

    def without_hosts(*_: Any, **__: Any) -> None:
        raise SymmetricMemoryError("a test")

    properties = types.SimpleNamespace(multi_processor_count=4, major=9, minor=0)
    changes: dict[Any, dict[str, Callable[..., Any]]] = {
        operation: {"open_symmetric_memory": lambda *_, **__: MemoryOfGpus(world)},
        ballots: {"open_symmetric_memory": without_hosts},
        torch: {"zeros": unpinned},
        torch.cuda: {
            "get_device_properties": lambda device: properties,
            "is_current_stream_capturing": lambda: False,
            "synchronize": nothing,
        },
        gemm_launch: {"capability": lambda device: 9},
        TunedLaunch: {"__call__": nothing, "load": nothing},
        GridExecutor: {"__call__": nothing},
    }
    for owner, values in changes.items():
        for name, value in values.items():
            monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
