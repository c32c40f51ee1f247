"""Ranks that measure different times agree on one config, one choice, and the end of the search."""

import itertools
import time

import pytest
import torch
from kernels_for_tests import Bench, launch, numbers
from rank_programs import blocks_of, own_cache, statuses_of, tune, tuned_step

from dist_autotune.tuner import session
from ranks import assert_all_ok, run_ranks

# ---- one decision, the same on all ranks


def test_ranks_expect_alike_what_other_keys_tell_and_try_the_same_few():
    blocks = range(8, 120, 8)

    def program(rank, sizes):
        generator = torch.Generator().manual_seed(rank)

        def noisy(launch):
            return 1 + abs(launch.block - 64) / 32 + 0.02 * torch.rand((), generator=generator).item()

        options = {"search": "expected", "n_repeat": None, "n_warmup": None, "cache": own_cache(rank)}
        step, bench = tuned_step(dict.fromkeys(blocks, noisy), **options)
        for n in sizes:
            assert torch.equal(step(n), numbers(n) + 1)
        (context,) = step.report.contexts
        return len(context.timings), step.report.runs, blocks_of(step), bench.blocks()

    for sizes in ((64, 128, 256, 512, 1024), (2048,)):  # the second time from what is on disk
        zero, one, two = assert_all_ok(run_ranks(lambda rank, sizes=sizes: program(rank, sizes), 3))
        assert zero == one == two
        assert zero[0] == 3


# ---- when there is no time for all


@pytest.mark.parametrize("limit", ["runs", "seconds"])
def test_a_budget_ends_the_search_on_all_ranks_at_once_and_the_next_call_goes_on(limit, monkeypatch):
    def program(rank):
        if limit == "seconds" and rank == 1:  # on this rank alone, time flies
            elapsed_s = property(lambda self: 15.0 * self.executions)
            monkeypatch.setattr(session.Session, "elapsed_s", elapsed_s)
        options = {"max_runs": 3} if limit == "runs" else {"budget_s": 60.0}
        step, _ = tuned_step({16: 3.0, 32: 2.0, 64: 1.0}, n_repeat=2, **options)
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


def test_wall_clocks_that_differ_by_hours_and_jump_have_no_effect(monkeypatch):
    real_s, reads = time.time, itertools.count()

    def program(rank):
        def jumping_s():  # an hour at every look: forwards, backwards, or to and fro
            n = next(reads)
            return real_s() + 3600 * n * [1, -1, (-1) ** n][rank]

        monkeypatch.setattr(time, "time", jumping_s)
        monkeypatch.setattr(time, "time_ns", lambda: int(jumping_s() * 1e9))
        bench, x = Bench(), numbers()
        kernel = bench.kernel({16: 1.0 + rank, 32: 1.5, 64: 3.0})

        def thunk():
            if rank == 1:
                time.sleep(0.05)  # so that its peers do wait
            launch(kernel, x)

        step = tune(bench, thunk, budget_s=3600.0, cache=f"cache-{rank}")
        step()
        step()
        (context,) = step.report.contexts
        again = tune(
            bench, lambda: launch(bench.kernel({16: 1.0, 32: 9.0, 64: 9.0}), x), cache=f"cache-{rank}"
        )
        again()
        return (context.timings, statuses_of(step), blocks_of(again), statuses_of(again))

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero == one == two
    assert sorted(zero[0].values()) == [1.5, 3.0, 3.0]
    assert zero[1:] == ({"add64": "tuned"}, {"add64": 32}, {"add64": "cached"})
