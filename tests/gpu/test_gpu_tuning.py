"""The tuner on one GPU: CUDA events, loading before timing, capture, streams, launches without an end."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from gpu_cases import BLOCKS, make_scale, scaled
from kernels_for_tests import accumulate
from triton.tools.tensor_descriptor import TensorDescriptor

from dist_autotune import ContextualAutotuner, EventClock, contextual_autotune, tunable
from dist_autotune.errors import LaunchTimeout
from dist_autotune.timing.stream_filler import CYCLES_PER_MS
from ranks import run_ranks

pytestmark = pytest.mark.gpu
TIMES = pytest.mark.gpu(alone=True)  # which are compared

SIZE = 1 << 24


def tuned(fn: Callable[..., Any], **options: Any) -> ContextualAutotuner[..., Any]:
    return contextual_autotune(fn, **{"cache": False, "n_warmup": 0, "n_repeat": 3, **options})


@TIMES
def test_times_in_context_agree_with_a_benchmark_of_the_winner() -> None:
    kernel, x = make_scale(), torch.randn(8 * SIZE, device="cuda")
    thunk = tuned(lambda: scaled(kernel, x), n_warmup=2, n_repeat=9)
    thunk()
    report = thunk.report
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), kernel.best_config.kwargs["BLOCK"]),)
    alone_ms = triton.testing.do_bench(
        lambda: kernel.fn[grid](x, y, x.numel(), 2.0, **kernel.best_config.all_kwargs()), return_mode="median"
    )
    assert report.contexts[0].ms == pytest.approx(alone_ms, rel=0.15)


def test_a_hook_that_shapes_a_descriptor_and_zeroes_an_output_is_rehearsed_beside_a_cuda_context(tmp_path):
    """A child that touched the GPU would fail, and its config would be left to its first launch."""

    def hook(nargs: dict[str, Any]) -> None:
        calls.append(nargs["BLOCK"])
        nargs["x_desc"].block_shape = [nargs["BLOCK"], 64]
        nargs["y_ptr"].zero_()

    @triton.autotune([triton.Config({"BLOCK": block}, pre_hook=hook) for block in (32, 64, 128)], key=["n"])
    @triton.jit
    def add(x_desc, y_ptr, n, BLOCK: tl.constexpr):
        row = tl.program_id(0) * BLOCK
        offs = (row + tl.arange(0, BLOCK))[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.atomic_add(y_ptr + offs, x_desc.load([row, 0]))

    n = 4096
    x, calls, runs = torch.randn(n, 64, device="cuda"), [], []

    def thunk() -> torch.Tensor:
        y = torch.full_like(x, math.nan)
        descriptor = TensorDescriptor.from_tensor(x, [16, 64])
        add[lambda meta: (n // meta["BLOCK"],)](descriptor, y, n)
        runs.append(torch.equal(y, x))
        return y

    function = tuned(thunk, log_dir=str(tmp_path))
    function()
    report = function.report
    assert runs == [True] * report.runs
    assert len(calls) == report.runs
    records = map(json.loads, (tmp_path / "rank-0.jsonl").read_text().splitlines())
    (compiled,) = [record for record in records if record["event"] == "preflighted"]
    assert compiled["compiled"] + compiled["cached"] == 2
    assert compiled["remark"] == ""


@TIMES
def test_events_are_recorded_on_the_stream_of_the_launch() -> None:
    kernel, x = make_scale(), torch.randn(SIZE, device="cuda")
    side = torch.cuda.Stream()

    @tuned
    def thunk() -> torch.Tensor:
        torch.cuda._sleep(20_000_000)  # 10 ms on the default stream: must not be charged to the kernel
        with torch.cuda.stream(side):
            y = scaled(kernel, x)
        torch.cuda.current_stream().wait_stream(side)
        return y

    assert torch.equal(thunk(), 2 * x)
    report = thunk.report
    assert all(ms < 5 for ms in report.contexts[0].timings.values())


# ---- whose time a sample is


def tuned_alone_on_its_stream(**options: Any) -> Any:
    """Return what tuning finds of a kernel that always meets an idle stream."""
    kernel, x = make_scale(), torch.randn(1 << 16, device="cuda")

    def thunk() -> None:
        scaled(kernel, x)
        torch.cuda.synchronize()

    tuning = tuned(thunk, n_warmup=2, n_repeat=7, **options)
    tuning()
    report = tuning.report
    return report.contexts[0]


@TIMES
def test_a_kernel_on_an_idle_stream_is_timed_without_the_hosts_part() -> None:
    fed, bare = tuned_alone_on_its_stream(), tuned_alone_on_its_stream(clock=EventClock(feeds=False))
    assert not fed.launch_bound
    assert bare.launch_bound
    assert bare.config.kwargs["BLOCK"] == BLOCKS[0]  # the incumbent: the host decides nothing
    assert fed.ms < bare.ms


# ---- launches that do not end, and that break the device


def test_a_config_that_never_ends_is_named_and_nothing_hangs() -> None:
    @triton.autotune([triton.Config({"SPINS": spins}) for spins in (False, True)], key=["n"])
    @triton.jit
    def wait(flag_ptr, y_ptr, n, SPINS: tl.constexpr):
        if SPINS:
            while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
                pass
        tl.store(y_ptr, n)

    flag, y = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, device="cuda")
    side = torch.cuda.Stream()
    flag.fill_(1).fill_(0)  # its kernel is loaded now: that could wait for the kernel it is to release
    torch.cuda.synchronize()
    thunk = tuned(lambda: wait[(1,)](flag, y, 7), timeout_s=3, n_repeat=1, name="step")
    try:
        with pytest.raises(LaunchTimeout) as caught:
            thunk()
    finally:
        with torch.cuda.stream(side):
            flag.fill_(1)
        torch.cuda.synchronize()
    text = str(caught.value)
    assert "Rank 0: run 1 of step: cuda:0 did not end a launch within 3 s" in text
    assert "wait[7" in text
    assert "SPINS: True" in text
    assert "SPINS: False" not in text
    thunk()  # the flag is up: it ends
    assert thunk.settled


def illegal_access(rank: int) -> tuple[bool, str]:
    """Return whether the error is caught as torch's own, and its text."""

    @triton.autotune([triton.Config({"OFFSET": offset}) for offset in (0, 1 << 40)], key=["n"])
    @triton.jit
    def write(y_ptr, n, OFFSET: tl.constexpr):
        tl.store(y_ptr + OFFSET, n)

    y = torch.zeros(1, device="cuda")
    thunk = tuned(lambda: write[(1,)](y, 7), n_repeat=1, name="step")
    try:
        thunk()
    except torch.AcceleratorError as error:
        return True, str(error)
    except RuntimeError as error:
        return False, str(error)
    return False, "it ended"


def test_an_illegal_access_ends_the_call_and_names_the_config() -> None:
    (result,) = run_ranks(illegal_access, 1, init="none", timeout_s=120)
    assert result.ok, result
    is_torchs, text = result.value
    assert is_torchs, text
    assert "Rank 0: run 1 of step: " in text
    assert "illegal memory access" in text
    assert f"OFFSET: {1 << 40}" in text


# ---- replays as the judge

WAYS_MS = {"pull": (0.1, 0.4), "push": (0.2, 0.2)}  # eager, captured


@TIMES
def test_what_wins_in_replays_is_captured_and_no_memory_is_left() -> None:
    x = torch.ones(1 << 24, device="cuda")

    def step() -> torch.Tensor:
        way = tunable("way of a step", [*WAYS_MS])
        torch.cuda._sleep(int(WAYS_MS[way][torch.cuda.is_current_stream_capturing()] * CYCLES_PER_MS))
        chosen.append(way)
        return x + 1

    chosen: list[str] = []
    eager, replayed = (tuned(step, objective=objective) for objective in ("kernel", "graph"))
    eager()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    replayed()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    found = []
    for function in (eager, replayed):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = function()
        found.append(chosen[-1])
        x.fill_(2.0)
        graph.replay()
        assert torch.equal(y, x + 1)
    assert found == ["pull", "push"]


# ---- tensors that kernels change in place


@pytest.mark.parametrize("sign", ["restore_value", "reset_to_zero"])
def test_streams_and_replays_change_it_once(sign):
    n = 1 << 22
    configs = [triton.Config({"BLOCK": block}) for block in (128, 512, 1024, 2048)]
    kernel = triton.autotune(configs, ["n"], **{sign: ["y_ptr"]})(accumulate)
    x, y, side = torch.ones(n, device="cuda"), torch.zeros(n, device="cuda"), torch.cuda.Stream()
    outputs = []

    @contextual_autotune(cache=False, progress=False)
    def step():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000)  # what follows would overtake it on the other stream
            kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
        torch.cuda.current_stream().wait_stream(side)
        own = torch.zeros(n, device="cuda")
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, own, n)
        outputs.append(own.sum())

    step()
    assert step.report.runs > 4
    assert torch.equal(y, x)
    assert all(int(total) == n for total in outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    step()
    torch.cuda.synchronize()
    assert torch.equal(y, 3 * x)
