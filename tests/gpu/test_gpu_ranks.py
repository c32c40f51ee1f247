"""The tuner on two GPUs: a rank dies, a rank refuses a capture."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from kernels_for_tests import is_outside
from operation_runs import GPU_BACKENDS, results, values
from operations import factors

from dist_autotune import TuningError, contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from ranks import assert_killed, describe, meet

pytestmark = pytest.mark.gpu(devices=2)

PATIENCE_S = 5.0


def tune(thunk: Any = None, **options: Any) -> Any:
    return contextual_autotune(
        thunk, **{"is_dist": True, "cache": False, "log_dir": None, "n_warmup": 0, "n_repeat": 2, **options}
    )


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
