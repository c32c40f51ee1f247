"""That a result which needs a peer that did not come is NaN, whatever lies in the buffers."""

from __future__ import annotations

import contextlib

import ag_gemm_runs
import gemm_rs_runs
import pytest
import torch
from ag_moe_runs import GATHERING
from moe_rs_runs import SCATTERING
from operation_runs import INTERPRETER, values

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.exchange.operation import PeerTimeout
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.signals import as_patience
from ranks import meet

pytestmark = INTERPRETER
HALF = torch.float16


def gathering(rank, consumer, producer):
    ag_gemm_runs.begin(rank)
    op = AllGatherGemm(8, 16, HALF, consumer=consumer, producer=producer)
    arguments = ag_gemm_runs.tensors(8, 24, 16, HALF)
    result = torch.zeros(16, 24, dtype=HALF)
    return (
        op,
        lambda: op(*arguments, result, activation="relu"),
        result,
        slice(8 * (1 - rank), 8 * (2 - rank)),
    )


def scattering(rank):
    gemm_rs_runs.begin(rank)
    op = GemmReduceScatter(16, 24, HALF)
    arguments, result = gemm_rs_runs.operands(16, 24, 16, HALF), torch.zeros(8, 24, dtype=HALF)
    return op, lambda: op(*arguments, result), result, slice(None)


CASES = {
    "fetched": (gathering, "plain", "pull"),
    "pushed": (gathering, "plain", "push"),
    "fetched, cuBLAS": (gathering, "matmul", "pull"),
    "pushed, cuBLAS": (gathering, "matmul", "push"),
    "scattered": (scattering,),
}


def without_a_peer(rank, prepare, *options):
    """Call twice; then rank 0 alone, whose buffers hold what rank 1 sent before, and again."""
    op, call, result, of_peer = prepare(rank, *options)
    call()
    call()
    before = bool(torch.isfinite(result).all())
    meet()
    spoiled = []
    if rank == 0:
        op._patience_ticks = as_patience(0.5)
        check, op._check_usable = op._check_usable, lambda: None  # of replays, which ask no host
        for _ in range(2):
            with contextlib.suppress(PeerTimeout):
                call()
            spoiled.append(bool(result[of_peer].isnan().all()))
        op._check_usable = check
    meet()
    op.abandon()
    return before, spoiled


@pytest.mark.parametrize("case", CASES)
def test_a_result_without_a_peer_is_nan_now_and_later(case):
    assert values(without_a_peer, 2, *CASES[case]) == [(True, [True, True]), (True, [])]


def experts(rank, runs):
    runs.begin(rank)
    op = runs.open(8, 16, HALF)
    operands = runs.operands(op, [4, 4], 24, 3, 2)
    result = runs.new_out(op, [4, 4], operands)
    arguments = runs.given(op, operands, told=True, in_place=False)
    return op, lambda: op(*arguments, out=result, tokens=[4, 4]), result, slice(None)


@pytest.mark.parametrize("runs", [GATHERING, SCATTERING], ids=lambda runs: runs.name)
def test_a_result_over_experts_without_a_peers_choices_is_nan(runs):
    assert values(without_a_peer, 2, experts, runs) == [(True, [True, True]), (True, [])]
