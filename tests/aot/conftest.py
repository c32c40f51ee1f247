"""The AOT world: kernels are compiled for GPUs that need not be there, so the interpreter must be off."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if "triton" in sys.modules:
    raise pytest.UsageError("triton is loaded with the interpreter on; run `pytest tests/aot` by itself")
os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(scope="session", autouse=True)
def nothing_unloads() -> None:
    """Keep kernels that are collected from asking for the device that they were loaded on: it was pretended.

    Pytest would tell of the error, and parse source for it; where a collection begins while Triton parses a
    kernel, Python 3.11 then refuses to go on with that kernel.
    """
    from triton.compiler import CompiledKernel

    if hasattr(CompiledKernel, "__del__"):
        del CompiledKernel.__del__


@pytest.fixture(scope="session", autouse=True)
def each_kernel_is_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let a worker wait for another one that compiles the same kernel, and find it in Triton's cache."""
    import compiled

    if "PYTEST_XDIST_WORKER" in os.environ:
        compiled.LOCKS = tmp_path_factory.getbasetemp().parent


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Give a Hopper GPU with little shared memory that loads all and runs nothing, and an empty cache.

    `forget` drops what this process has compiled of `candidates`; Triton's cache on disk stays.
    """
    import triton
    from candidates import shifted, square
    from triton.runtime.driver import driver

    from benchmarks.common.pretended_device import PretendedDevice
    from dist_autotune.compilation import preflight as compiling

    made = PretendedDevice(shared_bytes=20 * 1024)
    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(compiling, "current_device", lambda: 0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    shared_memory = triton.compiler.compiler.max_shared_mem
    shared_memory.cache_clear()
    made.forget = lambda: [kernel.device_caches.clear() for kernel in (square, shifted)]
    made.forget()
    yield made
    shared_memory.cache_clear()
    made.forget()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Give the compiler that notes what it compiles, in this process and its children."""
    from candidates import Compiler
    from triton.compiler.compiler import ASTSource

    made = Compiler(tmp_path / "compilations")
    monkeypatch.setattr(ASTSource, "make_ir", made.stand_in())
    return made
