"""DIST_AUTOTUNE_MODE=strict: what is not tuned is an error, and nothing is launched."""

import pytest
import torch
from kernels_for_tests import is_outside, launch, no_bench, numbers, out_of_resources

from dist_autotune import NotTuned, TuningError, tunable


@pytest.fixture
def strict(monkeypatch):
    return lambda: monkeypatch.setenv("DIST_AUTOTUNE_MODE", "strict")


@pytest.fixture
def shipped(bench, kernel, strict):
    """A function of the next process, in the strict mode: of its keys, 64 and 1024 are on disk."""
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)))
    tuned(64), tuned(1024)
    bench.forget()
    strict()
    fresh = bench.kernel({16: 3.0, 32: 1.0}, do_bench=no_bench)
    return bench.tune(lambda n: launch(fresh, numbers(n)))


@pytest.mark.parametrize("known", [[], [64]], ids=["first call", "settled call"])
def test_a_key_that_is_not_tuned_is_an_error_that_names_it_and_its_neighbours(
    bench, shipped, tmp_cache, known
):
    for n in known:
        shipped(n)
    bench.forget()
    for _ in range(2):
        with pytest.raises(NotTuned) as caught:
            shipped(100)
        assert isinstance(caught.value, TuningError)
        assert str(caught.value) == (
            "add[n=100, x_ptr.dtype=float32, y_ptr.dtype=float32] is not tuned, and "
            "DIST_AUTOTUNE_MODE=strict launches nothing else: there is no result for it in memory or in "
            f"{tmp_cache}. Nearest tuned keys: [n=64, x_ptr.dtype=float32, y_ptr.dtype=float32], "
            "[n=1024, x_ptr.dtype=float32, y_ptr.dtype=float32]. Tune it on this hardware "
            "(DIST_AUTOTUNE_MODE=tune) and ship the result (dist-autotune cache export, import), or set "
            "DIST_AUTOTUNE_MODE=cached, which launches the config of the nearest key."
        )
    assert bench.blocks() == []
    assert torch.equal(shipped(64), numbers() + 1)


def test_a_provisional_result_does_not_count(bench, strict):
    tuned = bench.tuned({16: 3.0, 32: 1.0, 64: 2.0}, max_runs=2)
    tuned()
    strict()
    with pytest.raises(NotTuned):
        tuned()


def test_a_kernel_without_a_choice_needs_no_result(bench, strict):
    strict()
    prune = {"early_config_prune": lambda configs, named, **_: configs[:1]}
    one, pruned = bench.kernel({16: 3.0}), bench.kernel({16: 3.0, 32: 1.0}, prune_configs_by=prune)
    bench.tune(lambda: [launch(one, numbers()), launch(pruned, numbers())])()
    assert bench.blocks() == [16, 16]


def test_a_result_that_fails_now_is_an_error_with_its_reason_and_nothing_stands_in(bench, shipped):
    shipped(64)
    kernel = shipped.fn.__closure__[0].cell_contents
    kernel.fn.failures[32] = out_of_resources
    bench.forget()
    with pytest.raises(NotTuned, match=r"its config BLOCK: 32.* cannot be launched: .*out of resource"):
        shipped(64)
    assert bench.blocks() == []


def test_a_captured_launch_that_is_not_tuned_is_an_error(bench, shipped, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(shipped(64), numbers() + 1)
    with pytest.raises(NotTuned):
        shipped(100)
    assert bench.blocks() == [32]


def test_a_choice_of_the_host_that_is_not_tuned_is_an_error(bench, strict):
    thunk = bench.choosing("slices", {1: 2.0, 2: 1.0})
    bench.tune(thunk)(64)
    strict()
    fresh = bench.tune(thunk)
    assert fresh(64) == 2
    with pytest.raises(NotTuned, match=r"slices\[128\] is not tuned.*Nearest tuned keys: \[64\]"):
        fresh(128)


@pytest.mark.parametrize("mode", ["strict", "cached"])
def test_a_choice_of_the_host_that_memory_knows_needs_no_cache_and_is_not_forgotten(bench, monkeypatch, mode):
    name, ms = f"slices without a cache, {mode}", {1: 2.0, 2: 1.0}
    thunk = bench.choosing(name, ms)
    bench.tune(thunk, cache=False)(64)
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", mode)
    assert bench.tune(thunk, cache=False)(64) == 2
    assert tunable(name, [*ms], key=(64,)) == 2


def test_launches_outside_are_stocks(bench, strict):
    strict()
    kernel = bench.kernel({16: 3.0, 32: 1.0}, do_bench=lambda call, quantiles: call() or [1.0] * 3)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with pytest.raises(NotTuned):
        tuned()
    assert is_outside()
    assert torch.equal(launch(kernel, numbers()), numbers() + 1)
