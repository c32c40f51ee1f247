"""objective='thunk': a plan is judged by the time of the whole run, and has to beat the default one."""

from __future__ import annotations

import pytest
from kernels_for_tests import double, launch, numbers, only, records, winner

from dist_autotune.logs.records import Note


def test_objective_thunk_adopts_a_plan_that_beats_the_default(bench):
    tuned = bench.tuned({16: 2.0, 32: 1.0}, objective="thunk")
    tuned()
    assert winner(only(tuned.report)) == 32
    duel = bench.blocks()[4:-1]
    assert duel == [32, 16] * (len(duel) // 2)
    assert len(duel) >= 6


def test_objective_thunk_keeps_the_default_plan_when_it_is_not_beaten_and_says_so(bench):
    kernel = bench.kernel({16: 2.0, 32: 1.0})

    def thunk():
        launch(kernel, numbers())
        if len(bench.blocks()) > 4 and bench.blocks()[-1] == 32:
            bench.spend(5.0)  # what looked fast when tuned alone is not in the final comparison

    tuned = bench.tune(thunk, objective="thunk")
    tuned()
    assert winner(only(tuned.report)) == 16
    assert bench.blocks()[-1] == 16
    assert any("the default plan is kept" in record.text for record in records(Note))
    assert kernel.best_config.kwargs["BLOCK"] == 16


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
