"""Thousands of candidates: a few are compiled and tried, in kernels and in choices. Many keys of a kernel."""

import gc
import itertools
import math
import sys

import pytest
import triton
from kernels_for_tests import Bench, launch, no_bench, numbers, only

from dist_autotune import tunable
from dist_autotune.launch import written_tensors
from dist_autotune.search.expectation.order import MOST_COMPILED

VALUES = {  # 2,000
    "BLOCK": [8 << power for power in range(8)],
    "GROUP": (1, 2, 4, 8, 16),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": range(1, 11),
}


def config(BLOCK, GROUP, num_warps, num_stages):
    return triton.Config({"BLOCK": BLOCK, "GROUP": GROUP}, num_warps=num_warps, num_stages=num_stages)


def takes_ms(block, group, warps, stages):
    """Return what a launch takes: 128, 4, 4 and 3 are the fastest."""
    parts = (
        0.3 * math.log2(block / 128),
        0.1 * math.log2(group / 4),
        0.2 * math.log2(warps / 4),
        0.05 * (stages - 3),
    )
    return math.prod(1 + abs(part) for part in parts)


def many(bench, **options):
    """Return a kernel with 2,000 configs."""
    kernel = bench.kernel(dict.fromkeys(VALUES["BLOCK"], lambda each: takes_ms(*shape(each))), **options)
    kernel.configs = [config(*values) for values in itertools.product(*VALUES.values())]
    return kernel


def shape(launch):
    return launch.block, *(launch.meta[name] for name in ("GROUP", "num_warps", "num_stages"))


def shapes(launches):
    return {shape(each) for each in launches}


@pytest.mark.parametrize(("objective", "mode"), [("thunk", "replay"), ("kernel", "online")])
def test_a_few_of_a_kernels_candidates_are_tried_and_the_report_tells_the_rest(bench, objective, mode):
    kernel = many(bench)
    options = {"n_warmup": None, "n_repeat": None, "objective": objective, "mode": mode}
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)), **options)
    tuned(64)
    while not tuned.settled:
        tuned(64)
    context = only(tuned.report)
    found = *context.config.kwargs.values(), context.config.num_warps, context.config.num_stages
    assert takes_ms(*found) <= 1.03
    tried = shapes(bench.launches)
    assert len(tried) <= MOST_COMPILED
    assert context.untried.startswith(f"tried {len(tried)} of 2000; ")
    bench.forget()
    again = many(bench, do_bench=no_bench)
    bench.tune(lambda n: launch(again, numbers(n)), objective=objective)(64)
    assert shapes(bench.launches) == {found}


def test_who_asks_for_a_race_has_all_candidates_tried(bench):
    kernel = many(bench)
    kernel.configs = kernel.configs[:260]
    bench.tune(lambda n: launch(kernel, numbers(n)), n_warmup=None, n_repeat=None, search="racing")(64)
    assert len(shapes(bench.launches)) == 260


PARTS = [1 << power for power in range(10)]


def spends_ms(parts, way, depth):
    return 1 + 0.5 * abs(math.log2(parts / 16)) + 0.3 * (way != 2) + 0.03 * abs(depth - 7)


def test_a_choice_of_many_options_is_searched_before_the_plans(bench):
    values = itertools.product(PARTS, range(4), range(20))
    options = [dict(zip(("parts", "way", "depth"), each, strict=True)) for each in values]
    kernel, chosen = bench.kernel({16: 1.0, 32: 2.0}), []

    def thunk():
        launch(kernel, numbers())
        chosen.append(tunable("split", options))
        order = tunable("order", ["rows", "columns"])
        spent = spends_ms(**chosen[-1])
        bench.spend(spent + {"rows": 1.0, "columns": 0.0}[order])
        return chosen[-1], order

    tuned = bench.tune(thunk, n_warmup=None, n_repeat=None)
    best, order = tuned()
    assert order == "columns"
    assert spends_ms(**best) <= 1.03
    assert len({tuple(each.values()) for each in chosen}) <= MOST_COMPILED
    assert tuned() == (best, order)
    assert tunable("split", options) == best
    assert tunable("split", [*options]) == best


def test_a_key_costs_the_same_however_many_the_kernel_has(monkeypatch):
    monkeypatch.setattr(written_tensors, "instances", lambda *kinds: [])  # 20 ms, of all that Python holds
    bench, calls, held = Bench(), [0, 0], []
    kernel = bench.kernel({16 * n: 1.0 + n % 3 for n in range(1, 3)})
    step = bench.tune(lambda n: launch(kernel, numbers(n)), cache=False, log_dir=None, search="expected")

    def count(frame, event, argument):
        calls[n // 100] += event in ("call", "c_call")

    for n in range(1, 200):
        sys.setprofile(count if n % 100 >= 80 else None)
        step(n)
        sys.setprofile(None)
        if n % 100 == 99:
            bench.forget()
            gc.collect()
            held.append(len(gc.get_objects()))
    # Of the first 64 keys each one more tells what to expect of the next.
    assert calls[1] < 1.1 * calls[0]
    assert held[1] - held[0] < 100 * 8  # each session looks through them
