"""Candidates are compiled and loaded before they are tried: with a compiler in place of the interpreter's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels_for_tests import FAILURES, Bench, is_outside, launch, numbers, only, records
from triton.runtime._async_compile import active_mode

from dist_autotune.compilation import preflight as compiling
from dist_autotune.logs.records import Banned

every_failure = pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())


class FakeKernel:
    """A compiled kernel that loads, or does not."""

    def __init__(self, block: int, failures: dict[int, Callable[[], Exception]]) -> None:
        self.block = block
        self.failures = failures
        self.loads = 0

    def _init_handles(self) -> None:
        self.loads += 1
        if self.block in self.failures:
            raise self.failures[self.block]()


@pytest.fixture
def compiler(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let kernels of `bench` be compiled and loaded; return what makes such a kernel."""
    monkeypatch.setattr("dist_autotune.triton_api.interception.is_interpreted", lambda: False)
    monkeypatch.setattr(compiling, "current_device", lambda: 0)

    def make(ms, *, compiles=None, loads=None, queued=True, **options):
        kernel = bench.kernel(ms, **options)
        kernel.compiled = []
        run = kernel.fn.run

        def compile_or_run(*args, grid, warmup, **kwargs):
            if not warmup:
                return run(*args, grid=grid, warmup=False, **kwargs)
            block = kwargs["BLOCK"]
            kernel.compiled.append(block)

            def compiled():
                if block in (compiles or {}):
                    raise compiles[block]()
                return FakeKernel(block, loads or {})

            mode = active_mode.get()
            if mode is None or not queued:
                return compiled()
            callbacks = len(inspect.signature(mode.submit).parameters) - 2  # one more from Triton 3.8 on
            return mode.submit(block, compiled, *[lambda kernel: None] * callbacks)

        kernel.fn.run = compile_or_run
        return kernel

    return make


@pytest.mark.parametrize("queued", [True, False], ids=["queued", "at once"])
@pytest.mark.parametrize("phase", ["compiles", "loads"])
@every_failure
def test_a_config_that_does_not_load_is_banned_before_it_is_tried(bench, compiler, phase, failure, queued):
    kernel = compiler({16: 3.0, 32: 1.0, 64: 2.0}, queued=queued, **{phase: {32: failure}})
    launched = []
    kernel.fn.failures[32] = lambda: launched.append(32) or failure()
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks() == [16, 64, 64]
    assert launched == []
    assert type(failure()).__name__ in next(iter(only(tuned.report).banned.values()))
    assert [record.run for record in records(Banned)] == [0]


def test_all_candidates_but_the_first_incumbent_are_compiled_after_the_first_run(bench, compiler):
    kernel = compiler({16: 3.0, 32: 1.0, 64: 2.0})
    compiled_at = []

    def thunk():
        y = launch(kernel, numbers())
        compiled_at.append(list(kernel.compiled))
        return y

    bench.tune(thunk)()
    assert set(compiled_at[0]) <= {16}
    assert {32, 64} <= set(compiled_at[1])


def test_a_config_is_loaded_before_the_clock_starts(bench, compiler):
    kernel = compiler({16: 3.0, 32: 1.0}, pre_hooks={32: lambda arguments: None})
    order: list[Any] = []
    start, run = bench.clock.start, kernel.fn.run
    bench.clock.start = lambda: order.append("start") or start()
    kernel.fn.run = lambda *a, **k: (
        order.append(("compile" if k["warmup"] else "launch", k["BLOCK"])) or run(*a, **k)
    )
    bench.tune(lambda: launch(kernel, numbers()))()
    assert order[:3] == [("compile", 16), "start", ("launch", 16)]
    assert order[-4:-1] == [("compile", 32), "start", ("launch", 32)]


@pytest.mark.parametrize("queued", [True, False], ids=["queued", "at once"])
def test_an_error_of_another_kind_while_compiling_is_the_users(bench, compiler, queued):
    kernel = compiler({16: 3.0, 32: 1.0}, queued=queued, compiles={32: lambda: KeyError("user's own")})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with pytest.raises(KeyError, match="user's own"):
        tuned()
    assert is_outside()
