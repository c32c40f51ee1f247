"""What stands around an autotuned kernel: heuristics, subclasses, hooks and grids that launch others."""

import types
from typing import Any

import pytest
import torch
import triton
from kernels_for_tests import (
    Bench,
    Probe,
    accumulate,
    double,
    entries,
    launch,
    numbers,
    only,
    out_of_resources,
)
from triton.runtime.autotuner import Autotuner

from dist_autotune.compilation import preflight
from dist_autotune.search.expectation.order import FEWEST
from dist_autotune.triton_api import footprint


def with_heuristics(bench: Bench, *, below: bool) -> Any:
    heuristics = triton.heuristics({"EVEN": lambda args: args["n"] % args.get("BLOCK", 1) == 0})

    class WithEven(Probe):
        def run(self, *args, EVEN, **kwargs):
            assert EVEN is True
            return super().run(*args, **kwargs)

    kernel = bench.kernel({16: 3.0, 32: 1.0}, probe=WithEven)
    if not below:
        return heuristics(kernel)
    return triton.autotune(kernel.configs, ["n"])(heuristics(kernel.fn))


@pytest.mark.parametrize("below", [True, False], ids=["below autotune", "above autotune"])
def test_heuristics_may_stand_below_or_above(bench, below):
    kernel = with_heuristics(bench, below=below)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks() == [16, 32, 32]
    assert only(tuned.report).kernel == "add"


class Counting(Autotuner):
    """As some libraries do: works around the launch, then asks which config it was."""

    def run(self, *args, **kwargs):
        result = super().run(*args, **kwargs)
        self.__dict__.setdefault("seen", []).append(self.best_config.kwargs["BLOCK"])
        return result


def made_by(kind: type, bench: Bench, ms: Any) -> Any:
    """Return a kernel that an autotuner of this class launches."""
    kernel = bench.kernel(ms)
    return kind(kernel.fn, kernel.fn.arg_names, kernel.configs, ["n"], None, None)


def test_a_subclass_that_overrides_run_and_calls_super_is_tuned(bench):
    kernel = made_by(Counting, bench, {16: lambda made: 1.0 * made.n, 32: 100.0})
    tuned = bench.tune(lambda: [launch(kernel, numbers(n)) for n in (64, 256)])
    for _ in range(3):  # the last one by the dispatcher alone
        tuned()
    assert kernel.seen == bench.blocks() == [16, 16, 32, 32] + [16, 32] * 3


@pytest.mark.parametrize("max_runs", [None, 2], ids=["settled", "interrupted"])
def test_a_config_that_failed_or_was_only_tried_is_never_kept_for_a_subclass(bench, tmp_cache, max_runs):
    kernel = made_by(Counting, bench, {16: 3.0, 32: 2.0, 64: 1.0})
    kernel.fn.failures[64] = out_of_resources
    bench.tune(lambda: launch(kernel, numbers()), max_runs=max_runs)()
    assert kernel.seen == bench.blocks()
    kept = [entry["config"].split(",")[0] for entry in entries(tmp_cache)]
    assert kept == (["BLOCK: 32"] if max_runs is None else [])


def test_a_grid_function_may_launch_another_autotuned_kernel(bench):
    inner = bench.kernel({16: 1.0, 32: 3.0}, double)
    outer = bench.kernel({16: 30.0, 32: 10.0})
    doubled = []

    def thunk():
        y = torch.full((64,), -1.0)

        def grid(meta):
            doubled.append(launch(inner, numbers()))
            return (triton.cdiv(64, meta["BLOCK"]),)

        outer[grid](numbers(), y, 64)
        return y

    tuned = bench.tune(thunk)
    assert torch.equal(tuned(), numbers() + 1)
    assert all(torch.equal(y, numbers() * 2) for y in doubled)
    assert bench.blocks("add") == [16, 32, 32]
    assert bench.blocks("double") == [16, 32, 16]


@pytest.mark.parametrize("does", ["launches", "raises", "counts"])
def test_a_grid_function_that_is_asked_about_all_configs_launches_nothing_and_may_raise(
    bench, monkeypatch, does
):
    device = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(preflight, "current_device", lambda: 0)
    monkeypatch.setattr(footprint, "device_properties", lambda index: device)
    inner = bench.kernel({16: 1.0, 32: 3.0}, accumulate)
    outer = bench.kernel({1 << i: 20.0 - i for i in range(FEWEST)})
    asked, total = [], torch.zeros(64)

    def grid(meta):
        asked.append(meta["BLOCK"])
        if does == "launches":
            launch(inner, numbers(), total)
        if does == "raises" and asked.count(1) == 1:
            raise ValueError("a grid that is asked before its launch")
        return (triton.cdiv(64, meta["BLOCK"]),)

    def thunk():
        outer[grid](numbers(), y := torch.full((64,), -1.0), 64)
        return y

    tuned = bench.tune(thunk)
    assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks("add")[-1] == 1 << (FEWEST - 1)
    assert torch.equal(total, numbers() * len(bench.blocks("accumulate")))
    assert len(bench.blocks("accumulate")) == (tuned.report.runs if does == "launches" else 0)
    assert len(asked) - tuned.report.runs == (FEWEST if does == "counts" else 1)  # by no launch


def test_a_pre_hook_may_launch_another_autotuned_kernel(bench):
    inner = bench.kernel({16: 1.0, 32: 3.0}, double)
    hooks = {block: lambda args: launch(inner, numbers()) for block in (16, 32)}
    outer = bench.kernel({16: 3.0, 32: 1.0}, pre_hooks=hooks)
    assert torch.equal(bench.tune(lambda: launch(outer, numbers()))(), numbers() + 1)
    assert bench.blocks("add") == [16, 32, 32]
    assert bench.blocks("double") == [16, 32, 16]
