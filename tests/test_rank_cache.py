"""What ranks find in memory and on disk when a session opens, and where they must not go on at all."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import dist_autotune.domain
from dist_autotune import CacheWarning, RankMismatch
from kernels_for_tests import EMULATIONS, Bench, launch, numbers, out_of_resources
from rank_programs import blocks_of, ending, statuses_of, tune
from ranks import assert_all_ok, run_ranks


def own_cache(rank) -> Path:
    """Return a cache directory of this rank's own, as on another host."""
    return Path(f"cache-{rank}").absolute()


def tune_on_disk(rank, ms, *, failures=(), x=None, **options):
    """Tune one kernel with this rank's own cache; return runs, winner, status and launches."""
    bench, x = Bench(), numbers() if x is None else x
    kernel = bench.kernel(ms)
    kernel.fn.failures.update(dict.fromkeys(failures, out_of_resources))
    step = tune(bench, lambda: launch(kernel, x), **{"cache": own_cache(rank), **options})
    assert torch.equal(step(), x + 1)
    (status,) = statuses_of(step).values()
    (winner,) = blocks_of(step).values()
    return step.report.runs, winner, status, bench.blocks()


def fill(world_size, ms_of_rank=lambda rank: {16: 3.0, 32: 1.0, 64: 2.0}):
    """Let ranks tune and leave their entries behind."""
    results = run_ranks(lambda rank: tune_on_disk(rank, ms_of_rank(rank)), world_size)
    assert {result[2] for result in assert_all_ok(results)} == {"tuned"}


def entries(rank) -> list[Path]:
    return sorted(own_cache(rank).glob("*.json"))


# Times under which 16 would win, were anything timed at all.
OTHER = {16: 1.0, 32: 3.0, 64: 2.0}


def test_every_rank_stores_the_winner_and_the_next_processes_start_from_it():
    fill(2)
    assert [len(entries(rank)) for rank in range(2)] == [1, 1]
    again = run_ranks(lambda rank: tune_on_disk(rank, OTHER), 2)
    assert assert_all_ok(again) == [(1, 32, "cached", [32])] * 2


def test_one_directory_for_all_ranks_holds_one_entry(tmp_cache):
    def program(rank):
        return tune_on_disk(rank, {16: 3.0, 32: 1.0}, cache=True)[1]

    assert assert_all_ok(run_ranks(program, 4)) == [32] * 4
    assert len(list(tmp_cache.glob("*.json"))) == 1
    assert assert_all_ok(run_ranks(program, 4)) == [32] * 4


@pytest.mark.parametrize("without", [(0,), (1,), (0, 2)], ids=str)
def test_an_entry_of_some_ranks_is_given_to_the_others(without):
    fill(3)
    for rank in without:
        shutil.rmtree(own_cache(rank))
    again = run_ranks(lambda rank: tune_on_disk(rank, OTHER), 3)
    assert assert_all_ok(again) == [(1, 32, "cached", [32])] * 3


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


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_entry_on_one_rank_is_a_warning_there(damaged):
    fill(2)
    entries(damaged)[0].write_text("{")

    def program(rank):
        if rank != damaged:
            return tune_on_disk(rank, OTHER)
        with pytest.warns(CacheWarning, match="damaged JSON"):
            return tune_on_disk(rank, OTHER)

    assert assert_all_ok(run_ranks(program, 2)) == [(1, 32, "cached", [32])] * 2


def test_a_warning_that_is_an_error_on_one_rank_releases_the_other():
    fill(2)
    entries(1)[0].write_text("{")
    zero, one = assert_all_ok(run_ranks(lambda rank: ending(lambda: tune_on_disk(rank, OTHER)), 2))
    assert one.startswith("CacheWarning: Ignored")
    assert zero.startswith("PeerFailed: Rank 1 failed, so this call ends on rank 0 too: CacheWarning")


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


def test_ordinal_agreement_finds_its_entries():
    def program(rank):
        ms = {16: 5.0 * rank + 1, 32: 2.0}
        return tune_on_disk(rank, ms, x=numbers(64 + rank), agree="ordinal")[1:3]

    assert assert_all_ok(run_ranks(program, 2)) == [(32, "tuned")] * 2
    assert assert_all_ok(run_ranks(program, 2)) == [(32, "cached")] * 2
    shutil.rmtree(own_cache(1))
    assert assert_all_ok(run_ranks(program, 2)) == [(32, "cached")] * 2


# ---- in memory


def test_a_second_function_takes_over_what_the_first_has_agreed():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0 + rank, 32: 1.5})
        tune(bench, lambda: launch(kernel, x))()
        bench.forget()
        second = tune(bench, lambda: launch(kernel, x))
        second()
        return second.report.runs, statuses_of(second), bench.blocks()

    assert assert_all_ok(run_ranks(program, 2)) == [(1, {"add64": "cached"}, [32])] * 2


@pytest.mark.parametrize("without", [0, 1])
def test_a_result_that_one_rank_has_lost_is_given_to_it(without):
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        tune(bench, lambda: launch(kernel, x))()
        if rank == without:
            kernel.cache.clear()
        second = tune(bench, lambda: launch(kernel, x))
        second()
        return second.report.runs, statuses_of(second), blocks_of(second), kernel.cache[numbers_key(x)].kwargs

    expected = {"add64": "cached"}, {"add64": 32}, {"BLOCK": 32}
    for runs, *others in assert_all_ok(run_ranks(program, 2)):
        assert runs == 2  # in the first, the rank without it launched its first config
        assert tuple(others) == expected


def test_a_result_that_fails_on_the_rank_it_is_given_to_is_tuned_anew():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
        tune(bench, lambda: launch(kernel, x))()
        if rank == 1:
            kernel.cache.clear()
            kernel.fn.failures[32] = out_of_resources
        second = tune(bench, lambda: launch(kernel, x))
        second()
        return second.report.runs, statuses_of(second), blocks_of(second), kernel.cache[numbers_key(x)].kwargs

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert zero[1:] == ({"add64": "tuned"}, {"add64": 64}, {"BLOCK": 64})


def test_a_config_that_fails_after_all_is_settled_is_banned_on_all_ranks():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
        step = tune(bench, lambda: launch(kernel, x))
        step()
        if rank == 1:
            kernel.fn.failures[32] = out_of_resources
        bench.forget()
        outputs = [step() for _ in range(3)]
        assert all(torch.equal(y, x + 1) for y in outputs)
        return blocks_of(step), bench.blocks()[-1], step.settled

    assert assert_all_ok(run_ranks(program, 2)) == [({"add64": 64}, 64, True)] * 2


def numbers_key(x):
    return (x.numel(), "torch.float32", "torch.float32")


@pytest.mark.parametrize("by", ["stock", "a session of one rank", "another group"])
def test_what_the_ranks_of_this_group_have_not_agreed_does_not_count(by):
    def program(rank):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0, 32: 2.0, 64: 3.0})
        if by == "stock":
            kernel.cache[numbers_key(x)] = kernel.configs[1 + rank % 2]
        elif by == "a session of one rank":
            own = bench.kernel({16: 1.0, 32: 0.1 if rank else 5.0})
            own.cache = kernel.cache
            bench.tune(lambda: launch(kernel, x), cache=False)()
        else:
            kernel.fn.ms = {16: 3.0, 32: 1.0 + 4 * (rank % 2), 64: 2.0}
            tune(bench, lambda: launch(kernel, x), group=groups[rank % 2])()
            assert kernel.cache[numbers_key(x)].kwargs["BLOCK"] == (64 if rank % 2 else 32)
            kernel.fn.ms = {16: 1.0, 32: 2.0, 64: 3.0}
        step = tune(bench, lambda: launch(kernel, x))
        step()
        return statuses_of(step), blocks_of(step), kernel.cache[numbers_key(x)].kwargs

    assert assert_all_ok(run_ranks(program, 4)) == [({"add64": "tuned"}, {"add64": 16}, {"BLOCK": 16})] * 4


@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "on one rank"])
def test_retune_ignores_memory_and_disk(everywhere):
    def program(rank):
        bench, x, ms = Bench(), numbers(), {16: 3.0, 32: 1.0}
        kernel = bench.kernel({block: lambda launch: ms[launch.block] for block in ms})
        step = tune(bench, lambda: launch(kernel, x), cache=own_cache(rank))
        step()
        ms.update({16: 1.0, 32: 3.0})
        before = blocks_of(step)
        if everywhere or rank == 1:
            step.retune()
        endings = [ending(step).partition("(")[0].partition(":")[0] for _ in range(2)]
        return before, endings, blocks_of(step), statuses_of(step)

    first = "returned tensor" if everywhere else "RankMismatch"  # the others' settled call meets an opening
    expected = ({"add64": 32}, [first, "returned tensor"], {"add64": 16}, {"add64": "tuned"})
    assert assert_all_ok(run_ranks(program, 2)) == [expected] * 2


def test_ranks_that_remember_different_results_drop_them():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0, 32: 2.0})
        step = tune(bench, lambda n: launch(kernel, numbers(n)))
        step(64)
        (context,) = step._calls.domain.tuning.contexts.values()
        if rank:  # as after a Ctrl-C that one rank saw an exchange later than the others
            context.winner = 1
        step(8)  # a new key: the next call tunes
        step(8)
        return [step(64).sum().item() == (x + 1).sum().item(), bench.blocks(n=64)[-1]]

    assert assert_all_ok(run_ranks(program, 2)) == [[True, 16]] * 2


# ---- ranks that do not run the same thing


def test_options_that_differ():
    def program(rank):
        return ending(lambda: tune_on_disk(rank, OTHER, n_repeat=2 if rank == 2 else 1))

    for text in assert_all_ok(run_ranks(program, 3)):
        assert text.startswith(
            "RankMismatch: ranks differ in the option n_repeat: rank 0: 1; rank 2: 2. All ranks must run"
        )


@pytest.mark.parametrize(
    ("what", "replace"),
    [
        ("the version of dist_autotune", (dist_autotune.domain, "__version__", "0.0.0")),
        ("the version of Triton", (triton, "__version__", "3.5.9")),
        ("DIST_AUTOTUNE_MODE", (os.environ, "DIST_AUTOTUNE_MODE", "cached")),
    ],
    ids=["package", "triton", "mode"],
)
def test_versions_that_differ(what, replace, monkeypatch):
    def program(rank):
        if rank == 1:
            where, name, value = replace
            (monkeypatch.setitem if where is os.environ else monkeypatch.setattr)(where, name, value)
        with pytest.raises(RankMismatch, match=f"ranks differ in {what}: rank 0: .*; rank 1: ") as caught:
            tune_on_disk(rank, OTHER)
        return str(caught.value)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one


def test_functions_of_different_source_or_name():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel(OTHER)

        def one(x):
            return launch(kernel, x)

        def other(x):
            return 0 + launch(kernel, x)

        by_name = ending(lambda: tune(bench, other if rank else one)(x))
        by_source = ending(lambda: tune(bench, other if rank else one, name="step")(x))
        return by_name, by_source

    for by_name, by_source in assert_all_ok(run_ranks(program, 2)):
        assert by_name.startswith("RankMismatch: ranks differ in the tuned function: rank 0: ")
        assert by_source.startswith("RankMismatch: ranks differ in the source of the tuned function: ")


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale(x):
    return x + {one}

@triton.jit
def bump(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, scale(tl.load(x_ptr + offs, mask=offs < n)) + {two}, mask=offs < n)
"""


def bump_of(rank, one, two):
    """Return the `@jit` function of a module that has another version on every rank."""
    path = Path(f"host-{rank}/bump_module.py").absolute()
    path.parent.mkdir()
    path.write_text(KERNEL.format(one=one, two=two))
    spec = __import__("importlib.util").util.spec_from_file_location("bump_module", path)
    module = __import__("importlib.util").util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.bump


@pytest.mark.parametrize("where", ["kernel", "helper"])
@pytest.mark.parametrize("late", [False, True], ids=["same run", "another run"])
def test_kernels_of_different_source(where, late):
    def program(rank):
        bench, x, runs = Bench(), numbers(), []
        function = bump_of(rank, one=rank if where == "helper" else 0, two=rank if where == "kernel" else 0)
        kernel = bench.kernel({16: 1.0, 32: 2.0}, function, interpreted=True)
        common = bench.kernel({16: 1.0, 32: 2.0, 64: 3.0})

        def thunk():
            runs.append(None)
            launch(common, x)
            if rank == 0 or len(runs) > 1 or not late:
                launch(kernel, x)

        return ending(tune(bench, thunk))

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    name = "bump" if where == "kernel" else "scale"
    assert zero.startswith(f"RankMismatch: ranks differ in the source of kernel bump_module.{name}: rank 0: ")


def test_kernels_that_only_look_alike_may_differ():
    # Two closures of one factory, over different helpers: the same name, and each rank launches its own.
    def program(rank):
        bench, x = Bench(), numbers()
        functions = applying(plus_one, 1), applying(plus_two, 2)
        kernels = [bench.kernel({16: 1.0 + n, 32: 1.5}, function) for n, function in enumerate(functions)]
        step = tune(bench, lambda: launch(kernels[rank], x))
        assert torch.equal(step(), x + 1 + rank)
        return list(blocks_of(step).values())

    assert assert_all_ok(run_ranks(program, 2)) == [[16], [32]]


@triton.jit
def plus_one(x):
    return x + 1


@triton.jit
def plus_two(x):
    return x + 2


def applying(helper, plus):
    @triton.jit
    def apply(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, helper(tl.load(x_ptr + offs, mask=offs < n)), mask=offs < n)

    EMULATIONS[apply] = lambda x, y: x + plus
    return apply


def test_the_cached_mode_never_tries_anything_on_any_rank(monkeypatch):
    fill(2)
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")

    def program(rank):
        bench = Bench()
        kernel = bench.kernel(OTHER)
        step = tune(bench, lambda n: launch(kernel, numbers(n)), cache=own_cache(rank))
        step(64), step(64), step(8), step(8)
        return bench.blocks()

    assert assert_all_ok(run_ranks(program, 2)) == [[32, 32, 16, 16]] * 2


def test_an_entry_tells_for_how_many_ranks_it_holds():
    fill(2)
    entry = json.loads(entries(0)[0].read_text())
    assert entry["key"]["world_size"] == 2
    assert entry["ms"] == 1.0
