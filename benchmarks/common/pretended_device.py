"""A GPU that is not there: Triton compiles for it, loads onto it and launches, and nothing runs."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

HOPPER = GPUTarget("cuda", 90, 32)
HOPPER_SHARED_BYTES = 232448
HOPPER_MULTIPROCESSORS = 132


class PretendedDevice(DriverBase):
    """What Triton asks of a driver. Too much shared memory is refused, by Triton itself."""

    def __init__(self, target: GPUTarget = HOPPER, shared_bytes: int = HOPPER_SHARED_BYTES) -> None:
        self.target = target
        self.launched: list[dict[str, Any]] = []  # the constants of each launch
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: {
                "max_shared_mem": shared_bytes,
                "multiprocessor_count": HOPPER_MULTIPROCESSORS,
            },
            load_binary=lambda name, *args: ("module", name, 32, 0, 1024),
            unload_module=lambda *args: None,
        )

    def install(self) -> None:
        """Make this the device of the process, whatever it has."""
        driver.set_active(self)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            constants = {source.fn.arg_names[path[0]]: value for path, value in source.constants.items()}
            self.launched.append(constants)

        return launch

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise AssertionError("nothing is benchmarked by stock Triton")


class DeviceUnderTriton(PretendedDevice):
    """The same below Triton's own launcher for CUDA; `hand` is called in place of its function in C."""

    def __init__(self, hand: Callable[..., None]) -> None:
        super().__init__()
        self.hand = hand
        self.utils.fill_tma_descriptor = lambda *given: ("tensor map", *given)
        # From 3.7 on the launcher finds its functions here, and types in its module.
        self.utils.fill_tma_descriptor_tiled = self.utils.fill_tma_descriptor
        self.utils.build_signature_metadata = tuple
        self.utils.launch = hand

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        module = types.SimpleNamespace(launch=self.hand)
        names = {
            "compile_module_from_src": lambda **_: module,
            "library_dirs": list,
            "PyKernelArg": _annotation,
        }
        known = {name: value for name, value in names.items() if hasattr(nvidia, name)}
        with mock.patch.multiple(nvidia, **known):
            return nvidia.CudaLauncher(source, metadata)


def _annotation(**parts: Any) -> tuple[Any, ...]:
    return tuple(parts.values())
