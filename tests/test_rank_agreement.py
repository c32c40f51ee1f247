"""Ranks that differ in times, keys, candidates and failures, and agree on every config all the same."""

import math

import pytest
import torch
import torch.distributed as dist

from dist_autotune import NoValidConfig, chronicle, launches, tunable
from kernels_for_tests import Bench, add, double, launch, numbers, out_of_resources, records
from rank_programs import blocks_of, ending, statuses_of, tune
from ranks import assert_all_ok, run_ranks


def tuned_by_times(*times, world_size=2, **options):
    """Return (runs, winner, launched blocks) of each rank; the configs take `times[rank]`."""

    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel(times[rank])
        step = tune(bench, lambda: launch(kernel, x), **options)
        assert torch.equal(step(), x + 1)
        (context,) = step.report.contexts
        return step.report.runs, context.config.kwargs["BLOCK"], bench.blocks()

    return assert_all_ok(run_ranks(program, world_size))


# ---- one decision, the same on all ranks


def test_the_slowest_rank_decides():
    # Each rank alone would take a config that is the worst for the other.
    results = tuned_by_times({16: 1.0, 32: 9.0, 64: 3.0}, {16: 9.0, 32: 1.0, 64: 3.0})
    assert results == [(4, 64, [16, 32, 64, 64])] * 2


@pytest.mark.parametrize(("reduce", "winner"), [("max", 32), ("mean", 16)])
def test_times_are_reduced_over_the_ranks(reduce, winner):
    times = {16: 1.0, 32: 4.0}, {16: 1.0, 32: 4.0}, {16: 6.0, 32: 4.0}
    results = tuned_by_times(*times, world_size=3, rank_reduce=reduce)
    assert results == [(3, winner, [16, 32, winner])] * 3


def test_the_agreed_time_is_in_the_report_and_in_stock_places_of_every_rank():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0 + rank, 32: 2.5 - rank})
        step = tune(bench, lambda: launch(kernel, x))
        step()
        (context,) = step.report.contexts
        stock = {config.kwargs["BLOCK"]: ms for config, ms in kernel.configs_timings.items()}
        return context.ms, sorted(context.timings.values()), kernel.cache[context.key].kwargs, stock

    ms = [2.0, 2.5]
    expected = (2.0, ms, {"BLOCK": 16}, {16: [2.0] * 3, 32: [2.5] * 3})
    assert assert_all_ok(run_ranks(program, 2)) == [expected] * 2


@pytest.mark.parametrize("search", ["exhaustive", "racing"])
@pytest.mark.parametrize("objective", ["kernel", "thunk"])
def test_runs_and_winners_are_equal_whatever_is_measured(search, objective):
    def program(rank):
        generator = torch.Generator().manual_seed(rank)
        noise = lambda launch: 1 + torch.rand((), generator=generator).item()  # noqa: E731
        bench, x = Bench(), numbers()
        first = bench.kernel({16: noise, 32: noise, 64: noise})
        second = bench.kernel({16: noise, 32: noise}, double)
        step = tune(bench, lambda: (launch(first, x), launch(second, x)), search=search, objective=objective)
        step()
        return step.report.runs, blocks_of(step), bench.blocks()

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero == one == two


@pytest.mark.parametrize(
    ("statistic", "winner"), [("median", 16), ("mean", 32), ("min", 64)], ids=lambda value: str(value)
)
def test_each_rank_tells_its_own_statistic(statistic, winner):
    samples = {16: [2, 2, 9], 32: [3, 3, 3], 64: [1, 8, 8]}

    def program(rank):
        bench, x = Bench(), numbers()
        taken = {block: iter([*values, values[0]]) for block, values in samples.items()}
        kernel = bench.kernel({block: lambda launch: next(taken[launch.block]) for block in samples})
        step = tune(bench, lambda: launch(kernel, x), n_repeat=3, statistic=statistic)
        step()
        return blocks_of(step)

    assert assert_all_ok(run_ranks(program, 2)) == [{"add64": winner}] * 2


def test_ties_go_to_the_incumbent_the_same_on_every_rank():
    assert (
        tuned_by_times({16: 2.0, 32: 2.0, 64: 2.0}, {16: 1.0, 32: 2.0, 64: 1.5})
        == [(4, 16, [16, 32, 64, 16])] * 2
    )


@pytest.mark.parametrize("sample", [math.nan, -1.0, 0.0, math.inf], ids=str)
def test_a_config_without_a_usable_sample_on_one_rank_cannot_win(sample):
    results = tuned_by_times({16: 1.0, 32: 5.0}, {16: sample, 32: 5.0})
    assert results == [(3, 32, [16, 32, 32])] * 2


def test_one_usable_sample_of_several_is_enough():
    def program(rank):
        bench, x = Bench(), numbers()
        odd = iter([math.nan, 1.0, 1.0])
        kernel = bench.kernel({16: lambda launch: next(odd) if rank else 1.0, 32: 5.0})
        step = tune(bench, lambda: launch(kernel, x), n_repeat=2)
        step()
        return blocks_of(step)

    assert assert_all_ok(run_ranks(program, 2)) == [{"add64": 16}] * 2


def test_a_rank_that_did_not_launch_in_the_last_run_still_has_its_say():
    # Rank 1 launches the kernel in every second run only, and is slow with the first config.
    def program(rank):
        bench, x, runs = Bench(), numbers(), []
        kernel = bench.kernel({16: 9.0 if rank else 1.0, 32: 4.0})

        def thunk():
            runs.append(None)
            if rank == 0 or len(runs) % 2:
                launch(kernel, x)

        step = tune(bench, thunk, n_repeat=2)
        step()
        (context,) = step.report.contexts
        return step.report.runs, context.config.kwargs["BLOCK"], context.ms

    assert assert_all_ok(run_ranks(program, 2)) == [(5, 32, 4.0)] * 2


# ---- keys and kernels that only some ranks have


def test_keys_of_some_ranks_are_agreed_among_those():
    def program(rank):
        bench = Bench()
        own = {0: 8, 1: 16, 2: 16}[rank]  # 64 is everybody's, 8 that of rank 0, 16 that of ranks 1 and 2
        ms = {
            64: {16: 2.0, 32: 1.0 + rank},  # rank 2: 3 ms
            8: {16: 1.0, 32: 2.0},  # with the times of 16 beside its own, rank 0 would take 32
            16: {16: 2.0 + rank, 32: 3.5},  # rank 2: 4 ms
        }
        by_key = lambda launch: ms[launch.n][launch.block]  # noqa: E731
        kernel = bench.kernel({16: by_key, 32: by_key})

        def thunk():
            launch(kernel, numbers(own))
            launch(kernel, numbers(64))

        step = tune(bench, thunk)
        step()
        return step.report.runs, blocks_of(step), bench.blocks(n=own), bench.blocks(n=64)

    zero, *others = assert_all_ok(run_ranks(program, 3))
    assert zero == (3, {"add64": 16, "add8": 16}, [16, 32, 16], [16, 32, 16])
    assert others == [(3, {"add64": 16, "add16": 32}, [16, 32, 32], [16, 32, 16])] * 2


def test_a_rank_with_nothing_to_launch_makes_the_same_runs():
    def program(rank):
        bench, x, runs = Bench(), numbers(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        step = tune(bench, lambda: runs.append(launch(kernel, x) if rank else None))
        step()
        return step.report.runs, len(runs), blocks_of(step)

    assert assert_all_ok(run_ranks(program, 2)) == [(3, 3, {}), (3, 3, {"add64": 32})]


def test_ranks_may_launch_in_different_order_and_number():
    def program(rank):
        bench, x = Bench(), numbers()
        first = bench.kernel({16: 1.0 + rank, 32: 1.5})
        second = bench.kernel({16: 3.0, 32: 2.0 - rank}, double)

        def thunk():
            if rank:
                launch(second, x), launch(second, x), launch(first, x)
            else:
                launch(first, x), launch(second, x)

        step = tune(bench, thunk)
        step()
        return step.report.runs, blocks_of(step)

    assert assert_all_ok(run_ranks(program, 2)) == [(3, {"add64": 32, "double64": 32})] * 2


def test_autotuners_of_one_function_are_told_apart_in_any_order():
    def program(rank):
        bench, x = Bench(), numbers()
        small = bench.kernel({4: 1.0, 8: 2.0}, name="small")
        large = bench.kernel({32: 2.0, 64: 1.0}, name="large")
        order = [small, large] if rank else [large, small]
        step = tune(bench, lambda: [launch(kernel, x) for kernel in order])
        step()
        return step.report.runs, bench.blocks("small"), bench.blocks("large")

    assert assert_all_ok(run_ranks(program, 2)) == [(3, [4, 8, 4], [32, 64, 64])] * 2


def test_an_autotuner_that_only_one_rank_launches_does_not_confuse_another_of_its_function():
    def program(rank):
        bench, x = Bench(), numbers()
        small = bench.kernel({4: 1.0, 8: 2.0}, name="small")
        large = bench.kernel({32: 2.0 + 3 * rank, 64: 4.0}, name="large")
        order = [large] if rank else [small, large]
        step = tune(bench, lambda: [launch(kernel, x) for kernel in order])
        step()
        return step.report.runs, bench.blocks("small"), bench.blocks("large")

    assert assert_all_ok(run_ranks(program, 2)) == [(3, [4, 8, 4], [32, 64, 64]), (3, [], [32, 64, 64])]


def test_a_key_met_late_on_one_rank_is_tuned_in_the_same_session():
    def program(rank):
        bench, runs = Bench(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def thunk():
            runs.append(None)
            launch(kernel, numbers(64))
            if rank == 1 and len(runs) > 1:
                launch(kernel, numbers(8))

        step = tune(bench, thunk)
        step()
        return step.report.runs, blocks_of(step)

    assert assert_all_ok(run_ranks(program, 2)) == [(4, {"add64": 32}), (4, {"add64": 32, "add8": 32})]


# ---- keys that hold a rank or a local size


@pytest.mark.parametrize(("agree", "winners"), [("key", (16, 32)), ("ordinal", (32, 32))])
def test_contexts_of_local_sizes_agree_by_their_order(agree, winners):
    def program(rank):
        bench = Bench()
        kernel = bench.kernel({16: 5.0 if rank else 1.0, 32: 2.0})
        step = tune(bench, lambda: launch(kernel, numbers(64 + rank)), agree=agree)
        step()
        (context,) = step.report.contexts
        return step.report.runs, context.key[0], context.config.kwargs["BLOCK"]

    assert assert_all_ok(run_ranks(program, 2)) == [(3, 64, winners[0]), (3, 65, winners[1])]


def test_ordinal_agreement_pairs_the_nth_keys_of_each_kernel():
    def program(rank):
        bench = Bench()
        by_key = lambda launch: {16: 1.0, 32: 2.0}[launch.block] if launch.n < 50 else 48 / launch.block  # noqa: E731
        first = bench.kernel({16: by_key, 32: by_key})
        second = bench.kernel({16: 9.0 * rank + 1, 32: 2.0}, double)

        def thunk():
            if rank:
                launch(second, numbers(7))
            launch(first, numbers(10 + rank)), launch(first, numbers(100 + rank))
            if not rank:
                launch(second, numbers(6))

        step = tune(bench, thunk, agree="ordinal")
        step()
        return step.report.runs, blocks_of(step)

    assert assert_all_ok(run_ranks(program, 2)) == [
        (3, {"add10": 16, "add100": 32, "double6": 32}),
        (3, {"add11": 16, "add101": 32, "double7": 32}),
    ]


def test_ordinal_agreement_survives_a_dropped_session():
    def program(rank):
        bench, runs = Bench(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def thunk():
            runs.append(None)
            launch(kernel, numbers(64 + rank))
            if len(runs) > 4:
                launch(kernel, numbers(8 + rank))
            if len(runs) == 6 and rank:
                raise ValueError("boom")

        step = tune(bench, thunk, agree="ordinal")
        step()  # three runs settle the first key
        endings = [ending(step)[:4] for _ in range(3)]  # run 6, of the third call, fails
        step()
        return endings, blocks_of(step), bench.blocks()[-2:]

    for rank, (endings, blocks, last) in enumerate(assert_all_ok(run_ranks(program, 2))):
        assert endings == ["retu", "retu", "Valu" if rank else "Peer"]
        assert set(blocks.values()) == {32}
        assert last == [32, 32]


# ---- candidates


def configs_of(blocks_by_rank, world_size=2, **options):
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({block: 1.0 + block for block in blocks_by_rank[rank]})
        step = tune(bench, lambda: launch(kernel, x), **options)
        end = ending(step)
        return end.partition("(")[0], step.report.runs, bench.blocks()

    return assert_all_ok(run_ranks(program, world_size))


def test_different_candidates_meet_in_their_intersection():
    results = configs_of([(16, 32, 64), (128, 64, 32)])
    # In the first run each rank launches its own first config; the intersection is known after it.
    assert results == [("returned tensor", 4, [16, 32, 64, 32]), ("returned tensor", 4, [128, 32, 64, 32])]


def test_candidates_in_another_order_are_matched_by_content():
    results = configs_of([(32, 16, 64), (64, 32, 16)])
    assert [launched[1:] for _, _, launched in results] == [[32, 16, 64, 16]] * 2
    assert {runs for _, runs, _ in results} == {5}


def test_one_config_in_common_is_used_without_trials():
    results = configs_of([(16, 32), (32, 64)])
    assert results == [("returned tensor", 2, [16, 32]), ("returned tensor", 2, [32, 32])]


def test_a_rank_with_a_single_config_decides_for_all():
    results = configs_of([(16, 32, 64), (32,)])
    assert [launched for _, _, launched in results] == [[16, 32], [32, 32]]


def test_no_config_in_common_is_an_error_on_every_rank():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0, 32: 1.0} if rank else {64: 1.0, 128: 1.0})
        return ending(tune(bench, lambda: launch(kernel, x)))

    for text in assert_all_ok(run_ranks(program, 2)):
        assert text.startswith("NoValidConfig: add[64")
        assert "BLOCK: 64" in text
        assert "not a candidate on every rank" in text


@pytest.mark.parametrize("blocks", [(32, 64), (128, 256)], ids=["some in common", "none in common"])
def test_a_rank_that_comes_later_with_other_configs(blocks):
    def program(rank):
        bench, x, calls = Bench(), numbers(), []
        kernel = bench.kernel({16: 1.0, 32: 3.0, 64: 2.0} if rank == 0 else dict.fromkeys(blocks, 1.0))
        step = tune(bench, lambda: launch(kernel, x) if rank == 0 or len(calls) > 1 else None)
        endings = []
        for _ in range(4):
            calls.append(None)
            endings.append(ending(step).partition(":")[0].partition("(")[0])
        return endings, bench.blocks()[-1]

    zero, one = assert_all_ok(run_ranks(program, 2))
    if blocks == (32, 64):  # 16 was the winner; of what rank 1 has too, rank 0 has timed 64 as the fastest
        assert zero == (["returned tensor"] * 4, 64)
        assert one == (["returned None", *["returned tensor"] * 3], 64)
    else:  # rank 1 launches its own first config once, then both know that nothing works everywhere
        assert zero[0][2] == one[0][2] == "NoValidConfig"
        assert zero[0][3] in ("NoValidConfig", "PeerHasNoConfig")
        assert one[0][3] in ("NoValidConfig", "PeerHasNoConfig")


def test_pruning_to_different_configs_on_different_ranks():
    def program(rank):
        bench, x = Bench(), numbers()
        keep = (
            (lambda configs, named, **_: configs[1:]) if rank else (lambda configs, named, **_: configs[:-1])
        )
        kernel = bench.kernel(
            {16: 1.0, 32: 3.0, 64: 2.0, 128: 1.0}, prune_configs_by={"early_config_prune": keep}
        )
        step = tune(bench, lambda: launch(kernel, x))
        step()
        return step.report.runs, blocks_of(step)

    assert assert_all_ok(run_ranks(program, 2)) == [(4, {"add64": 64})] * 2


# ---- configs that fail


@pytest.mark.parametrize("failing", [16, 32, 64], ids=["first", "middle", "last"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["one rank", "all ranks"])
def test_a_config_that_fails_is_banned_on_all_and_never_costs_a_launch(failing, everywhere):
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 2.0, 64: 2.5} if failing != 32 else {16: 3.0, 32: 1.0, 64: 2.0})
        if everywhere or rank == 1:
            kernel.fn.failures[failing] = out_of_resources
        outputs = []
        step = tune(bench, lambda: outputs.append(launch(kernel, x)))
        step()
        assert all(torch.equal(y, x + 1) for y in outputs)
        (context,) = step.report.contexts
        bans = [
            (event.by_rank, event.config)
            for event in records(directory=".autotune_logs", rank=rank)
            if event.event == "banned"
        ]
        return step.report.runs, len(bench.blocks()), context.config.kwargs["BLOCK"], context.banned, bans

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero[:4] == one[:4]
    runs, launches, winner, banned, _ = zero
    assert runs == launches
    assert winner == {16: 32, 32: 64, 64: 32}[failing]
    (text,) = banned
    assert text.startswith(f"BLOCK: {failing},")
    assert banned[text].startswith("rank 0: OutOfResources" if everywhere else "rank 1: OutOfResources")
    assert {by_rank for by_rank, _ in zero[4]} == {0 if everywhere else 1}


def test_a_failure_in_one_of_several_samples_bans_too():
    def program(rank):
        bench, x, tried = Bench(), numbers(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def fail_the_second_time(named):
            tried.append(None)
            if rank and len(tried) == 2:
                raise out_of_resources()

        kernel.configs[1].pre_hook = fail_the_second_time
        step = tune(bench, lambda: launch(kernel, x), n_repeat=3)
        step()
        return step.report.runs, bench.blocks()

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == (6, [16, 16, 16, 32, 32, 16])
    assert one == (6, [16, 16, 16, 32, 16, 16])


def test_the_ranks_ban_different_configs_and_take_what_is_left():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0, 32: 2.0, 64: 3.0})
        kernel.fn.failures[32 if rank else 16] = out_of_resources
        step = tune(bench, lambda: launch(kernel, x))
        step()
        return step.report.runs, blocks_of(step), sorted(step.report.contexts[0].banned.values())

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert zero[1] == {"add64": 64}
    assert [reason[:6] for reason in zero[2]] == ["rank 0", "rank 1"]


def test_all_configs_fail_between_the_ranks():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0, 32: 2.0})
        kernel.fn.failures[32 if rank else 16] = out_of_resources
        with pytest.raises(NoValidConfig, match=r"add\[64") as caught:
            tune(bench, lambda: launch(kernel, x))()
        return str(caught.value)

    for text in assert_all_ok(run_ranks(program, 2)):
        assert "Rank 0, BLOCK: 16" in text
        assert "Rank 1, BLOCK: 32" in text


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)], ids=str)
def test_all_configs_fail(failing):
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0, 32: 2.0})
        if rank in failing:
            kernel.fn.failures.update({16: out_of_resources, 32: out_of_resources})
        step = tune(bench, lambda: launch(kernel, x))
        with pytest.raises(NoValidConfig) as caught:
            step()
        kernel.fn.failures.clear()
        return str(caught.value), ending(step).partition("(")[0]

    for text, then in assert_all_ok(run_ranks(program, 2)):
        assert "add[64" in text
        assert f"Rank {failing[0]}, BLOCK: 16" in text or f"Rank {failing[-1]}, BLOCK: 16" in text
        assert "BLOCK: 32" in text
        assert "out of resource" in text
        assert then == "returned tensor"  # the next call starts anew


def test_a_config_that_does_not_load_on_one_rank_is_banned_before_it_is_tried(monkeypatch):
    # Nothing loads in the interpreter: the place where it would is made to fail on one rank.
    def program(rank):
        def preflight(tuner, configs, args, kwargs, terms, loading):
            return launches.compiling.Preflight(
                {
                    digest: "no room"
                    for digest, config in configs.items()
                    if config.kwargs["BLOCK"] == 32 and rank
                }
            )

        monkeypatch.setattr(launches.intercept, "is_interpreted", lambda: False)
        monkeypatch.setattr(launches.compiling, "current_device", lambda: -1)
        monkeypatch.setattr(launches.compiling, "preflight", preflight)
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
        step = tune(bench, lambda: launch(kernel, x))
        step()
        return bench.blocks(), list(step.report.contexts[0].banned.values())

    assert assert_all_ok(run_ranks(program, 2)) == [([16, 64, 64], ["rank 1: no room"])] * 2


# ---- when there is no time for all


@pytest.mark.parametrize("limit", ["runs", "seconds"])
def test_a_budget_ends_the_search_on_all_ranks_at_once_and_the_next_call_goes_on(limit, monkeypatch):
    def program(rank):
        if limit == "seconds" and rank == 1:  # on this rank alone, time flies
            elapsed_s = iter(range(0, 1000, 5))
            monkeypatch.setattr(chronicle.Chronicle, "elapsed_s", property(lambda self: next(elapsed_s)))
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 2.0, 64: 1.0})
        options = {"max_runs": 3} if limit == "runs" else {"budget_s": 60.0}
        step = tune(bench, lambda: launch(kernel, x), n_repeat=2, **options)
        seen = []
        while not step.settled:
            step()
            seen.append((step.report.runs, *blocks_of(step).values(), *statuses_of(step).values()))
            assert len(seen) < 9
        return seen

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    if limit == "runs":
        assert zero[:2] == [(3, 16, "partial"), (3, 32, "partial")]
    assert zero[0][2] == "partial"
    assert zero[-1][1:] == (64, "tuned")


def test_a_key_met_in_a_settled_call_joins_the_plan_that_peers_have_made_for_it_meanwhile():
    def program(rank):
        bench, calls, runs = Bench(), [], []
        kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

        def thunk():
            runs.append(len(calls))
            launch(kernel, numbers(64))
            is_first_run_of_third_call = len(calls) == 3 and runs.count(3) == 1
            if len(calls) > 1 and not (rank == 1 and is_first_run_of_third_call):
                launch(kernel, numbers(128))

        step = tune(bench, thunk)
        for call in (1, 2, 3):
            calls.append(call)
            bench.forget()
            step()
        return bench.blocks(n=128), blocks_of(step)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero[1] == one[1]
    assert zero[0][0] == 16
    assert zero[0][1:] == one[0]  # from the second run on, in which rank 1 comes to it, they launch the same


# ---- judged by the whole run


def test_a_choice_of_the_host_is_agreed():
    def program(rank):
        bench = Bench()

        def thunk():
            chunks = tunable("chunks", [1, 2, 4])
            bench.spend({1: 5.0, 2: 1.0 + 5 * rank, 4: 4.0}[chunks])
            return chunks

        step = tune(bench, thunk)
        chosen = step()
        return chosen, step.report.runs, step(), tunable("chunks", [1, 2, 4])

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert (zero[0], zero[2], zero[3]) == (4, 4, 4)


@pytest.mark.parametrize(("agree", "chosen"), [("key", [1, 4]), ("ordinal", [4, 4])], ids=["key", "ordinal"])
def test_choices_of_local_sizes_agree_by_key_or_by_order(agree, chosen):
    def program(rank):
        bench = Bench()

        def thunk():
            chunks = tunable("chunks", [1, 4], key=(64 + rank,))
            bench.spend({1: 9.0 if rank else 1.0, 4: 4.0}[chunks])
            return chunks

        return tune(bench, thunk, agree=agree)()

    # By key they are tuned one after the other: for that of rank 0, both runs take rank 1's 9 ms.
    assert assert_all_ok(run_ranks(program, 2)) == chosen


def test_options_that_differ_between_ranks_meet_in_their_intersection():
    def program(rank):
        bench, chosen = Bench(), []

        def thunk():
            chosen.append(tunable("transport", [["copy", "pull", "push"], ["pull", "push", "store"]][rank]))
            bench.spend({"copy": 1.0, "pull": 4.0, "push": 3.0, "store": 1.0}[chosen[-1]])
            return chosen[-1]

        step = tune(bench, thunk)
        return step(), step(), len(chosen), tunable("transport", ["store", "push", "copy"])

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert zero[:2] == ("push", "push")
    assert zero[3] == "push"


def test_the_slowest_rank_judges_the_whole_run():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0, 32: 2.0})

        def thunk():
            launch(kernel, x)
            bench.spend(10.0 if kernel.best_config.kwargs["BLOCK"] == 16 and rank else 1.0)

        step = tune(bench, thunk, objective="thunk")
        step()
        return step.report.runs, blocks_of(step), statuses_of(step)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert zero[1:] == ({"add64": 32}, {"add64": "tuned"})


def test_the_users_collectives_keep_in_step():
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0, 32: 2.0, 64: 0.5 + rank})
        if rank:
            kernel.fn.failures[32] = out_of_resources

        def thunk():
            y = launch(kernel, x)
            dist.all_reduce(y)
            dist.barrier()
            return y

        step = tune(bench, thunk)
        first = step()
        total = torch.tensor(1.0)
        dist.all_reduce(total)
        return torch.equal(first, 2 * (x + 1)), torch.equal(step(), 2 * (x + 1)), total.item()

    assert assert_all_ok(run_ranks(program, 2)) == [(True, True, 2.0)] * 2


def test_eight_ranks():
    def program(rank):
        bench, x = Bench(), numbers()
        first = bench.kernel({16: 1.0 + rank, 32: 8.5 - rank, 64: 6.0})
        second = bench.kernel({16: 2.0, 32: 1.0}, double)
        if rank == 5:
            second.fn.failures[32] = out_of_resources
        step = tune(bench, lambda: (launch(first, x), rank % 2 and launch(second, x)))
        step()
        return step.report.runs, {name: block for name, block in blocks_of(step).items() if name == "add64"}

    results = run_ranks(program, 8)
    assert assert_all_ok(results) == [(4, {"add64": 64})] * 8
    assert add is not double
