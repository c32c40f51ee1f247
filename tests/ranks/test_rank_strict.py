"""DIST_AUTOTUNE_MODE=strict on several ranks: one that lacks a result raises, and nobody waits for it."""

import shutil

import pytest
from kernels_for_tests import Bench, launch, numbers
from operation_runs import on_ranks
from rank_programs import ending, own_cache, tune

from dist_autotune.storage.winners import LAUNCHED
from ranks import assert_all_ok, run_ranks


def step_of(rank, **options):
    bench = Bench()
    one, two = bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 3.0, 32: 1.0}, name="two")

    def thunk(sizes, also=()):
        return [launch(kernel, numbers(n)) for kernel, ns in ((one, sizes), (two, also)) for n in ns]

    return bench, tune(bench, thunk, cache=own_cache(rank), **options)


@pytest.fixture
def shipped(monkeypatch):
    """Let two ranks tune the keys 64 and 1024 of two kernels, then be strict."""
    assert_all_ok(run_ranks(lambda rank: step_of(rank)[1]([64, 1024], [64]) and None, 2))
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "strict")


def kind(call):
    return ending(call).partition("(")[0].partition(":")[0].partition("[")[0]


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("launched", [True, False], ids=["by this function", "by another"])
def test_results_of_one_rank_hold_for_all_in_every_call(shipped, holder, launched):
    shutil.rmtree(own_cache(1 - holder))
    if not launched:
        shutil.rmtree(own_cache(holder) / LAUNCHED)

    def program(rank):
        bench, step = step_of(rank)
        step([64])
        step([64], [64])  # a kernel that the session has not seen
        return bench.blocks()

    assert assert_all_ok(run_ranks(program, 2)) == [[32] * 3] * 2


@pytest.mark.parametrize("lacking", [[0], [1], [0, 1]], ids=str)
def test_in_the_first_call_the_ranks_that_lack_a_result_raise_and_the_others_learn_it(shipped, lacking):
    def program(rank):
        bench, step = step_of(rank)
        first = ending(lambda: step([100 if rank in lacking else 64]))
        return first, kind(lambda: step([64])), bench.blocks()

    results = assert_all_ok(run_ranks(program, 2))
    for rank, (first, second, blocks) in enumerate(results):
        error = "NotTuned: add[n=100, x_ptr.dtype=float32, y_ptr.dtype=float32] is not tuned"
        if rank not in lacking:
            error = f"PeerFailed: rank {lacking[0]} failed, so this call ends on rank {rank} too: {error}"
        assert first.startswith(error)
        assert "Nearest tuned keys: [n=64, " in first
        assert second == "returned "
        assert blocks == ([32] if rank in lacking else [32, 32])


@pytest.mark.parametrize("n", [64, 100])
def test_results_of_another_number_of_ranks_are_told(shipped, n):
    assert ", but for 2 ranks, not 1. Nearest" in ending(lambda: step_of(0, is_dist=False)[1]([n]))


@on_ranks(2)
def test_in_a_settled_call_all_that_lack_a_result_raise_and_stay_in_step(rank, shipped):
    bench, step = step_of(rank)
    step([64])
    errors = [kind(lambda: step([100])) for _ in range(3)]
    another = tune(bench, lambda: [launch(bench.kernel({16: 3.0}), numbers())])
    assert (errors, kind(lambda: step([64])), kind(another)) == (["NotTuned"] * 3, "returned ", "returned ")
