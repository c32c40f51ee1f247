"""A config that fails before it launches is replaced at once and banned; other errors are the user's."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import itertools
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime._async_compile import active_mode
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError

from dist_autotune import NoValidConfig, TuningError, is_tuning
from dist_autotune import compile as compiling
from dist_autotune.flows import STRATEGIES
from dist_autotune.records import Banned, ContextAdmitted, RunFailed, RunStarted, SessionClosed
from kernels_for_tests import Bench, double, launch, numbers, only, out_of_resources, records
from ranks import run_ranks

STOCK_RUN = Autotuner.run
BLOCKS = (16, 32, 64)

FAILURES: dict[str, Callable[[], Exception]] = {
    "OutOfResources": out_of_resources,
    "PTXASError": lambda: PTXASError("`ptxas` failed with error code 255"),
    "CompilationError": lambda: CompilationError(
        "tl.dot(a, b)", ast.parse("x").body[0], "shapes do not match"
    ),
    "static_assert": lambda: CompileTimeAssertionFailure(None, ast.parse("x").body[0], "BLOCK too large"),
    "PassManager": lambda: RuntimeError("PassManager::run failed"),
}
every_failure = pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())


@pytest.fixture
def bench() -> Bench:
    return Bench()


def inject(bench: Bench, where: str, errors: dict[int, Callable[[], Exception]]) -> Any:
    """Return a kernel whose configs fail in their pre_hook, or in the launch."""
    ms = {16: 3.0, 32: 1.0, 64: 2.0}
    if where == "launch":
        kernel = bench.kernel(ms)
        kernel.fn.failures.update(errors)
        return kernel

    def raising(block: int) -> Callable[[dict[str, Any]], None]:
        def hook(arguments: dict[str, Any]) -> None:
            raise errors[block]()

        return hook

    return bench.kernel(ms, pre_hooks={block: raising(block) for block in errors})


def block_of(config: Any) -> int:
    return config.kwargs["BLOCK"]


# ---- replaced, banned, and the run goes on


@pytest.mark.parametrize("where", ["launch", "pre_hook"])
@every_failure
@pytest.mark.parametrize(
    ("bad", "launched"),
    [(16, [32, 64, 32]), (32, [16, 16, 64, 64]), (64, [16, 32, 16, 32])],
    ids=["first", "middle", "last"],
)
def test_a_config_that_fails_is_replaced_in_the_same_call(bench, where, failure, bad, launched):
    kernel = inject(bench, where, {bad: failure})
    outputs = []

    def thunk():
        outputs.append(launch(kernel, numbers()))
        return outputs[-1]

    tuned = bench.tune(thunk)
    tuned()
    assert all(torch.equal(y, numbers() + 1) for y in outputs)
    assert bench.blocks() == launched
    assert len(outputs) == len(launched) == tuned.report.runs
    context = only(tuned.report)
    assert block_of(context.config) == launched[-1]
    ((text, reason),) = context.banned.items()
    assert f"BLOCK: {bad}" in text
    assert reason.startswith("rank 0: ")
    assert type(failure()).__name__ in reason
    assert text not in context.timings
    assert block_of(kernel.best_config) == launched[-1]


@pytest.mark.parametrize("search", sorted(STRATEGIES))
@pytest.mark.parametrize("bad", [(16, 32), (16, 64), (32, 64)], ids=str)
def test_the_one_config_that_works_wins(bench, search, bad):
    kernel = inject(bench, "launch", dict.fromkeys(bad, out_of_resources))
    tuned = bench.tune(lambda: launch(kernel, numbers()), search=search)
    assert torch.equal(tuned(), numbers() + 1)
    (good,) = set(BLOCKS) - set(bad)
    assert set(bench.blocks()) == {good} | ({16} if 16 not in bad else set())
    assert block_of(only(tuned.report).config) == good
    assert len(only(tuned.report).banned) == 2


@pytest.mark.parametrize("where", ["launch", "pre_hook"])
def test_when_all_fail_one_error_names_kernel_key_and_every_reason(bench, where):
    kernel = inject(bench, where, dict.fromkeys(BLOCKS, out_of_resources))
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with pytest.raises(NoValidConfig) as caught:
        tuned()
    message = str(caught.value)
    assert message.startswith("add[64, float32, float32]: all 3 configs failed on some rank. ")
    for block in BLOCKS:
        assert f"Rank 0, BLOCK: {block}" in message
    assert message.count("out of resource: shared memory, Required: 262144") == 3
    assert isinstance(caught.value, TuningError)
    assert Autotuner.run is STOCK_RUN
    assert not is_tuning()
    assert [(record.outcome, record.warning) for record in records(SessionClosed)] == [("NoValidConfig", "")]


def test_after_all_have_failed_the_next_call_starts_anew(bench):
    kernel = inject(bench, "launch", dict.fromkeys(BLOCKS, out_of_resources))
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    for _ in range(2):
        with pytest.raises(NoValidConfig):
            tuned()
    kernel.fn.failures.clear()
    assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks() == [16, 32, 64, 32]


def test_a_kernel_without_a_working_config_does_not_spoil_the_settled_ones(bench):
    good, bad = bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 1.0, 32: 1.0}, double)
    tuned = bench.tune(lambda with_bad: launch(bad if with_bad else good, numbers()))
    tuned(False)
    bad.fn.failures.update(dict.fromkeys((16, 32), out_of_resources))
    with pytest.raises(NoValidConfig):
        tuned(True)
    bench.forget()
    tuned(False)
    assert bench.blocks() == [32]


def test_a_config_that_fails_once_in_a_while_is_banned_by_its_first_failure(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    attempts = itertools.count()
    run = kernel.fn.run

    def flaky(*args, **kwargs):
        if kwargs["BLOCK"] == 32 and next(attempts) == 2:
            raise out_of_resources()
        return run(*args, **kwargs)

    kernel.fn.run = flaky
    tuned = bench.tune(lambda: launch(kernel, numbers()), n_repeat=5)
    tuned()
    assert bench.blocks() == [16] * 5 + [32, 32] + [16, 16]
    assert block_of(only(tuned.report).config) == 16


def test_a_config_that_fails_in_a_later_launch_of_a_run_is_replaced_there(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, key=())
    run = kernel.fn.run

    def fails_for_large(x, y, n, **kwargs):
        if kwargs["BLOCK"] == 32 and n > 100:
            raise out_of_resources()
        return run(x, y, n, **kwargs)

    kernel.fn.run = fails_for_large
    outputs = []

    def thunk():
        outputs.extend((n, launch(kernel, numbers(n))) for n in (64, 128, 64))

    tuned = bench.tune(thunk)
    tuned()
    assert all(torch.equal(y, numbers(n) + 1) for n, y in outputs)
    assert bench.blocks()[:6] == [16] * 3 + [32, 16, 16]
    assert block_of(only(tuned.report).config) == 16
    assert list(only(tuned.report).timings.values()) == [3.0]


def test_the_hook_of_the_config_that_stands_in_runs_once_per_launch(bench):
    hooked = []
    hooks = {block: lambda arguments, block=block: hooked.append(block) for block in BLOCKS}
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0}, pre_hooks=hooks)
    kernel.fn.failures[32] = out_of_resources
    bench.tune(lambda: launch(kernel, numbers()))()
    assert bench.blocks() == [16, 16, 64, 64]
    assert hooked == [16, 32, 16, 64, 64]


def test_best_config_is_the_one_that_stood_in(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    kernel.fn.failures[32] = out_of_resources
    seen = []

    def thunk():
        launch(kernel, numbers())
        seen.append(block_of(kernel.best_config))

    bench.tune(thunk)()
    assert seen == bench.blocks()


def test_failing_is_written_down_with_its_reason(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    kernel.fn.failures[32] = out_of_resources
    bench.tune(lambda: launch(kernel, numbers()))()
    (banned,) = records(Banned)
    assert (banned.run, banned.config_id, banned.by_rank, banned.kernel) == (1, 1, 0, "add")
    assert "out of resource: shared memory" in banned.reason


def test_online_a_failing_config_is_replaced_too(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    kernel.fn.failures[32] = out_of_resources
    tuned = bench.tune(lambda: launch(kernel, numbers()), mode="online")
    for _ in range(6):
        assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks() == [16, 16, 64, 64, 64, 64]
    assert tuned.settled


def test_a_config_that_kills_the_process_is_the_last_thing_in_its_log(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    kernel.fn.failures[32] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    (result,) = run_ranks(lambda rank: tuned(), 1, init="none", fresh=False)
    assert result.signal is signal.SIGKILL
    last = records()[-1]
    assert isinstance(last, RunStarted)
    (admitted,) = records(ContextAdmitted)
    assert last.plan == {admitted.context: 1}
    assert "BLOCK: 32" in admitted.candidates[1]


def test_stock_timings_hold_inf_for_what_failed(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    kernel.fn.failures[32] = out_of_resources
    bench.tune(lambda: launch(kernel, numbers()))()
    by_block = {block_of(config): times for config, times in kernel.configs_timings.items()}
    assert by_block == {16: [3.0] * 3, 32: [float("inf")] * 3}


def test_a_winner_on_disk_that_fails_now_is_replaced_and_the_rest_is_tuned_anew(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    bench.tune(lambda: launch(kernel, numbers()))()
    bench.forget()
    fresh = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    fresh.fn.failures[32] = out_of_resources
    tuned = bench.tune(lambda: launch(fresh, numbers()))
    assert torch.equal(tuned(), numbers() + 1)
    assert 32 not in bench.blocks()
    assert block_of(only(tuned.report).config) == 64
    assert only(tuned.report).status == "tuned"


@pytest.mark.parametrize("where", ["launch", "pre_hook"])
@every_failure
def test_a_settled_winner_that_fails_is_replaced_in_the_same_call(bench, failure, where):
    errors: dict[int, Callable[[], Exception]] = {}
    hooks = {32: lambda arguments: fail(errors) if where == "pre_hook" else None}
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0}, pre_hooks=hooks)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    tuned()
    bench.forget()
    errors[32] = failure
    if where == "launch":
        kernel.fn.failures[32] = failure
    for _ in range(3):
        assert torch.equal(tuned(), numbers() + 1)
        assert Autotuner.run is STOCK_RUN
    assert 32 not in bench.blocks()


def fail(errors: dict[int, Callable[[], Exception]]) -> None:
    for error in errors.values():
        raise error()


# ---- memory


def test_a_launch_that_runs_out_of_memory_is_banned_and_its_memory_is_free(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    workspaces: list[weakref.ref[torch.Tensor]] = []

    def failing():
        workspace = torch.zeros(1000)
        workspaces.append(weakref.ref(workspace))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    kernel.fn.failures[32] = failing
    alive = []

    def thunk():
        y = launch(kernel, numbers())
        alive.extend(workspace() is not None for workspace in workspaces)
        return y

    gc.disable()
    try:
        tuned = bench.tune(thunk)
        assert torch.equal(tuned(), numbers() + 1)
    finally:
        gc.enable()
    assert alive
    assert not any(alive)
    assert "OutOfMemoryError" in next(iter(only(tuned.report).banned.values()))


def out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def compiler_trouble(*_: Any) -> Any:
    raise RuntimeError("PassManager::run failed")


@pytest.mark.parametrize("raising", [out_of_memory, compiler_trouble])
def test_an_error_of_the_grid_function_is_the_users(bench, raising):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    with pytest.raises(RuntimeError) as caught:
        bench.tune(lambda: kernel[raising](numbers(), numbers(), 64))()
    assert "failed" in str(caught.value) or isinstance(caught.value, torch.OutOfMemoryError)
    assert records(Banned) == []


def test_a_grid_may_be_any_callable(bench):
    class Grid:
        def __call__(self, meta):
            out_of_memory()

    for grid in (Grid(), functools.partial(out_of_memory, 1), Grid().__call__):
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        with pytest.raises(torch.OutOfMemoryError):
            bench.tune(lambda kernel=kernel, grid=grid: kernel[grid](numbers(), numbers(), 64))()


def test_an_allocation_that_fails_in_a_hook_is_the_users(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, pre_hooks={32: out_of_memory})
    with pytest.raises(torch.OutOfMemoryError):
        bench.tune(lambda: launch(kernel, numbers()))()
    assert records(Banned) == []


def test_an_allocation_that_fails_elsewhere_in_the_function_is_the_users(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})

    def thunk():
        launch(kernel, numbers())
        out_of_memory()

    with pytest.raises(torch.OutOfMemoryError):
        bench.tune(thunk)()
    assert records(Banned) == []


# ---- errors that are none of ours


@pytest.mark.parametrize("where", ["launch", "pre_hook"])
@pytest.mark.parametrize(
    "error",
    [
        KeyError("no such argument"),
        AssertionError("bad shape"),
        TypeError("missing argument"),
        ValueError("bad stride"),
        RuntimeError("the size of tensor a must match"),
        NotImplementedError("PassManager::run failed"),
        StopIteration(),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("bad", [16, 64], ids=["first run", "last trial"])
def test_other_errors_propagate_unchanged_and_nothing_stays_patched(bench, where, error, bad):
    kernel = inject(bench, where, {bad: lambda: error})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with pytest.raises(type(error)) as caught:
        tuned()
    assert caught.value is error
    assert Autotuner.run is STOCK_RUN
    assert not is_tuning()
    assert records(Banned) == []
    assert len(records(RunFailed)) == 1


def test_after_an_error_of_the_users_the_next_call_goes_on(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    kernel.fn.failures[64] = lambda: KeyError("once")
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with pytest.raises(KeyError):
        tuned()
    kernel.fn.failures.clear()
    assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks() == [16, 32, 64, 32]


def test_the_only_config_of_a_kernel_fails_as_it_does_without_the_tuner(bench):
    kernel = bench.kernel({16: 1.0})
    kernel.fn.failures[16] = out_of_resources
    with pytest.raises(OutOfResources):
        bench.tune(lambda: launch(kernel, numbers()))()


# ---- compiled and loaded before it is tried: with a compiler in place of the interpreter's


class FakeKernel:
    """A compiled kernel that loads, or does not."""

    def __init__(self, block: int, failures: dict[int, Callable[[], Exception]]) -> None:
        self.block = block
        self.failures = failures
        self.loads = 0

    def _init_handles(self) -> None:
        self.loads += 1
        if self.block in self.failures:
            raise self.failures[self.block]()


@pytest.fixture
def compiler(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let kernels of `bench` be compiled and loaded; return what makes such a kernel."""
    monkeypatch.setattr("dist_autotune.intercept.is_interpreted", lambda: False)
    monkeypatch.setattr(compiling, "current_device", lambda: 0)

    def make(ms, *, compiles=None, loads=None, queued=True, **options):
        kernel = bench.kernel(ms, **options)
        kernel.compiled = []
        run = kernel.fn.run

        def compile_or_run(*args, grid, warmup, **kwargs):
            if not warmup:
                return run(*args, grid=grid, warmup=False, **kwargs)
            block = kwargs["BLOCK"]
            kernel.compiled.append(block)

            def compiled():
                if block in (compiles or {}):
                    raise compiles[block]()
                return FakeKernel(block, loads or {})

            mode = active_mode.get()
            if mode is None or not queued:
                return compiled()
            callbacks = len(inspect.signature(mode.submit).parameters) - 2  # one more from Triton 3.8 on
            return mode.submit(block, compiled, *[lambda kernel: None] * callbacks)

        kernel.fn.run = compile_or_run
        return kernel

    return make


@pytest.mark.parametrize("queued", [True, False], ids=["queued", "at once"])
@pytest.mark.parametrize("phase", ["compiles", "loads"])
@every_failure
def test_a_config_that_does_not_load_is_banned_before_it_is_tried(bench, compiler, phase, failure, queued):
    kernel = compiler({16: 3.0, 32: 1.0, 64: 2.0}, queued=queued, **{phase: {32: failure}})
    launched = []
    kernel.fn.failures[32] = lambda: launched.append(32) or failure()
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks() == [16, 64, 64]
    assert launched == []
    assert type(failure()).__name__ in next(iter(only(tuned.report).banned.values()))
    assert [record.run for record in records(Banned)] == [0]


def test_all_candidates_but_the_first_incumbent_are_compiled_after_the_first_run(bench, compiler):
    kernel = compiler({16: 3.0, 32: 1.0, 64: 2.0})
    compiled_at = []

    def thunk():
        y = launch(kernel, numbers())
        compiled_at.append(list(kernel.compiled))
        return y

    bench.tune(thunk)()
    assert set(compiled_at[0]) <= {16}
    assert {32, 64} <= set(compiled_at[1])


def test_a_first_incumbent_that_does_not_launch_is_replaced(bench, compiler):
    kernel = compiler({16: 1.0, 32: 3.0}, compiles={16: out_of_resources})
    kernel.fn.failures[16] = out_of_resources
    assert torch.equal(bench.tune(lambda: launch(kernel, numbers()))(), numbers() + 1)
    assert set(bench.blocks()) == {32}


def test_when_no_candidate_loads_the_error_lists_all(bench, compiler):
    kernel = compiler({16: 1.0, 32: 1.0}, compiles=dict.fromkeys((16, 32), out_of_resources))
    kernel.fn.failures.update(dict.fromkeys((16, 32), out_of_resources))
    with pytest.raises(NoValidConfig, match="all 2 configs failed"):
        bench.tune(lambda: launch(kernel, numbers()))()


def test_a_config_with_a_hook_is_compiled_by_its_launch_because_the_hook_belongs_to_one(bench, compiler):
    hooked = []
    hooks = {block: lambda arguments, block=block: hooked.append(block) for block in (16, 32)}
    kernel = compiler({16: 3.0, 32: 1.0}, pre_hooks=hooks)
    bench.tune(lambda: launch(kernel, numbers()))()
    assert hooked == bench.blocks() == [16, 32, 32]


def test_a_config_is_loaded_before_the_clock_starts(bench, compiler):
    kernel = compiler({16: 3.0, 32: 1.0}, pre_hooks={32: lambda arguments: None})
    order: list[Any] = []
    start, run = bench.clock.start, kernel.fn.run
    bench.clock.start = lambda: order.append("start") or start()
    kernel.fn.run = lambda *a, **k: (
        order.append(("compile" if k["warmup"] else "launch", k["BLOCK"])) or run(*a, **k)
    )
    bench.tune(lambda: launch(kernel, numbers()))()
    assert order[:3] == [("compile", 16), "start", ("launch", 16)]
    assert order[-4:-1] == [("compile", 32), "start", ("launch", 32)]


@pytest.mark.parametrize("queued", [True, False], ids=["queued", "at once"])
def test_an_error_of_another_kind_while_compiling_is_the_users(bench, compiler, queued):
    kernel = compiler({16: 3.0, 32: 1.0}, queued=queued, compiles={32: lambda: KeyError("user's own")})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with pytest.raises(KeyError, match="user's own"):
        tuned()
    assert Autotuner.run is STOCK_RUN


def test_pruned_configs_are_not_compiled(bench, compiler):
    kernel = compiler(
        {16: 3.0, 32: 1.0, 64: 2.0},
        prune_configs_by={"early_config_prune": lambda configs, args, **kwargs: configs[:2]},
    )
    bench.tune(lambda: launch(kernel, numbers()))()
    assert 64 not in kernel.compiled
    assert isinstance(kernel.configs[2], triton.Config)
