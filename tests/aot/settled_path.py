"""A device that compiles and does not run, for tests of the short way to kernels in plain Triton."""

from __future__ import annotations

import hashlib
import math
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import triton
from launch_path import leave_out_machine_code
from triton.compiler.compiler import LazyDict
from triton.runtime import _allocation
from triton.runtime.driver import driver

from benchmarks.common.pretended_device import PretendedDevice
from dist_autotune.kernels import launch as launches
from dist_autotune.kernels.launch import SettledLaunches

BEHIND_ARGUMENTS_OF_TRITON = 9  # grid, stream, function, metadata and hooks are in front of the kernel's own


class Launched(NamedTuple):
    """What the launcher was given, tensors as addresses; and the bytes of scratch that it asked for."""

    received: tuple[Any, ...]
    scratch_bytes: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.received[BEHIND_ARGUMENTS_OF_TRITON:]


class LaunchingDevice(PretendedDevice):
    """A Hopper GPU whose launcher calls hooks and asks for scratch memory as the one for CUDA does.

    A function's handle is the digest of its code, so that two kernels are one only if they are the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launched] = []
        self.allocated: list[tuple[int, int, int]] = []  # bytes, alignment and stream, of the operation
        self.stream = 0
        self.writes_down = True  # else a launcher returns at once, for timing what is above it
        properties = self.utils.get_device_properties
        self.utils = types.SimpleNamespace(
            get_device_properties=properties,
            load_binary=lambda name, code, *args: (name, hashlib.sha256(code).hexdigest(), 32, 0, 1024),
            unload_module=lambda *args: None,
        )

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*received: Any) -> None:
            if not self.writes_down:
                return
            metadata_for_hooks, enter, leave = received[6:9]
            enter(metadata_for_hooks)
            count, size = received[0] * received[1] * received[2], metadata.global_scratch_size
            if size:
                allocate = _allocation._allocator.get()
                allocate(count * size, metadata.global_scratch_align, received[3])
            self.launches.append(Launched(tuple(map(_plain, received)), count * size))
            leave(metadata_for_hooks)

        return launch


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value.get() if isinstance(value, LazyDict) else value  # what launch hooks are told


def matrix(rows: int, columns: int, dtype: torch.dtype, pad: int = 0, shift: int = 0) -> torch.Tensor:
    """Return a matrix whose rows are `pad` elements apart, `shift` elements behind an aligned address."""
    pitch = columns + pad
    room = torch.zeros(rows * pitch + shift, dtype=dtype)
    assert room.data_ptr() % 16 == 0
    return room.as_strided((rows, columns), (pitch, 1), shift)


def launched(device: LaunchingDevice, call: Callable[[], None]) -> Launched:
    """Return the one launch of a call."""
    before = len(device.launches)
    call()
    (made,) = device.launches[before:]
    return made


def microseconds(call: Callable[[], None]) -> float:
    """Return the microseconds of one call, the best of seven bursts."""
    best_us = math.inf
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(300):
            call()
        best_us = min(best_us, (time.perf_counter() - begin) / 300 * 1e6)
    return best_us


@contextmanager
def launching(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, tuner: Any, configs: list[triton.Config]
) -> Iterator[LaunchingDevice]:
    """Make it the device of `tuner`, with these configs only; `owner` has its settled launches as `name`."""
    made = LaunchingDevice()
    monkeypatch.setattr(driver, "_active", made)
    leave_out_machine_code(monkeypatch)
    monkeypatch.setattr(owner, name, SettledLaunches(tuner, lambda constants: {}))
    monkeypatch.setattr(launches, "_allocate_scratch", lambda *asked: made.allocated.append(asked))
    monkeypatch.setattr(tuner, "configs", configs)
    monkeypatch.setattr(tuner, "cache", {})
    caches = (triton.compiler.compiler.max_shared_mem.cache_clear, tuner.fn.device_caches.clear)
    for clear in caches:
        clear()
    yield made
    for clear in caches:
        clear()


def allocator_of_the_caller() -> Any:
    """Return what makes scratch memory for launches of the caller's own."""
    return _allocation._allocator.get()
