"""Launches settled calls through Triton's C on `pretended_cuda.c`; prints what comes.

python tests/aot/settled_on_pretended_cuda.py DIRECTORY     where libcuda.so.1 is to be compiled

A program of its own, as the process has a driver afterwards. Prints a line of JSON for each case.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from settled_cases import STAMPED
from settled_path import microseconds
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from dist_autotune.kernels import launch as launches
from dist_autotune.kernels.gemm import body, copies, operation
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.persistent_gemm import persistent_matmul

ABOVE = Path(__file__).parent
BYTES = {"i32": 4, "i64": 8, "u32": 4, "u64": 8, "fp32": 4}
OF_DESCRIPTOR = (128, 4, 4, 8, 8)  # the tensor map, rows, columns and strides


class PretendedCuda:
    """The compiled driver, which stays loaded."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "libcuda.so.1"
        include = Path(nvidia.__file__).parent / "include"
        command = ["cc", "-O2", "-shared", "-fPIC", f"-I{include}", f"-Wl,-soname,{self._path.name}"]
        subprocess.run([*command, ABOVE / "pretended_cuda.c", "-o", self._path], check=True)
        os.environ["TRITON_LIBCUDA_PATH"] = str(directory)  # Triton's C is linked against it
        self._library = ctypes.CDLL(str(self._path), mode=ctypes.RTLD_GLOBAL)
        self._library.pretended_take.restype = ctypes.c_size_t
        self._room = ctypes.create_string_buffer(1 << 20)

    def install(self) -> None:
        driver.set_active(HopperDriver())

    def describe(self, compiled: Any) -> None:
        """Have the arguments of a kernel written down, too."""
        sizes = [size for kind in compiled.src.signature.values() for size in bytes_of(str(kind))]
        sizes += [8, 8]  # scratch memory
        array = (ctypes.c_int * len(sizes))(*sizes)
        self._library.pretended_describe(ctypes.c_void_p(compiled.function), len(sizes), array)

    def written_by(self, call: Callable[[], Any]) -> tuple[bytes, int]:
        """Return what a call launches, as bytes, and how many TMA descriptors it has encoded."""
        self._library.pretended_take(self._room)
        before = self._library.pretended_encoded()
        call()
        length = self._library.pretended_take(self._room)
        return self._room.raw[:length], self._library.pretended_encoded() - before


class HopperDriver(nvidia.CudaDriver):
    """Triton's driver for CUDA, which asks torch for devices and streams: here it has one of each."""

    def __init__(self) -> None:
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = nvidia.CudaLauncher
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 5
        self.get_device_capability = lambda device: (9, 0)
        self.set_current_device = lambda device: None

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def bytes_of(kind: str) -> tuple[int, ...]:
    """Return the sizes of what an argument of that type becomes for the driver."""
    if kind == "constexpr":
        return ()
    if kind.startswith("tensordesc"):
        return OF_DESCRIPTOR
    return (8 if kind.startswith("*") else BYTES[kind],)


@dataclass(frozen=True)
class Case:
    """A product of fp16 matrices, m x k by columns of n x k, and what is special about it."""

    m: int = 512
    n: int = 512
    k: int = 512
    scheduler: str = "auto"
    copies: bool = False
    bias: torch.Tensor | None = None


CASES = {
    "descriptors": Case(),
    "a counter": Case(scheduler="dynamic"),
    "a bias": Case(bias=torch.zeros(513, dtype=torch.float32)[1:]),  # not at a multiple of 16 bytes
    "copies": Case(m=250, n=333, k=67, copies=True),
}


@contextlib.contextmanager
def taken_for_a_gpu(case: Case) -> Iterator[None]:
    """Have `persistent_matmul` take tensors for the device's, and one config that suits the case."""
    kwargs = {"VARIANT": "cooperative"}
    fitting = [config for config in launching.GLUON_CANDIDATES if kwargs.items() <= config.kwargs.items()]

    def all_copied(shape: Any, *, out: bool) -> tuple[Any, Any]:
        chosen = copies.Copies(a=True, b=True, out=out)
        return chosen, copies.copied(shape, chosen)

    changes: list[tuple[Any, str, Any]] = [
        (launching.tuned_gemm, "configs", fitting[:1]),
        (launching.tuned_gemm, "cache", {}),
        (operation, "_is_on_gpu", lambda tensor: True),
        (operation, "_on", lambda device: contextlib.nullcontext()),
        (operation, "_device", lambda device: (9, 132)),
    ]
    if case.copies:
        room_for = functools.cache(
            copies.room_for
        )  # the same memory in each call, as torch's for CUDA mostly is
        changes += [
            (launching, "plan_copies", all_copied),
            (launching, "room_for", room_for),
            (copies, "room_for", room_for),
        ]
    with contextlib.ExitStack() as changed:
        for owner, name, value in changes:
            changed.enter_context(mock.patch.object(owner, name, value))
        yield


def compiled_kernels() -> list[Any]:
    kernels = (body.gemm, copies.copy_rows, STAMPED.kernel.fn)
    return [compiled for kernel in kernels for compiled in kernel.device_caches[0][0].values()]


def functions_called(call: Callable[[], Any]) -> int:
    """Return how many functions a call runs, Python's and those in C that Python calls."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    call()
    sys.setprofile(None)
    return events.count("call") + events.count("c_call")


def compare(cuda: PretendedCuda, case: Case) -> dict[str, Any]:
    """Return what a settled call hands to the driver and what by Triton's own way, and the us of each."""
    a, b, out = (
        torch.zeros(size, dtype=torch.float16)
        for size in ((case.m, case.k), (case.n, case.k), (case.m, case.n))
    )

    def call() -> None:
        persistent_matmul(a, b.T, out, scheduler=case.scheduler, bias=case.bias)

    with taken_for_a_gpu(case):
        return by_both_ways(cuda, call)


def by_both_ways(cuda: PretendedCuda, call: Callable[[], None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(2):
        call()
    for compiled in compiled_kernels():
        cuda.describe(compiled)
    for way, watched in (("prepared", False), ("own", True)):
        with mock.patch.object(launches, "_are_watched", lambda watched=watched: watched):
            written, encoded = cuda.written_by(call)
            found[way] = {
                "written": written.hex(),
                "encoded": encoded,
                "functions": functions_called(call),
                "us": microseconds(call),
            }
    return found


def reduced(cuda: PretendedCuda) -> dict[str, Any]:
    """Return the same of a call of `GemmAllReduce`, product included."""
    STAMPED.kernel.configs = STAMPED.tiles[:1]
    caller = STAMPED.make(replace(STAMPED.plain, has_norm=False))
    return by_both_ways(cuda, caller.call)


def main(directory: str) -> None:
    cuda = PretendedCuda(Path(directory))
    cuda.install()
    for name, case in CASES.items():
        print(json.dumps({"case": name, **compare(cuda, case)}))
    print(json.dumps({"case": "rows of all ranks", **reduced(cuda)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
