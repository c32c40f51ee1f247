"""Launches that come and go: kernels and keys that vary between runs, keys that a later call brings."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kernels_for_tests import (
    F32,
    block_of,
    double,
    entries,
    launch,
    no_bench,
    numbers,
    only,
    records,
    winner,
)

from dist_autotune.logs.records import ContextSettled, SessionClosed


def test_a_kernel_launched_only_in_the_first_run_starves_and_that_is_said(bench):
    kernel = bench.kernel({16: 1.0, 32: 2.0})
    runs = itertools.count()
    tuned = bench.tune(lambda: launch(kernel, numbers()) if next(runs) == 0 else None, n_repeat=3)
    tuned()
    assert tuned.report.runs <= 5
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("starved", 16)
    (closed,) = records(SessionClosed)
    assert "no longer launched" in closed.warning
    assert "add" in closed.warning


def test_a_kernel_that_starves_before_the_whole_run_judges_it_reports_a_time_by_its_launches(bench):
    kernel, other = bench.kernel({16: 1.0, 32: 2.0}), bench.kernel({8: 4.0}, function=double)
    runs = itertools.count()

    def thunk():
        launch(other, numbers())
        if next(runs) == 0:
            launch(kernel, numbers())

    tuned = bench.tune(thunk, n_repeat=3, objective="thunk")
    tuned()
    context = only(tuned.report)
    assert (context.status, context.ms, context.judge) == ("starved", 1.0, "launch")


def test_a_caller_that_keeps_the_config_and_bypasses_the_autotuner_does_not_hang(bench):
    kernel = bench.kernel({16: 1.0, 32: 2.0})
    frozen: list[Any] = []

    def thunk():
        if not frozen:
            launch(kernel, numbers())
            frozen.append(kernel.best_config)
        y = torch.zeros(64)
        kernel.fn.run(numbers(), y, 64, grid=(8,), warmup=False, **frozen[0].all_kwargs())
        return y

    tuned = bench.tune(thunk, n_repeat=3)
    assert torch.equal(tuned(), numbers() + 1)
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("starved", 16)
    (closed,) = records(SessionClosed)
    assert closed.warning == tuned.report.warning
    assert closed.warning.startswith("no longer launched, settled with the samples so far: add[64")


@pytest.mark.parametrize("counts", [(1, 2, 3), (2, 0, 1), (3, 0)], ids=str)
def test_the_number_of_launches_may_vary_from_run_to_run(bench, counts):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    number = itertools.cycle(counts)
    tuned = bench.tune(lambda: [launch(kernel, numbers()) for _ in range(next(number))], n_repeat=2)
    tuned()
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", 32)
    assert set(only(tuned.report).timings.values()) == {1.0, 2.0, 3.0}


def test_a_new_key_in_every_run_ends_with_incumbents(bench):
    kernel = bench.kernel({16: 1.0, 32: 2.0})
    sizes = iter(range(64, 164))  # a run too many would raise instead of going on for ever
    tuned = bench.tune(lambda: launch(kernel, numbers(next(sizes))), n_repeat=5)
    tuned()
    assert tuned.report.runs < 60
    assert {context.status for context in tuned.report.contexts} == {"starved", "partial"}
    tuned()
    assert bench.blocks()[-1] == 16


def test_a_sweep_over_shapes_tunes_every_shape(bench, tmp_cache):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, do_bench=no_bench)
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)))
    shapes = range(16, 80, 8)
    for n in shapes:
        assert torch.equal(tuned(n), numbers(n) + 1)
        assert tuned.settled
    assert [block_of(kernel.cache[n, F32, F32]) for n in shapes] == [32] * len(shapes)
    assert [entry["config"].split(",")[0] for entry in entries(tmp_cache)] == ["BLOCK: 32"] * len(shapes)
    assert [record.status for record in records(ContextSettled)] == ["tuned"] * len(shapes)
