"""Keys and kernels that only some ranks have, or that hold a rank: tuned among those that have them."""

import torch
from kernels_for_tests import Bench, launch, numbers, out_of_resources
from rank_programs import blocks_of, tune

from ranks import assert_all_ok, run_ranks

# ---- keys and kernels that only some ranks have


def test_what_fails_for_the_key_of_one_rank_is_not_banned_for_the_keys_of_others():
    def program(rank):
        bench = Bench()
        kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
        run = kernel.fn.run

        def fails_for_8(x, y, n, **kwargs):
            if n == 8 and kwargs["BLOCK"] == 32:
                raise out_of_resources()
            return run(x, y, n, **kwargs)

        kernel.fn.run = fails_for_8
        sizes = (64, 8) if rank == 1 else (64,)
        step = tune(bench, lambda: [launch(kernel, numbers(n)) for n in sizes])
        assert all(torch.equal(y, numbers(n) + 1) for n, y in zip(sizes, step(), strict=True))
        banned = {context.key[0]: len(context.banned) for context in step.report.contexts}
        return step.report.runs, blocks_of(step), banned

    zero, one, two = assert_all_ok(run_ranks(program, 3))
    assert zero == two == (4, {"add64": 32}, {64: 0})
    assert one == (4, {"add64": 32, "add8": 64}, {64: 0, 8: 1})


def test_of_32_configs_later_keys_try_8_at_most_where_the_first_told():
    def program(rank):
        bench = Bench()
        kernel = bench.kernel({16 * step: 1.0 + 0.05 * abs(step - 20) for step in range(1, 33)})
        automatic = {"search": "auto", "n_repeat": None, "n_warmup": None}
        step, found = tune(bench, lambda n: launch(kernel, numbers(n)), **automatic), []
        for n in (64, 128, 256):
            step(n)
            found += [len(c.timings) for c in step.report.contexts if c.key[0] == n]
        return found, set(blocks_of(step).values())

    (tried, winners), other = assert_all_ok(run_ranks(program, 2))
    assert other == (tried, winners)
    assert winners == {320}
    assert tried[0] < 32
    assert max(tried[1:]) <= 8
