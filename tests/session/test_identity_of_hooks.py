"""Heuristics are a part of a kernel, hooks of a config: what differs in them alone is another one."""

import functools
import types

import pytest
import triton
import triton.language as tl
from kernels_for_tests import Bench, launch, numbers, only, winner
from operation_runs import on_ranks
from rank_programs import ending, tune

from dist_autotune.triton_api import identity


def even(args):
    return args["n"] % 16 == 0


def even_of_another_day(args):
    return args["n"] % 32 == 0


def with_heuristic(bench, function):
    """Return an autotuned kernel over `@triton.heuristics`."""
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    kernel.fn = triton.runtime.autotuner.Heuristics(kernel.fn, kernel.arg_names, {"EVEN": function})
    return kernel


def test_another_heuristic_is_another_kernel_to_the_cache():
    for function, status in ((even, "tuned"), (even, "cached"), (even_of_another_day, "tuned")):
        bench = Bench()
        kernel = with_heuristic(bench, function)
        tuned = bench.tune(lambda kernel=kernel: launch(kernel, numbers()))
        tuned()
        assert only(tuned.report).status == status


helpers = types.ModuleType("helpers")
HEURISTICS = """
@triton.heuristics({"EVEN": lambda args: is_even(args)})
@triton.jit
def kernel(x_ptr, EVEN: tl.constexpr):
    tl.store(x_ptr, EVEN)
"""


@pytest.mark.parametrize(
    "call", ["is_even(args)", "[is_even(each) for each in [args]]", "helpers.is_even(args)"]
)
def test_what_a_heuristic_in_a_decorator_calls_is_a_part_of_the_kernel(call, tmp_path):
    path = tmp_path / "heuristics_module.py"
    path.write_text(HEURISTICS.replace("is_even(args)", call))

    def digest_with(is_even):
        helpers.is_even = is_even
        names = {"triton": triton, "tl": tl, "is_even": is_even, "helpers": helpers}
        exec(compile(path.read_text(), path, "exec"), names)
        return identity.kernel_identity(triton.autotune([triton.Config({})], [])(names["kernel"])).digest

    assert digest_with(even) == digest_with(even)
    assert digest_with(even) != digest_with(even_of_another_day)


@on_ranks(2)
def test_ranks_whose_heuristics_differ_are_told(rank):
    bench = Bench()
    kernel = with_heuristic(bench, even_of_another_day if rank else even)
    end = ending(tune(bench, lambda: launch(kernel, numbers())))
    assert end.startswith("RankMismatch: ranks differ in the source of kernel add.EVEN")


@on_ranks(2)
def test_a_hook_and_a_heuristic_may_capture_their_rank(rank):
    def hook(arguments):
        hooked.append(rank)

    bench, hooked = Bench(), []
    configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32)]
    kernel = bench.kernel({16: 3.0, 32: 1.0}, configs=configs)
    heuristic = lambda arguments: rank >= 0  # noqa: E731
    kernel.fn = triton.runtime.autotuner.Heuristics(kernel.fn, kernel.arg_names, {"EVEN": heuristic})
    tuned = tune(bench, lambda: launch(kernel, numbers()))
    tuned()
    assert (winner(only(tuned.report)), set(hooked) == {rank}) == (32, True)


def note(names, arguments, *, width=1):
    names.append(width)


def capturing(called, width):
    return lambda arguments: called.append(width)


def hooks(case, called):
    if case == "closures":
        return [functools.partial(note, called), lambda arguments: called.append(2)]
    if case == "defaults":
        return [lambda arguments, width=width: called.append(width) for width in (1, 2)]
    if case == "captured":
        return [capturing(called, width) for width in (1, 2)]
    if case == "partials":
        return [functools.partial(note, called, width=width) for width in (1, 2)]
    return [None, lambda arguments: called.append(2)]


@pytest.mark.parametrize("case", ["closures", "defaults", "captured", "partials", "one of them without"])
def test_configs_that_differ_in_their_hook_alone_are_two_candidates(bench, case):
    called = []
    configs = [triton.Config({"BLOCK": 16}, pre_hook=hook) for hook in hooks(case, called)]
    kernel = bench.kernel(
        {16: lambda launch: {1: 3.0, 2: 1.0}.get(called[-1] if called else 1)}, configs=configs
    )
    tuned = bench.tune(lambda: (called.clear(), launch(kernel, numbers())))
    tuned()
    context = only(tuned.report)
    assert sorted(context.timings.values()) == [1.0, 3.0]
    assert context.config is configs[1] or context.config.pre_hook is configs[1].pre_hook
    assert winner(context) == 16
