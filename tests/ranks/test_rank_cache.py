"""What ranks find in memory and on disk when a session opens, and whose result stands where they differ."""

import json
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
import triton
from kernels_for_tests import KEY, Bench, add, double, launch, numbers, only, records
from msgspec import structs
from operation_runs import on_ranks
from rank_programs import blocks_of, own_cache, statuses_of, tune, tune_on_disk, tuned_step

from dist_autotune.storage import bundle
from dist_autotune.storage import winners as cache_module
from dist_autotune.storage.winners import LAUNCHED, EntryKey, Winners, read_bounded
from ranks import assert_all_ok, run_ranks


def fill(world_size, ms_of_rank=lambda rank: {16: 3.0, 32: 1.0, 64: 2.0}):
    """Let ranks tune and leave their entries behind."""
    results = run_ranks(lambda rank: tune_on_disk(rank, ms_of_rank(rank)), world_size)
    assert {result[2] for result in assert_all_ok(results)} == {"tuned"}


# Times under which 16 would win, were anything timed at all.
OTHER = {16: 1.0, 32: 3.0, 64: 2.0}


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_one_rank_of_a_host_stores_for_all_and_any_what_others_do_not_launch(tmp_cache, monkeypatch, mode):
    def program(rank, of_one_rank):
        stored = []
        put = cache_module.Winners.put
        monkeypatch.setattr(
            cache_module.Winners,
            "put",
            lambda self, *new, **kw: stored.append(len(new)) or put(self, *new, **kw),
        )
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        x = numbers(64 + rank * of_one_rank)
        step = tune(bench, lambda: launch(kernel, x), cache=True, mode=mode)
        while not step.settled:
            step()
        return sum(stored)

    assert assert_all_ok(run_ranks(lambda rank: program(rank, False), 3)) == [1, 0, 0]
    shutil.rmtree(tmp_cache)
    assert assert_all_ok(run_ranks(lambda rank: program(rank, True), 3)) == [1, 1, 1]
    assert len(list(tmp_cache.glob("*.json"))) == 3


def test_where_ranks_hold_different_winners_the_lowest_ranks_stands():
    fill(2)
    shutil.move(own_cache(1), "kept")
    shutil.rmtree(own_cache(0))
    fill(2, lambda rank: OTHER)  # rank 0 has 16, rank 1 gets its 32 back
    shutil.rmtree(own_cache(1))
    shutil.move("kept", own_cache(1))
    again = run_ranks(lambda rank: tune_on_disk(rank, {16: 9.0, 32: 9.0, 64: 1.0}), 2)
    assert assert_all_ok(again) == [(1, 16, "cached", [16])] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_cached_winner_that_fails_on_one_rank_is_used_by_none(failing):
    fill(2)

    def program(rank):
        return tune_on_disk(rank, OTHER, failures=[32] if rank == failing else [])

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero[:3] == one[:3]
    assert zero[1:3] == (16, "tuned")


def test_another_number_of_ranks_tunes_anew():
    fill(2)
    three = run_ranks(lambda rank: tune_on_disk(rank, OTHER), 3)
    assert {result[1:3] for result in assert_all_ok(three)} == {(16, "tuned")}
    alone = run_ranks(lambda rank: tune_on_disk(rank, {16: 3.0, 32: 3.0, 64: 1.0}), 1)
    assert [result[1:3] for result in assert_all_ok(alone)] == [(64, "tuned")]
    two = run_ranks(lambda rank: tune_on_disk(rank, OTHER), 2)
    assert {result[1:3] for result in assert_all_ok(two)} == {(32, "cached")}


def test_an_entry_of_the_key_of_one_rank_only():
    def program(rank):
        return tune_on_disk(rank, OTHER, x=numbers(64 + rank))

    assert {result[2] for result in assert_all_ok(run_ranks(program, 2))} == {"tuned"}
    shutil.rmtree(own_cache(1))
    # Rank 0 could stop after one run, rank 1 has to tune: both make the same number of runs.
    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == (4, 16, "cached", [16] * 4)
    assert one == (4, 16, "tuned", [16, 32, 64, 16])


# ---- what the cache holds besides


def test_with_a_thousand_foreign_entries_no_other_file_is_read_and_no_byte_more_is_sent(
    tmp_cache, monkeypatch
):
    def program(rank):
        read = []
        monkeypatch.setattr(
            cache_module,
            "read_bounded",
            lambda path, limit: read.append(path.name) or read_bounded(path, limit),
        )
        *_, status, _ = tune_on_disk(rank, OTHER, cache=True)
        events = [record for record in records(rank=rank) if record.event == "exchanged" and record.run == -1]
        return status, set(read), events[-1].sent_bytes

    assert {result[0] for result in assert_all_ok(run_ranks(program, 2))} == {"tuned"}
    (own,) = tmp_cache.glob("*.json")
    before = assert_all_ok(run_ranks(program, 2))
    assert [result[:2] for result in before] == [("cached", {own.name})] * 2
    known = json.loads(own.read_text())
    for n in range(1000):
        key = EntryKey(
            **{**known["key"], "key": f"foreign {n}", "candidates": tuple(known["key"]["candidates"])}
        )
        (tmp_cache / key.file_name).write_text(json.dumps({**known, "key": structs.asdict(key)}))
    assert assert_all_ok(run_ranks(program, 2)) == before
    shutil.rmtree(tmp_cache / LAUNCHED)  # as if another function had left them all
    anew = assert_all_ok(run_ranks(program, 2))
    assert [result[:2] for result in anew] == [("cached", {own.name})] * 2


@pytest.mark.parametrize("holder", [0, 1])
def test_an_entry_of_another_function_on_one_rank_only_is_used_by_all_from_the_second_run_on(holder):
    fill(2)
    for rank in range(2):
        shutil.rmtree(own_cache(rank) / LAUNCHED)
    shutil.rmtree(own_cache(1 - holder))
    results = assert_all_ok(run_ranks(lambda rank: tune_on_disk(rank, OTHER), 2))
    assert results[holder] == (2, 32, "cached", [32, 32])
    assert results[1 - holder] == (2, 32, "cached", [16, 32])


@pytest.mark.parametrize(("mode", "later"), [("cached", double), ("tune", add)], ids=["cached", "no watch"])
def test_without_votes_keys_of_later_calls_find_the_entries_of_any_rank(mode, later, monkeypatch):
    def program(rank, **options):
        bench = Bench()
        kernels = {function: bench.kernel({16: 3.0, 32: 1.0}, function) for function in (add, later)}
        step = tune(bench, lambda f, n: launch(kernels[f], numbers(n)), cache=own_cache(rank), **options)
        for function, n in ((add, 64), (later, 8)):
            step(function, n), step(function, n)
        return bench.blocks()[-2:], bench.blocks(n=8)

    assert_all_ok(run_ranks(program, 2))
    shutil.rmtree(own_cache(0) / LAUNCHED)
    shutil.rmtree(own_cache(1))
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", mode)
    again = run_ranks(lambda rank: program(rank, watch=mode == "cached"), 2)
    assert assert_all_ok(again) == [([32, 32], [32, 32])] * 2


# ---- in memory


@pytest.mark.parametrize("watch", [True, False], ids=["watched", "unwatched"])
def test_memory_that_runs_out_once_in_a_settled_launch_parts_no_ranks(watch):
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 2.0, 64: 1.0})
        step = tune(bench, lambda: launch(kernel, x), watch=watch)
        step()
        step()
        bench.forget()
        if rank == 1:
            run, errors = kernel.fn.run, [torch.OutOfMemoryError("CUDA out of memory")]

            def flaky(*args, **kwargs):
                if errors:
                    raise errors.pop()
                return run(*args, **kwargs)

            kernel.fn.run = flaky
        outputs = [step() for _ in range(4)]
        assert all(torch.equal(y, x + 1) for y in outputs)
        return blocks_of(step), bench.blocks(), step.settled

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == ({"add64": 64}, [64] * 4, True)
    assert one == ({"add64": 64}, [16, 64, 64, 64], True)


@pytest.mark.parametrize("by", ["stock", "a session of one rank", "another group"])
@on_ranks(4)
def test_what_the_ranks_of_this_group_have_not_agreed_does_not_count(rank, by):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    bench, x = Bench(), numbers()
    kernel = bench.kernel({16: 1.0, 32: 2.0, 64: 3.0})
    if by == "stock":
        kernel.cache[KEY] = kernel.configs[1 + rank % 2]
    elif by == "a session of one rank":
        own = bench.kernel({16: 1.0, 32: 0.1 if rank else 5.0})
        own.cache = kernel.cache
        warnings.filterwarnings("ignore", message=".*is tuned without is_dist=True")
        bench.tune(lambda: launch(kernel, x), cache=False)()
    else:
        kernel.fn.ms = {16: 3.0, 32: 1.0 + 4 * (rank % 2), 64: 2.0}
        tune(bench, lambda: launch(kernel, x), group=groups[rank % 2])()
        assert kernel.cache[KEY].kwargs["BLOCK"] == (64 if rank % 2 else 32)
        kernel.fn.ms = {16: 1.0, 32: 2.0, 64: 3.0}
    step = tune(bench, lambda: launch(kernel, x))
    step()
    assert (statuses_of(step), blocks_of(step), kernel.cache[KEY].kwargs) == (
        {"add64": "tuned"},
        {"add64": 16},
        {"BLOCK": 16},
    )


# ---- after an upgrade


OLD_MS = {16: 5.0, 32: 1.0, 64: 3.0, 128: 2.0, 256: 4.0}  # 32, 128 and 64 are its best
NEW_MS = {16: 0.5, 32: 5.0, 64: 3.0, 128: 4.0, 256: 0.5}
SAID = f"3 of 5 candidates, the best with Triton {triton.__version__}; raced again after an upgrade"


def tuned_on(rank, ms, version, **options):
    """Tune with a version of Triton, each run with a collective; return launches, winner and remark."""
    triton.__version__ = version
    bench, x = Bench(), numbers()
    kernel = bench.kernel(ms)

    def thunk():
        y = launch(kernel, x)
        dist.all_reduce(y)  # what a rank that makes fewer runs would leave the others in

    step = tune(bench, thunk, cache=own_cache(rank), **options)
    while not step.settled:
        step()
    return bench.blocks(), blocks_of(step)["add64"], only(step.report).again


@pytest.mark.parametrize("mode", ["replay", "online"])
@pytest.mark.parametrize("warm", [(0,), (1,), (0, 1)], ids=lambda warm: "-".join(map(str, warm)))
def test_all_ranks_race_the_best_of_an_old_entry_that_some_of_them_hold(warm, mode):
    assert_all_ok(run_ranks(lambda rank: tuned_on(rank, OLD_MS, triton.__version__), 2))
    for rank in {0, 1} - set(warm):
        shutil.rmtree(own_cache(rank))
    zero, one = assert_all_ok(run_ranks(lambda rank: tuned_on(rank, NEW_MS, "99.0", mode=mode), 2))
    assert zero[1:] == one[1:] == (64, SAID)
    assert len(zero[0]) == len(one[0])
    assert zero[0][1:] == one[0][1:]  # in its first run a rank knows of its own disk alone
    assert set((zero, one)[warm[0]][0]) == {32, 64, 128}


# ---- with which config ranks begin a new key


def sweep(rank, sizes, **options):
    """Tune each size in turn; return the BLOCKs launched for the last one, and its winner."""
    step, bench = tuned_step({16: 3.0, 32: 1.0 + rank, 64: 9.0}, **options)
    for n in sizes:
        step(n)
    return bench.blocks(n=sizes[-1]), blocks_of(step)


def test_all_ranks_begin_a_new_key_with_the_winner_of_the_nearest():
    results = run_ranks(lambda rank: sweep(rank, [64, 128]), 2)
    assert assert_all_ok(results) == [([32, 32, 16, 64, 32], {"add128": 32})] * 2


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
