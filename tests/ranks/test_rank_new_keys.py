"""With which config ranks begin a new key: the same one on all of them, from what all have agreed on."""

import shutil

import pytest
from kernels_for_tests import Bench, launch, numbers
from rank_programs import blocks_of, own_cache, tune

from dist_autotune.storage import bundle
from dist_autotune.storage.winners import Winners
from ranks import assert_all_ok, run_ranks


def sweep(rank, sizes, **options):
    """Tune each size in turn; return the BLOCKs launched for the last one, and its winner."""
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0 + rank, 64: 9.0})
    step = tune(bench, lambda n: launch(kernel, numbers(n)), **options)
    for n in sizes:
        step(n)
    return bench.blocks(n=sizes[-1]), blocks_of(step)


def test_all_ranks_begin_a_new_key_with_the_winner_of_the_nearest():
    results = run_ranks(lambda rank: sweep(rank, [64, 128]), 2)
    assert assert_all_ok(results) == [([32, 32, 16, 64, 32], {"add128": 32})] * 2


@pytest.mark.parametrize("holder", [0, 1])
def test_entries_of_one_rank_that_the_session_has_opened_are_neighbours_on_all(holder):
    assert_all_ok(run_ranks(lambda rank: sweep(rank, [64], cache=own_cache(rank)), 2))
    shutil.rmtree(own_cache(1 - holder))
    again = run_ranks(lambda rank: sweep(rank, [128], cache=own_cache(rank)), 2)
    assert [blocks[0] for blocks, _ in assert_all_ok(again)] == [32, 32]


def test_an_entry_that_the_ranks_have_not_agreed_on_is_no_neighbour():
    assert_all_ok(run_ranks(lambda rank: sweep(rank, [64], cache=own_cache(rank)), 2))
    shutil.rmtree(own_cache(0))
    again = run_ranks(lambda rank: sweep(rank, [128], cache=own_cache(rank), name="another"), 2)
    assert [blocks[0] for blocks, _ in assert_all_ok(again)] == [16, 16]


@pytest.mark.parametrize(("size", "mode"), [(64, "strict"), (128, "cached"), (128, "tune")])
def test_what_one_rank_has_imported_all_ranks_begin_with(size, mode, monkeypatch):
    assert_all_ok(run_ranks(lambda rank: sweep(rank, [64], cache=own_cache(rank)), 2))
    entries = list(Winners(own_cache(0)).entries())
    for rank in range(2):
        shutil.rmtree(own_cache(rank))
    bundle.merge(Winners(own_cache(1)), entries, replaces=False)
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", mode)
    again = run_ranks(lambda rank: sweep(rank, [size], cache=own_cache(rank), name="another"), 2)
    assert [blocks[0] for blocks, _ in assert_all_ok(again)] == [32, 32]
