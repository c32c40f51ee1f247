"""Candidates are compiled and loaded before they are tried: with Triton's compiler, and a pretended device.

The compiler is real, failures included. Loading a binary and launching it do nothing, so every launch
leaves its output alone; what a device would refuse, too much shared memory, Triton refuses by itself.
"""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from compiled import HOPPER
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from dist_autotune import NoValidConfig, contextual_autotune
from dist_autotune import compile as compiling

pytestmark = pytest.mark.aot

SHARED_BYTES = 20 * 1024


class PretendedDevice(DriverBase):
    """A Hopper GPU with little shared memory that loads everything and runs nothing."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES},
            load_binary=lambda name, *args: ("module", name, 32, 0, 1024),
            unload_module=lambda *args: None,
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return HOPPER

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = PretendedDevice()
    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(compiling, "current_device", lambda: 0)
    shared_memory = triton.compiler.compiler.max_shared_mem
    shared_memory.cache_clear()
    square.device_caches.clear()
    yield made
    shared_memory.cache_clear()
    square.device_caches.clear()
    gc.collect()  # kernels unload themselves from the device they were loaded on: now


@triton.jit
def square(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 32, "no block of 32")
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, tl.dot(x, x))


GOOD, ASSERTED, TOO_LARGE = 16, 32, 128


def kernel(*blocks: int) -> Any:
    return triton.autotune([triton.Config({"BLOCK": block}) for block in blocks], [])(square)


def tuned(kernel: Any) -> Any:
    x, y = torch.zeros(1, dtype=torch.float16), torch.zeros(1)
    options = {"n_warmup": 0, "n_repeat": 1, "log_dir": None, "cache": False, "progress": False}
    return contextual_autotune(lambda: kernel[(1,)](x, y), **options)


def test_each_failure_is_found_before_the_first_trial_and_named(device):
    function = tuned(kernel(GOOD, ASSERTED, 64, TOO_LARGE))
    function()
    (context,) = function.report.contexts
    banned = {text.split(",")[0]: reason for text, reason in context.banned.items()}
    assert banned.keys() == {f"BLOCK: {ASSERTED}", f"BLOCK: {TOO_LARGE}"}
    assert "CompileTimeAssertionFailure" in banned[f"BLOCK: {ASSERTED}"]
    assert "out of resource: shared memory" in banned[f"BLOCK: {TOO_LARGE}"]
    assert function.report.runs == 3
    assert {constants["BLOCK"] for constants in device.launched} == {GOOD, 64}


def test_a_first_config_that_fails_is_replaced_by_the_launch(device):
    function = tuned(kernel(ASSERTED, TOO_LARGE, GOOD))
    function()
    (context,) = function.report.contexts
    assert context.config.kwargs["BLOCK"] == GOOD
    assert len(context.banned) == 2
    assert {constants["BLOCK"] for constants in device.launched} == {GOOD}


def test_when_none_is_left_every_reason_is_told(device):
    with pytest.raises(NoValidConfig) as caught:
        tuned(kernel(ASSERTED, TOO_LARGE))()
    assert "CompileTimeAssertionFailure" in str(caught.value)
    assert "out of resource: shared memory" in str(caught.value)
    assert device.launched == []


def test_compiling_only_returns_the_compiled_incumbent(device):
    tuner = kernel(64, GOOD)
    x, y = torch.zeros(1, dtype=torch.float16), torch.zeros(1)
    compiled = []

    def thunk():
        compiled.append(tuner.run(x, y, grid=(1,), warmup=True))

    contextual_autotune(thunk, log_dir=None, cache=False, progress=False)()
    assert [type(each).__name__ for each in compiled] == ["CompiledKernel"]
    assert device.launched == []
