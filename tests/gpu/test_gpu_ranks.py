"""The tuner on two GPUs, of which one refuses to be captured."""

from typing import Any

import pytest
import torch
from operation_runs import values
from operations import factors

from dist_autotune import TuningError, contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm

pytestmark = pytest.mark.gpu(devices=2)


def tune(thunk: Any = None, **options: Any) -> Any:
    return contextual_autotune(
        thunk, **{"is_dist": True, "cache": False, "log_dir": None, "n_warmup": 0, "n_repeat": 2, **options}
    )


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
