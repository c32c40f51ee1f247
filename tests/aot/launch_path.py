"""A device that compiles and does not run, for tests of the path from a call to a launch."""

import hashlib
import re
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import Language
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import LazyDict
from triton.runtime import _allocation
from triton.runtime.driver import driver

from benchmarks.common.pretended_device import PretendedDevice
from dist_autotune.kernels.exchange import fill_nan
from dist_autotune.kernels.gemm import launch as gemm_launch
from dist_autotune.kernels.launches import loading
from dist_autotune.kernels.launches.settled import BlocksOf, TunedKernel
from dist_autotune.kernels.moe import plan, routing

BEHIND_ARGUMENTS_OF_TRITON = 9  # grid, stream, function, metadata and hooks are in front of the kernel's own
DESCRIPTOR_BYTES = 128
SPOILERS = (
    fill_nan.fill_nan_in_lost_chunks,
    fill_nan.fill_nan_without_peers,
)  # which fill results without a peer
BESIDE = (
    *SPOILERS,
    routing.count_choices,
    routing.place_choices,
)  # kernels that are launched beside a tuned one


class Launched(NamedTuple):
    """What the launcher was given, tensors as addresses; and the bytes of scratch that it asked for."""

    received: tuple[Any, ...]
    scratch_bytes: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.received[:3]

    @property
    def arguments(self) -> list[Any]:
        return list(self.received[BEHIND_ARGUMENTS_OF_TRITON:])


class LaunchingDevice(PretendedDevice):
    """A Hopper GPU whose launcher calls hooks and asks for scratch memory as the one for CUDA does.

    A function's handle is the digest of its code, so that two kernels are one only if they are the same.
    Launches of those BESIDE are not written down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launched] = []
        self.allocated: list[tuple[int, ...]] = []  # bytes, alignment and stream, of the operation
        self.stream = 0
        properties = self.utils.get_device_properties
        self.utils = types.SimpleNamespace(
            get_device_properties=properties,
            load_binary=lambda name, code, *args: (name, hashlib.sha256(code).hexdigest(), 32, 0, 1024),
            unload_module=lambda *args: None,
        )

    def allocate(self, *asked: int) -> None:
        self.allocated.append(asked)

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*received: Any) -> None:
            metadata_for_hooks, enter, leave = received[6:9]
            enter(metadata_for_hooks)
            count, size = received[0] * received[1] * received[2], metadata.global_scratch_size
            if size:
                allocate = _allocation._allocator.get()
                allocate(count * size, metadata.global_scratch_align, received[3])
            self.launches.append(Launched(tuple(map(_plain, received)), count * size))
            leave(metadata_for_hooks)

        return launch if source.fn not in BESIDE else lambda *received: None


def _plain(value: Any) -> Any:
    """Return a tensor as its address, a descriptor as its numbers."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if hasattr(value, "block_shape"):
        return (value.base.data_ptr(), *value.shape, *value.strides, *value.block_shape, repr(value.layout))
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


_WITHOUT_MACHINE_CODE = tempfile.TemporaryDirectory(prefix="without-machine-code-")


def leave_out_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's IR stand for machine code, which takes much longer than all before it and is never run."""
    add_stages = CUDABackend.add_stages

    def add_few(backend: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
        add_stages(backend, stages, options, language)
        if language is Language.TRITON:
            stages["ttgir"] = lambda ir, metadata: metadata.setdefault("tensordesc_meta", []) or ir

        def end(ir: Any, metadata: dict[str, Any]) -> str:
            text = f"{ir}\n{options.num_warps} warps, {options.num_stages} stages"
            metadata["name"] = re.search(r"tt\.func public @(\w+)\(", text)[1]
            metadata |= dict.fromkeys(("shared", "tmem_size", "profile_scratch_size"), 0)
            metadata |= {"global_scratch_size": DESCRIPTOR_BYTES * text.count("tt.make_tensor_descriptor ")}
            metadata |= {"global_scratch_align": DESCRIPTOR_BYTES, "profile_scratch_align": 1}
            return text

        stages["llir"], stages["ptx"] = end, lambda text, metadata: text
        stages["cubin"] = lambda text, metadata: text.encode()

    monkeypatch.setattr(CUDABackend, "add_stages", add_few)
    monkeypatch.setenv("TRITON_CACHE_DIR", _WITHOUT_MACHINE_CODE.name)  # nobody else takes it for real


@contextmanager
def active(
    monkeypatch: pytest.MonkeyPatch, device: PretendedDevice, kernels: Iterable[Any], *untuned: Any
) -> Iterator[None]:
    """Make it this process's device, on which nothing has been compiled or launched."""
    monkeypatch.setattr(driver, "_active", device)
    leave_out_machine_code(monkeypatch)
    for each in (fill_nan._LOST_CHUNKS, fill_nan._ALL, plan._COUNT, plan._PLACE, *untuned):
        monkeypatch.setattr(each, "_of", {})
    of_kernels = (kernel.device_caches.clear for kernel in (*kernels, *BESIDE))
    caches = (triton.compiler.compiler.max_shared_mem.cache_clear, *of_kernels)
    for clear in caches:
        clear()
    yield
    for clear in caches:
        clear()


def leave(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    tuner: Any,
    configs: list[triton.Config],
    blocks_of: BlocksOf = lambda constants: {},
) -> None:
    """Leave a tuner these configs, and no choice that it has made; `owner` launches it."""
    monkeypatch.setattr(owner, "_KERNEL", TunedKernel(tuner, blocks_of))
    monkeypatch.setattr(tuner, "configs", configs)
    monkeypatch.setattr(tuner, "cache", {})


@contextmanager
def launching(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    tuner: Any,
    *configs_and_blocks_of: Any,
    device: type[Any] = LaunchingDevice,
) -> Iterator[Any]:
    """Make such a device that of `tuner`, see `leave`."""
    made = device()
    leave(monkeypatch, owner, tuner, *configs_and_blocks_of)
    if hasattr(owner, "can_run"):  # a kernel for some devices alone
        monkeypatch.setattr(gemm_launch, "capability", lambda device: 9)
    monkeypatch.setattr(loading, "allocate_scratch", made.allocate)
    with active(monkeypatch, made, [tuner.fn]):
        yield made


def count_asking(monkeypatch: pytest.MonkeyPatch, tuner: Any) -> list[int]:
    """Return a list that grows whenever the tuner is asked for a launch."""
    asked: list[int] = []
    run = type(tuner).run

    def noted(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            asked.append(1)
        return run(*args, **kwargs)

    monkeypatch.setattr(type(tuner), "run", noted)
    return asked
