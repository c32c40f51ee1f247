"""Every launch of the user is one launch of the kernel, with that launch's arguments, grid and config."""

import gc
import weakref
from typing import Any

import pytest
import torch
import triton
from kernels_for_tests import Probe, grid_of, launch, numbers, only, out_of_resources, records
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_autotune import TuningError
from dist_autotune.logs.records import Trial

# ---- contexts


@pytest.mark.parametrize("interpreted", [False, True], ids=["emulated", "interpreted"])
def test_two_keys_of_one_kernel_are_two_contexts_and_every_run_is_right(bench, interpreted):
    kernel = bench.kernel({16: lambda made: 1.0 * made.n, 32: lambda _: 100.0}, interpreted=interpreted)
    runs = []

    def thunk():
        outputs = [launch(kernel, numbers(n)) for n in (64, 256)]
        runs.append(all(torch.equal(y, numbers(n) + 1) for y, n in zip(outputs, (64, 256), strict=True)))
        return outputs

    tuned = bench.tune(thunk)
    small, large = tuned()
    assert runs == [True] * 3
    assert torch.equal(small, numbers(64) + 1)
    assert torch.equal(large, numbers(256) + 1)
    f32 = "torch.float32"
    assert {key: config.kwargs["BLOCK"] for key, config in kernel.cache.items()} == {
        (64, f32, f32): 16,
        (256, f32, f32): 32,
    }
    assert bench.blocks(n=64) == [16, 32, 16]
    assert bench.blocks(n=256) == [16, 32, 32]


def test_the_same_key_twice_is_one_context_with_one_config_and_one_sample_per_run(bench, kernel):
    def thunk():
        return launch(kernel, numbers()), launch(kernel, numbers())

    tuned = bench.tune(thunk, n_repeat=2)
    tuned()
    assert bench.blocks() == [16, 16] * 2 + [32, 32] * 2 + [32, 32]
    assert tuned.report.runs == 5
    trials = [(t.kind, t.k, t.launches) for t in records(Trial)]
    assert trials[:4] == [("sample", 1, 2), ("sample", 2, 2), ("sample", 1, 2), ("sample", 2, 2)]


def test_the_launches_of_one_run_are_one_sample_their_mean(bench):
    times = iter([1.0, 5.0, 2.0, 2.0] + [1.0] * 10)
    kernel = bench.kernel({16: lambda _: next(times), 32: lambda _: next(times)})
    tuned = bench.tune(lambda: [launch(kernel, numbers()) for _ in range(2)])
    tuned()
    assert list(only(tuned.report).timings.values()) == [3.0, 2.0]


def test_autotuners_made_anew_for_every_call_share_one_context_and_are_let_go(bench):
    made: list[weakref.ref[Any]] = []

    def thunk():
        kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
        made.append(weakref.ref(kernel))
        return launch(kernel, numbers())

    tuned = bench.tune(thunk)
    for _ in range(4):
        assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks() == [16, 32, 64, 32] + [32] * 3
    assert only(tuned.report).config.kwargs["BLOCK"] == 32
    gc.collect()
    assert [kernel() for kernel in made] == [None] * 7


# ---- arguments


GRIDS = {
    "by lambda": grid_of,
    "by tuple": lambda n: (triton.cdiv(n, 16),),
    "of three": lambda n: (triton.cdiv(n, 16), 1, 1),
}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("interpreted", [False, True], ids=["emulated", "interpreted"])
def test_the_grid_is_that_of_this_launch(bench, grid, interpreted):
    kernel = bench.kernel({16: 2.0, 32: 1.0}, key=(), interpreted=interpreted)
    sizes = iter([16, 48, 64, 32, 128])

    def thunk():
        n = next(sizes)
        x, y = numbers(n), torch.full((n,), -1.0)
        kernel[grid(n)](x, y, n)
        return torch.equal(y, x + 1)

    tuned = bench.tune(thunk)
    assert all(tuned() for _ in range(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda kernel, x, y, n: kernel[grid_of(n)](x, y, n),
        lambda kernel, x, y, n: kernel[grid_of(n)](x_ptr=x, y_ptr=y, n=n),
        lambda kernel, x, y, n: kernel[grid_of(n)](x, n=n, y_ptr=y),
        lambda kernel, x, y, n: kernel.run(x, y, n, grid=grid_of(n), warmup=False),
    ],
    ids=["positional", "by keyword", "mixed", "run()"],
)
@pytest.mark.parametrize("interpreted", [False, True], ids=["emulated", "interpreted"])
def test_arguments_may_be_passed_in_every_way(bench, call, interpreted):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, interpreted=interpreted)
    y = torch.zeros(64)
    bench.tune(lambda: call(kernel, numbers(), y, 64))()
    assert torch.equal(y, numbers() + 1)
    assert bench.blocks() == [16, 32, 32]
    assert list(kernel.cache) == [(64, "torch.float32", "torch.float32")]


def test_an_argument_that_a_config_sets_too_is_stocks_value_error(bench, kernel):
    x = numbers()

    def thunk():
        kernel[grid_of(64)](x, x, 64, BLOCK=16)

    with pytest.raises(ValueError, match="Conflicting meta-parameters: BLOCK") as stock:
        kernel[grid_of(64)](x, x, 64, BLOCK=16)
    with pytest.raises(ValueError, match="Conflicting meta-parameters: BLOCK") as ours:
        bench.tune(thunk)()
    assert str(ours.value) == str(stock.value)


def test_a_key_that_cannot_be_hashed_is_a_clear_error(bench):
    kernel = bench.kernel({16: 1.0, 32: 2.0})
    with pytest.raises(TuningError, match=r"add: a value of its autotune key \(n\) cannot be hashed"):
        bench.tune(lambda: kernel[(1,)](numbers(), numbers(), [64]))()


# ---- the config


def test_the_pre_hook_of_the_launched_config_runs_once_with_all_arguments_outside_the_timed_interval(bench):
    events: list[Any] = []
    hooks = {block: lambda args, block=block: events.append((block, dict(args))) for block in (16, 32)}
    kernel = bench.kernel({16: 3.0, 32: 1.0}, pre_hooks=hooks)
    start = bench.clock.start
    bench.clock.start = lambda: events.append("start") or start()
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    tuned()
    hooked = [event[0] if isinstance(event, tuple) else event for event in events]
    assert hooked == [16, "start", 32, "start", 32, 32]
    assert bench.blocks() == [16, 32, 32, 32]
    arguments = events[0][1]
    assert {"x_ptr", "y_ptr", "n", "BLOCK", "num_warps", "num_stages", "num_ctas", "grid"} <= set(arguments)
    assert (arguments["BLOCK"], arguments["n"]) == (16, 64)


def test_a_pre_hook_may_shape_a_tensor_descriptor_for_the_config_that_is_launched(bench):
    class Described(Probe):
        def run(self, x_ptr, *args, BLOCK, **kwargs):
            shapes.append((BLOCK, list(x_ptr.block_shape)))
            return super().run(x_ptr.base, *args, BLOCK=BLOCK, **kwargs)

    def hook(arguments):
        hooked.append(arguments["BLOCK"])
        arguments["x_ptr"].block_shape = [arguments["BLOCK"]]

    shapes, hooked, y = [], [], torch.zeros(64)
    hooks = dict.fromkeys((16, 32, 64), hook)
    kernel = bench.kernel({16: 3.0, 32: 2.0, 64: 1.0}, pre_hooks=hooks, probe=Described)
    kernel.fn.failures[64] = out_of_resources

    def thunk():
        kernel[grid_of(64)](TensorDescriptor.from_tensor(numbers(), [1]), y.zero_(), 64)

    bench.tune(thunk)()
    assert torch.equal(y, numbers() + 1)
    # 64 does not launch: 32 stands in for it, and has shaped the descriptor for itself.
    assert shapes == [(block, [block]) for block in (16, 32, 64, 16, 32)]
    assert hooked == [16, 32, 64, 16, 32]
    assert bench.blocks() == [16, 32, 16, 32]
