"""Which configs of a kernel are tried: those that pruning leaves, each once; a single one never."""

from __future__ import annotations

import pytest
import torch
import triton
from kernels_for_tests import Probe, add, launch, numbers, only
from triton.runtime.errors import AutotunerError


@pytest.mark.parametrize("configs", [None, [triton.Config({"BLOCK": 16})]], ids=["of its own", "no list"])
def test_a_kernel_with_one_config_passes_straight_through(bench, configs):
    kernel = bench.kernel({16: 1.0}, configs=configs)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks() == [16]
    assert bench.clock.marks == 0
    assert tuned.report.contexts == ()


def test_a_kernel_pruned_to_one_config_needs_no_trial(bench):
    kernel = bench.kernel(
        {16: 1.0, 32: 2.0}, prune_configs_by={"early_config_prune": lambda configs, args, **kw: configs[1:]}
    )
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    assert bench.blocks() == [32]
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
    kernel = bench.kernel(
        {16: 1.0, 32: 2.0}, prune_configs_by={"early_config_prune": lambda configs, args, **kw: []}
    )
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

    probe = Ordered(add, "add", {16: 2.0, 32: 1.0}, bench.launches)
    configs = [triton.Config({"ORDER": order}) for order in ([0, 1], [1, 0])]
    kernel = triton.autotune(configs, ["n"])(probe)

    def thunk():
        kernel[(4,)](numbers(), torch.zeros(64), 64)

    tuned = bench.tune(thunk)
    tuned()
    tuned()
    assert bench.blocks() == [16, 32, 32, 32]
    assert only(tuned.report).config.kwargs == {"ORDER": [1, 0]}
