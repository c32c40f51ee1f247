"""Launches that come and go: kernels and keys that vary between runs, keys that a later call brings."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_for_tests import F32, block_of, double, entries, launch, no_bench, numbers, only, records, winner

from dist_autotune.logs.records import ContextAdmitted, ContextSettled, SessionClosed


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


# ---- a new key begins with the winner of the nearest, and is tuned like any other


# BLOCK -> ms: 32 wins for few numbers, 64 for many.
SMALL_OR_LARGE = {
    16: 3.0,
    32: lambda launch: 1.0 if launch.n < 500 else 2.0,
    64: lambda launch: 2.0 if launch.n < 500 else 1.0,
}


@pytest.fixture
def tuned(bench):
    """A function with the keys 64, where 32 wins, and 1024, where 64 does."""
    kernel = bench.kernel(SMALL_OR_LARGE)
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)))
    tuned(64), tuned(1024)
    bench.forget()
    return tuned


@pytest.mark.parametrize(("n", "block"), [(100, 32), (255, 32), (260, 64), (4096, 64)])
def test_a_new_key_is_first_launched_with_the_winner_of_the_nearest_key(bench, tuned, n, block):
    assert torch.equal(tuned(n), numbers(n) + 1)
    assert bench.blocks()[0] == block


def test_it_is_tried_against_the_first_config_and_all_others(bench, tuned):
    tuned(400)  # as 1024: 64, which loses here
    assert bench.blocks() == [64, 64, 16, 32, 32]
    assert block_of(only(tuned.report).config) == 32
    assert sorted(only(tuned.report).timings.values()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_in_the_cached_mode_keys_without_a_result_are_told_as_untuned_from_the_first_call_on(
    bench, tuned, mode, monkeypatch
):
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
    fresh, plain = bench.kernel(SMALL_OR_LARGE, do_bench=no_bench), bench.kernel({16: 1.0}, double)

    def thunk(n):
        launch(plain, numbers(n))
        launch(fresh, numbers(n))

    again = bench.tune(thunk, mode=mode)
    for n, untuned in ((1024, []), (100, [100]), (100, [100]), (200, [100, 200])):
        again(n)
        assert [(kernel, key[0]) for kernel, key, _ in again.untuned] == [("add", n) for n in untuned]
    assert {reason for *_, reason in again.untuned} == {"DIST_AUTOTUNE_MODE=cached"}
    first = bench.tune(lambda: thunk(300), mode=mode)
    first()
    assert [key[0] for _, key, _ in first.untuned] == [300]


def test_with_four_keys_told_a_new_one_begins_where_they_expect_the_fastest(bench):
    """The nearest key's winner is its own exception: all the others, and the field, say 32."""
    ms = {16: 3.0, 32: 1.0, 64: lambda launch: 0.99 if launch.n == 900 else 2.0}
    kernel = bench.kernel(ms)
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)))
    for n in (700, 800, 900):
        tuned(n)
    bench.forget()
    tuned(920)
    assert bench.blocks(n=920)[0] == 64  # three keys: the nearest
    bench.forget()
    tuned(890)
    assert bench.blocks(n=890)[0] == 32
    *_, admitted = records(ContextAdmitted)
    assert (admitted.like, admitted.candidates[admitted.incumbent].split(",")[0]) == ("", "BLOCK: 32")


# BLOCK -> ms of 14 blocks: 64 wins, the farther the slower, with every n.
MANY = {8 * step: 1.0 + 0.25 * abs(step - 8) for step in range(1, 15)}


@pytest.mark.parametrize(("search", "most"), [("expected", 3), ("racing", 14), ("auto", 14)])
def test_expected_tries_what_four_other_keys_let_expect_something_of(bench, search, most):
    kernel = bench.kernel(MANY)
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)), search=search, n_repeat=None, n_warmup=None)
    for n in (64, 128, 256, 512):
        tuned(n)
        context = only(tuned.report)
        assert block_of(context.config) == 64
        assert (len(context.timings) == 14) == (context.untried == "") == (search != "expected")
    bench.forget()
    tuned(1024)
    context = only(tuned.report)
    assert (len(context.timings), block_of(context.config)) == (most, 64)
    assert set(bench.blocks()) == {block_of_text(text) for text in context.timings}
    told = context.untried
    assert told.startswith("tried 3 of 14; the rest was expected at least") == (search == "expected")
    assert told in str(tuned.report)
    assert told in Path(".autotune_logs/rank-0.log").read_text()


def block_of_text(text):
    return int(text.split(",")[0].removeprefix("BLOCK: "))
