"""Which configs of a kernel are tried: those that pruning leaves, once; none where a launch compiles only."""

import concurrent.futures
from typing import Any

import pytest
import torch
import triton
from kernels_for_tests import Probe, launch, numbers, only
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.errors import AutotunerError


def pruned_by(left: slice) -> dict[str, Any]:
    return {"prune_configs_by": {"early_config_prune": lambda configs, args, **kw: configs[left]}}


ONE = {
    "of its own": {},
    "given": {"configs": [triton.Config({"BLOCK": 16})]},
    "pruned to one": {"configs": [triton.Config({"BLOCK": b}) for b in (8, 16)], **pruned_by(slice(1, None))},
}


@pytest.mark.parametrize("options", ONE.values(), ids=ONE)
def test_a_kernel_with_one_config_passes_straight_through(bench, options):
    kernel = bench.kernel({16: 1.0}, **options)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks() == [16]
    assert tuned.report.contexts == ()


def test_pruning_sees_the_arguments_of_the_launch(bench):
    seen = []

    def prune(configs, named, **kwargs):
        seen.append((set(named), set(kwargs)))
        return [config for config in configs if config.kwargs["BLOCK"] <= named["n"]]

    kernel = bench.kernel({16: 3.0, 32: 2.0, 128: 1.0}, prune_configs_by={"early_config_prune": prune})
    bench.tune(lambda: launch(kernel, numbers()))()
    assert bench.blocks() == [16, 32, 32]
    assert seen[0][0] == {"x_ptr", "y_ptr", "n"}
    assert "grid" in seen[0][1]


def test_pruned_to_none_is_tritons_error_naming_kernel_and_key(bench):
    kernel = bench.kernel({16: 1.0, 32: 2.0}, **pruned_by(slice(0)))
    with pytest.raises(AutotunerError, match=r"add\[64, torch\.float32, torch\.float32\]"):
        bench.tune(lambda: launch(kernel, numbers()))()


def test_equal_configs_are_tried_once(bench):
    kernel = bench.kernel({16: 2.0, 32: 1.0}, configs=[triton.Config({"BLOCK": b}) for b in (16, 32, 16, 32)])
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    assert bench.blocks() == [16, 32, 32]
    assert len(only(tuned.report).timings) == 2


def test_the_values_of_a_config_may_be_lists(bench):
    class Ordered(Probe):
        def run(self, *args, ORDER, **kwargs):
            assert ORDER in ([0, 1], [1, 0])
            return super().run(*args, BLOCK=16 if ORDER == [0, 1] else 32, **kwargs)

    configs = [triton.Config({"ORDER": order}) for order in ([0, 1], [1, 0])]
    kernel = bench.kernel({16: 2.0, 32: 1.0}, configs=configs, probe=Ordered)
    tuned = bench.tune(lambda: kernel[(4,)](numbers(), torch.zeros(64), 64))
    tuned()
    tuned()
    assert bench.blocks() == [16, 32, 32, 32]
    assert only(tuned.report).config.kwargs == {"ORDER": [1, 0]}


# ---- launches that only compile


def test_compiling_only_between_trials_advances_nothing(bench, kernel):
    def thunk():
        kernel.warmup(numbers(), numbers(), 64, grid=(4,))
        launch(kernel, numbers())
        kernel.run(numbers(), numbers(), 64, grid=(4,), warmup=True)

    tuned = bench.tune(thunk)
    tuned()
    assert bench.blocks() == [16, 32, 32]
    assert bench.clock.marks == 2


def test_launches_that_only_queue_compilations_are_no_trials(bench, kernel):
    with concurrent.futures.ThreadPoolExecutor(1) as executor:

        def thunk():
            with AsyncCompileMode(executor):
                launch(kernel, numbers())

        tuned = bench.tune(thunk)
        tuned()
    assert bench.blocks() == [16] * tuned.report.runs
    assert bench.clock.marks == 0
    assert tuned.report.contexts == ()
