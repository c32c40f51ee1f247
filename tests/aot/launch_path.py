"""A device that compiles and does not run, for tests of the path to a launch of the Gluon bodies."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import Language
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver

from benchmarks.common.pretended_device import PretendedDevice
from dist_autotune.kernels.exchange import spoil
from dist_autotune.kernels.gemm.configs import blocks_of
from dist_autotune.kernels.launch import BlocksOf, SettledLaunches

DESCRIPTOR_BYTES = 128
SPOILERS = (spoil.spoil_lost_chunks, spoil.spoil_without_peers)


class CompilingDevice(PretendedDevice):
    """A Hopper GPU that writes down all arguments of a launch, save of what fills results without a peer."""

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: self.launched.append(args) if source.fn not in SPOILERS else None


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
def only_compiling(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    tuner: Any,
    config: triton.Config,
    name: str = "_SETTLED",
    blocks_of: BlocksOf = blocks_of,
) -> Iterator[CompilingDevice]:
    """Make it the device of `tuner`, with this config only; `module` has its settled launches as `name`."""
    made = CompilingDevice()
    monkeypatch.setattr(driver, "_active", made)
    leave_out_machine_code(monkeypatch)
    for untuned in (spoil._LOST_CHUNKS, spoil._ALL):
        monkeypatch.setattr(untuned, "_of", {})
    monkeypatch.setattr(module, name, SettledLaunches(tuner, blocks_of))
    monkeypatch.setattr(tuner, "configs", [config])
    monkeypatch.setattr(tuner, "cache", {})
    of_kernels = (kernel.device_caches.clear for kernel in (tuner.fn, *SPOILERS))
    caches = (triton.compiler.compiler.max_shared_mem.cache_clear, *of_kernels)
    for clear in caches:
        clear()
    yield made
    for clear in caches:
        clear()


def arguments(launched: tuple[Any, ...]) -> list[Any]:
    """Return the kernel's arguments of a launch, descriptors as their numbers and tensors as addresses."""

    def plain(value: Any) -> Any:
        if not hasattr(value, "block_shape"):
            return value.data_ptr() if isinstance(value, torch.Tensor) else value
        return (value.base.data_ptr(), *value.shape, *value.strides, *value.block_shape, repr(value.layout))

    return [plain(value) for value in launched[9:]]  # behind grid, stream, function, metadata and hooks


def count_asking(monkeypatch: pytest.MonkeyPatch, tuner: Any) -> list[int]:
    """Return a list that grows whenever the tuner is asked."""
    asked: list[int] = []
    run = type(tuner).run
    monkeypatch.setattr(
        type(tuner), "run", lambda *args, **kwargs: (asked.append(1), run(*args, **kwargs))[1]
    )
    return asked
