"""Launches that only compile: the incumbent is compiled; nothing is launched, timed or tried."""

from __future__ import annotations

import concurrent.futures

import pytest
from kernels_for_tests import launch, numbers
from triton.runtime._async_compile import AsyncCompileMode


def run_warmup(kernel):
    return kernel.run(numbers(), numbers(), 64, grid=(4,), warmup=True)


@pytest.mark.parametrize(
    "compile_only",
    [run_warmup, lambda kernel: kernel.warmup(numbers(), numbers(), 64, grid=(4,))],
    ids=["run(warmup=True)", "warmup()"],
)
def test_compiling_only_is_no_launch(bench, compile_only):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: compile_only(kernel))
    tuned()
    assert bench.blocks() == []
    assert bench.clock.marks == 0
    assert tuned.report.contexts == ()


def test_compiling_only_between_trials_advances_nothing(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})

    def thunk():
        run_warmup(kernel)
        launch(kernel, numbers())
        run_warmup(kernel)

    tuned = bench.tune(thunk)
    tuned()
    assert bench.blocks() == [16, 32, 32]
    assert bench.clock.marks == 2


def test_launches_that_only_queue_compilations_are_no_trials(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    with concurrent.futures.ThreadPoolExecutor(1) as executor:

        def thunk():
            with AsyncCompileMode(executor):
                launch(kernel, numbers())

        tuned = bench.tune(thunk)
        tuned()
    assert bench.blocks() == [16] * tuned.report.runs
    assert bench.clock.marks == 0
    assert tuned.report.contexts == ()
