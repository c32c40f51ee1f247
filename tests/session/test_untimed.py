"""Launches outside tuned calls under the interpreter, where stock Triton's benchmarks need a device."""

from __future__ import annotations

import pytest
import torch
import triton
from kernels_for_tests import KEY, launch, numbers, only, winner


@pytest.fixture
def untimed(bench):
    """Let launches outside tuned calls find what stands there once a call has been tuned."""
    bench.tune(lambda: launch(bench.kernel({16: 1.0, 32: 1.0}), numbers(8)))()
    bench.forget()


def test_a_do_bench_of_the_users_times_the_configs(bench, untimed):
    kernel = bench.kernel(
        {16: 3.0, 32: 1.0}, do_bench=lambda call, quantiles: [call(), bench.launches[-1].ms][1:]
    )
    launch(kernel, numbers())
    assert kernel.cache[KEY].kwargs == {"BLOCK": 32}


def test_a_launch_outside_takes_the_first_config_and_leaves_the_key_to_be_tuned(bench, untimed):
    hooked = []
    kernel = bench.kernel({16: 3.0, 32: 1.0}, pre_hooks={16: hooked.append})
    for _ in range(2):
        assert torch.equal(launch(kernel, numbers()), numbers() + 1)
    assert (bench.blocks(), kernel.cache, kernel.best_config.kwargs) == ([16, 16], {}, {"BLOCK": 16})
    assert [arguments["BLOCK"] for arguments in hooked] == [16, 16]
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    assert winner(only(tuned.report)) == 32


def test_pruning_and_one_config_are_as_in_stock(bench, untimed):
    pruned = bench.kernel(
        {16: 3.0, 32: 1.0},
        prune_configs_by={"early_config_prune": lambda configs, named, **kwargs: configs[1:]},
    )
    launch(pruned, numbers())
    one = bench.kernel({}, configs=[triton.Config({"BLOCK": 64})])
    launch(one, numbers())
    assert bench.blocks() == [32, 64]
