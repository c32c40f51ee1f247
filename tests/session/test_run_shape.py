"""How often a function runs, what each run tries, and how a session ends, whatever the function does."""

import math
from pathlib import Path

import pytest
import torch
from kernels_for_tests import (
    KEY,
    block_of,
    double,
    entries,
    is_outside,
    launch,
    numbers,
    only,
    records,
    winner,
)
from torch.utils.checkpoint import checkpoint
from triton.runtime.autotuner import Autotuner

from dist_autotune import TuningError, contextual_autotune, is_tuning
from dist_autotune.logs.records import Note, SessionOpened
from dist_autotune.search.state import ADMISSION_RUNS
from dist_autotune.search.strategies import STRATEGIES

# ---- the schedule


def test_is_tuning_is_true_only_while_a_launch_may_be_a_trial(bench, kernel):
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
@pytest.mark.parametrize(("max_runs", "bits"), [(1, "any"), (2, "any"), (3, "any"), (5, "any"), (6, "same")])
def test_max_runs_is_never_exceeded_and_the_next_call_goes_on(bench, search, max_runs, bits):
    ms = {block: 10.0 - i for i, block in enumerate([16, 32, 64, 128, 256])}
    tuned = bench.tuned(ms, max_runs=max_runs, search=search, bits=bits)
    tuned()
    assert tuned.report.runs == max_runs  # also where the first run is the only trial
    assert only(tuned.report).status == "partial"
    assert not tuned.settled
    for _ in range(100 if max_runs > 1 else 0):
        tuned()
        assert tuned.report.runs <= max_runs
    if max_runs > 1:
        assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", 256)


def test_where_max_runs_lets_no_winner_be_verified_the_report_says_how_many_it_takes(bench):
    tuned = bench.tuned({16: 3.0, 32: 1.0}, max_runs=4, bits="same")
    for _ in range(9):
        tuned()
    assert "max_runs=4 ended the session before" in tuned.report.warning
    assert "8 runs or more" in tuned.report.warning


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


TENSOR = torch.zeros(1)


@pytest.mark.parametrize(
    ("inner", "outer", "told"),
    [
        ({"is_dist": True}, {}, r"is_dist=True.*is_dist=False"),
        ({"bits": "same"}, {}, r"bits='same'.*bits='any'"),
        ({"bits": "same"}, {"bits": "check"}, r"bits='same'.*bits='check'"),
        ({"bits": "check", "outputs": [TENSOR]}, {"bits": "check"}, r"outputs=\[Tensor\].*outputs=\[\]"),
        ({"preserve": [TENSOR]}, {}, r"preserve=\[Tensor\].*preserve=\[\]"),
        ({"preserve": [TENSOR]}, {"preserve": [torch.zeros(1)]}, r"preserve=\[Tensor\].*preserve=\[Tensor\]"),
        ({"objective": "thunk"}, {}, r"objective='thunk'.*objective='kernel'"),
        ({"mode": "online"}, {}, r"mode='online'.*mode='replay'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_settled", [False, True], ids=["tuning", "settled"])
def test_a_function_that_asks_for_what_the_one_around_it_does_not_do_is_refused(
    bench, inner, outer, told, is_settled
):
    within = bench.tuned({16: 3.0, 32: 1.0}, name="inner", **inner)
    calls_it = not is_settled
    around = bench.tune(lambda: calls_it and within(), name="outer", **outer)
    if is_settled:
        around()
        calls_it = True
    with pytest.raises(TuningError, match=rf"inner with {told}"):
        around()
    assert is_outside()
    assert torch.equal(within(), numbers() + 1)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ({}, {"is_dist": True, "bits": "same", "preserve": [TENSOR], "objective": "thunk"}),
        ({}, {"mode": "online"}),
        ({"bits": "check", "preserve": [TENSOR]}, {"bits": "same", "preserve": [torch.zeros(1), TENSOR]}),
        ({"preserve": [TENSOR]}, {"mode": "online"}),
        ({"bits": "check", "outputs": [TENSOR]}, {"bits": "check", "preserve": [TENSOR]}),
        ({"is_dist": True}, {"is_dist": True}),
    ],
    ids=str,
)
def test_a_function_whose_wishes_are_met_joins(bench, inner, outer):
    within = bench.tuned({16: 3.0, 32: 1.0}, name="inner", **inner)
    around = bench.tune(within, name="outer", **outer)
    for _ in range(4):
        assert torch.equal(around(), numbers() + 1)
    assert around.settled
    assert within.report is None


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


@pytest.mark.parametrize("objective", ["thunk", "graph"])
def test_where_launches_leave_one_plan_it_gets_a_time_and_the_next_process_finds_it(bench, objective):
    for status in ("tuned", "cached"):
        tuned = bench.tuned({32: 1.0, 16: 5.0}, objective=objective, n_warmup=None, n_repeat=None)
        tuned()
        assert (only(tuned.report).status, only(tuned.report).ms) == (status, 1.0)


def test_a_kernel_launched_again_by_backward_has_one_config_in_the_run(bench, kernel):
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


# ---- anew


def test_retune_ignores_what_memory_and_disk_hold(bench, tmp_cache):
    ms = {16: 3.0, 32: 1.0}
    kernel = bench.kernel(ms)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    assert tuned.settled
    ms[32] = 9.0
    tuned.retune()
    assert not tuned.settled
    bench.forget()
    tuned()
    assert bench.blocks() == [16, 32, 16]
    assert (only(tuned.report).status, block_of(kernel.cache[KEY])) == ("tuned", 16)
    assert ["BLOCK: 16" in entry["config"] for entry in entries(tmp_cache)] == [True]
    tuned()
    assert bench.blocks() == [16, 32, 16, 16]


# ---- modes


def test_mode_off_is_the_bare_function(bench, monkeypatch):
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "off")
    stock = Autotuner.run
    kernel = bench.kernel({16: 3.0, 32: 1.0}, do_bench=lambda call, quantiles: call() or [1.0] * 3)
    seen = []

    def thunk():
        seen.append(Autotuner.run)
        return launch(kernel, numbers())

    tuned = bench.tune(thunk)
    assert torch.equal(tuned(), numbers() + 1)
    assert seen == [stock]
    assert bench.clock.marks == 0
    assert tuned.report is None
    assert tuned.settled
    assert not Path(".autotune_logs").exists()


# ---- judged by whole runs


def plans_that_only_seem_fast(bench, **options):
    """Return a tuned function whose default plan (16, 16) is best, though each step away from it pays."""
    first, second = bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 3.0, 32: 1.0}, double)

    def thunk():
        launch(first, numbers())
        launch(second, numbers())
        bench.spend({(16, 16): 0.0, (32, 32): 50.0}.get(tuple(bench.blocks()[-2:]), 60.0))

    return bench.tune(thunk, objective="thunk", **options)


@pytest.mark.parametrize("max_runs", [5, 7, 10, 15, 18], ids="max_runs={}".format)
def test_a_plan_that_has_not_met_the_default_one_is_provisional_and_the_next_call_compares_them(
    bench, tmp_cache, max_runs
):
    tuned = plans_that_only_seem_fast(bench, max_runs=max_runs)
    tuned()
    assert {context.status for context in tuned.report.contexts} == {"partial"}
    assert list(tmp_cache.glob("*.json")) == []
    while not tuned.settled:
        began = len(bench.blocks())
        tuned()
        assert len(bench.blocks()) - began <= 2 * max_runs
        assert len(bench.blocks()) < 20 * max_runs
    assert bench.blocks()[-2:] == [16, 16]
    assert {context.status for context in tuned.report.contexts} == {"tuned"}
    assert any("the default plan is kept" in record.text for record in records(Note))


# ---- online


def test_online_keys_that_each_come_once_are_admitted_in_sixteen_runs_and_the_session_ends(bench, kernel):
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)), mode="online")
    for n in range(1, 200):
        tuned(n)
        if tuned.settled:
            break
    assert n <= 16 + 64 + 1  # the last one admitted is starved
    statuses = [context.status for context in tuned.report.contexts]
    assert (statuses.count("starved"), statuses.count("partial")) == (16, n - 16)


def test_new_keys_without_end_leave_few_under_way_and_one_that_comes_again_goes_on(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)), mode="online")
    tuned(64)
    under_way = []
    for n in range(65, 265):
        tuned(n)
        under_way.append(sum(context.status == "tuning" for context in tuned.report.contexts))
    assert max(under_way) <= ADMISSION_RUNS
    for _ in range(8):
        tuned(64)
    (first,) = [context for context in tuned.report.contexts if context.key[0] == 64]
    assert (first.status, winner(first)) == ("tuned", 32)


def test_online_a_slow_candidate_is_launched_once_a_run_beside_the_fastest_that_is_known(bench):
    kernel = bench.kernel({16: 2.0, 32: 5.0, 64: 1.0})
    tuned = bench.tune(
        lambda: [launch(kernel, numbers()) for _ in range(3)], mode="online", n_warmup=1, overhead=0.5
    )
    while not tuned.settled:
        tuned()
    blocks = bench.blocks()
    by_run = [blocks[first : first + 3] for first in range(0, len(blocks), 3)]
    assert [run for run in by_run if 32 in run] == [[32] * 3, [32, 16, 16]]
    assert sorted(only(tuned.report).timings.values()) == [1.0, 2.0, 5.0]


def test_online_a_slow_candidate_is_the_same_in_a_forward_pass_and_when_a_checkpoint_repeats_it(bench):
    kernel = bench.kernel({16: 2.0, 32: 5.0, 64: 1.0})

    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return launch(kernel, x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def step():
        x = numbers().requires_grad_()
        checkpoint(lambda: Added.apply(x).square().sum(), use_reentrant=False).backward()

    tuned = bench.tune(step, mode="online", n_warmup=1, overhead=0.5)
    while not tuned.settled:
        tuned()
    blocks = bench.blocks()
    assert blocks[::2] == blocks[1::2]
    assert blocks.count(32) == 4


def test_online_the_report_of_a_session_under_way_names_the_fastest_candidate_so_far(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()), mode="online", n_repeat=2, n_warmup=0)
    for _ in range(5):
        tuned()
    context = only(tuned.report)
    assert (context.status, winner(context), context.ms) == ("tuning", 32, 1.0)


def test_online_a_key_whose_first_samples_are_missing_is_tuned_all_the_same(bench):
    missing = iter([math.nan] * 5)
    kernel = bench.kernel({16: lambda launch: next(missing, 3.0), 32: 1.0, 64: 2.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()), mode="online", n_repeat=None, n_warmup=None)
    for _ in range(100):
        tuned()
    assert tuned.settled
    assert winner(only(tuned.report)) == 32
