"""How often a function runs, what each run tries, and how a session ends, whatever the function does."""

from __future__ import annotations

import pytest
import torch
from kernels_for_tests import (
    double,
    launch,
    numbers,
    only,
    records,
    winner,
)

from dist_autotune import contextual_autotune, is_tuning
from dist_autotune.logs.records import SessionOpened
from dist_autotune.search.strategies import STRATEGIES

# ---- the schedule


def test_by_default_it_races(bench):
    tuned = bench.tuned({16: 1.0, 32: 100.0, 64: 1.5}, n_warmup=None, n_repeat=None)
    tuned()
    assert bench.blocks()[:3] == [16, 32, 64]
    assert bench.blocks().count(32) == 1
    assert bench.blocks()[-1] == winner(only(tuned.report)) == 16


def test_is_tuning_is_true_only_while_a_launch_may_be_a_trial(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    seen = []

    def thunk():
        seen.append(is_tuning())
        launch(kernel, numbers())

    tuned = bench.tune(thunk)
    assert not is_tuning()
    tuned()
    assert all(seen)
    seen.clear()
    tuned()
    assert seen == [False]
    assert not is_tuning()


# ---- budgets


@pytest.mark.parametrize("search", sorted(STRATEGIES))
@pytest.mark.parametrize("max_runs", [1, 2, 3, 5])
def test_max_runs_is_never_exceeded_and_the_next_call_goes_on(bench, search, max_runs):
    blocks = [16, 32, 64, 128, 256]
    tuned = bench.tuned({block: 10.0 - i for i, block in enumerate(blocks)}, max_runs=max_runs, search=search)
    tuned()
    assert tuned.report.runs == max_runs  # also where the first run is the only trial
    assert only(tuned.report).status == "partial"
    assert not tuned.settled
    for _ in range(100 if max_runs > 1 else 0):
        tuned()
        assert tuned.report.runs <= max_runs
    if max_runs > 1:
        assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", 256)


def test_a_spent_budget_keeps_the_best_so_far(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0, 128: 0.5})
    tuned = bench.tune(lambda: launch(kernel, numbers()), max_runs=4)
    tuned()
    assert bench.blocks() == [16, 32, 64, 32]
    assert kernel.best_config.kwargs["BLOCK"] == 32
    bench.forget()
    tuned()
    assert bench.blocks() == [128, 128]
    assert only(tuned.report).status == "tuned"
    assert tuned.settled


# ---- functions in functions


def test_a_tuned_function_inside_a_tuned_function_joins_its_session(bench):
    one, other = bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 1.0, 32: 3.0}, double)
    inner = bench.tune(lambda: launch(one, numbers()), name="inner")
    outer = bench.tune(lambda: (inner(), launch(other, numbers())), name="outer")
    outer()
    assert bench.blocks("add") == [16, 32, 32]
    assert bench.blocks("double") == [16, 32, 16]
    assert len(outer.report.contexts) == 2
    assert inner.report is None
    assert [record.thunk for record in records(SessionOpened)] == ["outer"]
    bench.forget()
    inner()  # on its own it finds what the outer session settled
    assert bench.blocks("add") == [32]
    assert only(inner.report).status == "cached"


# ---- other shapes


@pytest.mark.parametrize("objective", ["kernel", "thunk"])
def test_all_defaults_work_in_the_interpreter(bench, objective):
    kernel = bench.kernel({16: 1.0, 32: 1.0}, interpreted=True)
    tuned = contextual_autotune(lambda x: launch(kernel, x), objective=objective)
    assert torch.equal(tuned(numbers()), numbers() + 1)
    assert torch.equal(tuned(numbers() + 1), numbers() + 2)
    assert tuned.settled
    context = only(tuned.report)
    assert context.status == "tuned"
    assert context.config in kernel.configs
    assert all(ms > 0 for ms in context.timings.values())
    assert tuned.report.clock == "WallClock"


def test_a_kernel_launched_again_by_backward_has_one_config_in_the_run(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})

    class AddOne(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return launch(kernel, x.detach())

        @staticmethod
        def backward(ctx, gradient):
            launch(kernel, numbers())  # as activation checkpointing does
            return gradient

    def thunk():
        x = numbers().requires_grad_()
        AddOne.apply(x).sum().backward()
        return x.grad

    assert torch.equal(bench.tune(thunk)(), torch.ones(64))
    assert bench.blocks() == [16, 16, 32, 32, 32, 32]
