"""The tuner on two GPUs: one rank's device refuses a config, a rank dies, autograd's threads, captures."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import triton
from dense_runs import call_and_compare
from gpu_cases import make_scale, scaled
from kernels_for_tests import is_outside
from operation_runs import GPU_BACKENDS, results, values
from operations import factors

from dist_autotune import TuningError, contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from ranks import assert_killed, describe, meet

pytestmark = pytest.mark.gpu(devices=2)

SIZE = 1 << 22
PATIENCE_S = 5.0


def tune(thunk: Any = None, **options: Any) -> Any:
    return contextual_autotune(
        thunk, **{"is_dist": True, "cache": False, "log_dir": None, "n_warmup": 0, "n_repeat": 2, **options}
    )


# ---- a config that fits one device only


def with_a_small_device(rank: int, backend: str) -> tuple[list[float], list[str], str, int]:
    """Let rank 1's device have little shared memory, as far as loading asks for it."""
    torch.manual_seed(rank)
    if rank == 1:
        triton.compiler.compiler.max_shared_mem = lambda device: 120_000
    all_gather_gemm.configs = CANDIDATES
    errors: list[float] = []
    sms = torch.cuda.get_device_properties(rank).multi_processor_count
    fixed = {"consumer": "plain", "pieces": 1, "programs": sms}  # the kernel alone is tuned
    with AllGatherGemm(512, 1024, torch.bfloat16, backend=backend, timeout_s=60.0, **fixed) as op:

        @tune
        def step() -> None:
            errors.append(call_and_compare(op, 512, 1024))

        step()
    (context,) = step.report.contexts
    reasons = sorted({reason.partition(", Required")[0] for reason in context.banned.values()})
    return errors, reasons, str(context.config), step.report.runs


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_config_that_does_not_fit_one_of_the_devices_is_banned_on_both(backend: str) -> None:
    first, second = values(with_a_small_device, 2, backend, timeout_s=240)
    for errors, reasons, _, runs in (first, second):
        assert max(errors) < 1
        assert len(errors) == runs
        assert reasons
        assert all(
            reason.startswith("rank 1: OutOfResources: out of resource: shared memory") for reason in reasons
        )
    assert first[1:] == second[1:]


# ---- a rank dies while the other's kernel waits for it


def killed_while_tuning(rank: int, backend: str) -> tuple[str, float, bool, float]:
    torch.manual_seed(rank)
    all_gather_gemm.configs = CANDIDATES[:6]
    op = AllGatherGemm(512, 1024, torch.bfloat16, backend=backend, timeout_s=PATIENCE_S)
    runs = 0

    def step() -> None:
        nonlocal runs
        runs += 1
        if runs == 4:
            meet()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        op(*factors(512, 1024, 1024, torch.bfloat16))
        op.check()

    began = time.monotonic()
    try:
        tune(step, timeout_s=30.0)()
        end = "nothing was raised"
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - began
    op.abandon()
    free = torch.ones(1 << 20, device="cuda").sum()  # a kernel that runs to its end: nothing spins any more
    torch.cuda.synchronize()
    return end, took_s, is_outside(), float(free)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_rank_that_is_killed_while_tuning_leaves_the_other_with_an_error_and_a_free_gpu(backend):
    survivor, dead = results(killed_while_tuning, 2, backend, timeout_s=200)
    assert_killed(dead)
    assert survivor.ok, describe(survivor)
    end, took_s, is_stock, total = survivor.value
    assert end == (
        "PeerTimeout: AllGatherGemm, rank 0: rank 1, or one that it waits for, did not push chunk 1 in time. "
        "Find out what that rank is doing. If it waits for a send of this rank, call meet_first(). "
        "Close it on all ranks and open another"
    )
    assert took_s < 120
    assert is_stock
    assert total == 1 << 20


# ---- kernels that backward launches, from autograd's own thread


class Scale(torch.autograd.Function):
    kernel: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return scaled(Scale.kernel, grad.contiguous())


def tuned_in_backward(rank: int) -> tuple[list[bool], str, int]:
    Scale.kernel = make_scale()
    x = torch.randn(SIZE, device="cuda", requires_grad=True)
    right: list[bool] = []

    @tune
    def step() -> None:
        x.grad = None
        Scale.apply(x).sum().backward()
        right.append(bool((x.grad == 2).all()))

    step()
    return right, str(step.report.contexts[0].config), step.report.runs


def test_kernels_launched_from_autograds_thread_are_tuned_alike_on_both_ranks() -> None:
    first, second = values(tuned_in_backward, 2)
    assert first == second
    right, _, runs = first
    assert right == [True] * 7
    assert runs == 7


# ---- captures


def captured(rank: int) -> tuple[bool, bool, str]:
    kernel, x = make_scale(), torch.randn(SIZE, device="cuda")
    step = tune(lambda: scaled(kernel, x))
    launch_first = kernel.configs[0].all_kwargs()
    # Loads it: a capture may not. With the same n, as another one would be another binary.
    kernel.fn[(1,)](x, torch.empty_like(x), x.numel(), 2.0, **launch_first)
    right = []
    for _ in range(2):  # before anything is tuned, and after
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = step()
        x.normal_()
        graph.replay()
        right.append(torch.equal(y, 2 * x))
        step()
    return right[0], right[1], str(step.report.contexts[0].config)


def test_a_call_under_capture_launches_the_incumbent_on_both_ranks_and_replays_right() -> None:
    first, second = values(captured, 2)
    assert first == second
    assert first[:2] == (True, True)


# ---- replays as the judge


def refusing_a_capture(rank: int) -> tuple[str, str, float]:
    """Return how a call ended whose capture rank 1 refused, and how wrong a graph of the next one is."""
    torch.manual_seed(rank)
    all_gather_gemm.configs = CANDIDATES[:2]
    sms = torch.cuda.get_device_properties(rank).multi_processor_count
    fixed = {"consumer": "plain", "pieces": 1, "programs": sms, "backend": "torch"}
    refuses, out = [True], torch.empty(1024, 1024, dtype=torch.bfloat16, device=f"cuda:{rank}")
    with AllGatherGemm(512, 2048, torch.bfloat16, timeout_s=60.0, **fixed) as op:
        a_shard, weight = factors(512, 1024, 2048, torch.bfloat16)

        @tune(objective="graph")
        def step() -> None:
            if rank == 1 and refuses and torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()
            op(a_shard, weight, out)

        try:
            step()
            ended = "no error"
        except TuningError as error:
            ended = f"{type(error).__name__}: {error}"
        refuses.clear()
        step()
        wanted, graph = out.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        out.fill_(float("nan"))
        graph.replay()
        op.check()
        (context,) = step.report.contexts
        return ended, str(context.config), float((out - wanted).abs().max())


def test_a_capture_that_one_rank_refuses_ends_the_call_on_both_and_the_next_one_tunes() -> None:
    (first, *peer), (second, *own) = values(refusing_a_capture, 2, timeout_s=120)
    assert first.startswith("PeerFailed: rank 1 failed")
    assert second.startswith("CaptureFailed: objective='graph': rank 1 cannot capture ")
    assert peer == own
    assert own[1] == 0.0
