"""Ranks whose configs differ, or fail on some of them, agree on those that work everywhere."""

import pytest
import torch
import torch.distributed as dist
from kernels_for_tests import Bench, double, launch, numbers, out_of_resources, records
from operation_runs import on_ranks
from rank_programs import Boom, ending, tune, tuned_step

from dist_autotune import NoValidConfig
from dist_autotune.launch import dispatcher
from ranks import assert_all_ok, run_ranks

# ---- configs that fail


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("failing", "failure"),
    [(16, out_of_resources), (32, out_of_resources), (64, out_of_resources), (32, out_of_memory)],
    ids=["first", "middle", "last", "out of memory"],
)
@pytest.mark.parametrize("everywhere", [False, True], ids=["one rank", "all ranks"])
def test_a_config_that_fails_is_banned_on_all_and_never_costs_a_launch(failing, failure, everywhere):
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 3.0, 32: 2.0, 64: 2.5} if failing != 32 else {16: 3.0, 32: 1.0, 64: 2.0})
        if everywhere or rank == 1:
            kernel.fn.failures[failing] = failure
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
    assert banned[text].startswith(f"rank {1 - everywhere}: {type(failure()).__name__}: ")
    assert {by_rank for by_rank, _ in zero[4]} == {1 - everywhere}


def test_a_failure_in_one_of_several_samples_bans_too():
    def program(rank):
        bench, x, tried = Bench(), numbers(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0})

        def fail_the_second_time(named):  # captures the same on all ranks, so it is one candidate
            tried.append(None)
            if dist.get_rank() and len(tried) == 2:
                raise out_of_resources()

        kernel.configs[1].pre_hook = fail_the_second_time
        step = tune(bench, lambda: launch(kernel, x), n_repeat=3)
        step()
        return step.report.runs, bench.blocks()

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == (6, [16, 16, 16, 32, 32, 16])
    assert one == (6, [16, 16, 16, 32, 16, 16])


@pytest.mark.parametrize(
    "failing",
    [{0: (16, 32)}, {1: (16, 32)}, {0: (16, 32), 1: (16, 32)}, {0: (16,), 1: (32,)}],
    ids=["on rank 0", "on rank 1", "on both", "between the ranks"],
)
def test_all_configs_fail(failing):
    def program(rank):
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0, 32: 2.0})
        kernel.fn.failures.update(dict.fromkeys(failing.get(rank, ()), out_of_resources))
        step = tune(bench, lambda: launch(kernel, x))
        with pytest.raises(NoValidConfig, match=r"add\[64.*out of resource") as caught:
            step()
        kernel.fn.failures.clear()
        return str(caught.value), ending(step).partition("(")[0]

    for text, then in assert_all_ok(run_ranks(program, 2)):
        for block in (16, 32):
            by = [rank for rank, blocks in failing.items() if block in blocks]
            assert any(f"Rank {rank}, BLOCK: {block}" in text for rank in by)
        assert then == "returned tensor"  # the next call starts anew


@on_ranks(2)
def test_a_config_that_does_not_load_on_one_rank_is_banned_before_it_is_tried(rank, monkeypatch):
    # Nothing loads in the interpreter: the place where it would is made to fail on one rank.
    def plan(launch, configs, hooks_s):
        failing = [c for c, config in configs.items() if config.kwargs["BLOCK"] == 32 and rank]
        return dispatcher.preflight.Planned(reasons=dict.fromkeys(failing, "no room"))

    monkeypatch.setattr(dispatcher.interception, "is_interpreted", lambda: False)
    monkeypatch.setattr(dispatcher.preflight, "current_device", lambda: -1)
    monkeypatch.setattr(dispatcher.preflight, "plan", plan)
    step, bench = tuned_step({16: 3.0, 32: 1.0, 64: 2.0})
    step()
    assert (bench.blocks(), list(step.report.contexts[0].banned.values())) == (
        [16, 64, 64],
        ["rank 1: no room"],
    )


@pytest.mark.parametrize(("blocks", "fails"), [((16,), False), ((16, 64), True)], ids=["one", "run fails"])
def test_online_a_rank_that_meets_a_settled_key_tells_which_configs_it_has(blocks, fails):
    def program(rank):
        bench, steps = Bench(), []
        kernel = bench.kernel({b: {16: 3.0, 32: 1.0, 64: 2.0}[b] for b in (blocks if rank else (16, 32, 64))})
        other = bench.kernel(dict.fromkeys((16 << n for n in range(9)), 1.0), double)  # the session goes on

        def thunk():
            steps.append(None)
            for n in (64, 128) if rank == 0 or len(steps) > 4 else (64,):
                launch(kernel, numbers(n))
            launch(other, numbers())
            if rank == 0 and len(steps) == 5 and fails:
                raise Boom

        step = tune(bench, thunk, mode="online")
        ends = [ending(step).partition(":")[0] for _ in range(8)]
        return bench.blocks("add", n=128)[-1], ends[4]

    failures = ["Boom", "PeerFailed"] if fails else ["returned None"] * 2
    assert assert_all_ok(run_ranks(program, 2)) == [(blocks[-1], end) for end in failures]
