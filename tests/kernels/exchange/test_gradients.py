"""That operations without a backward refuse tensors that ask for one, before any peer hears of the call."""

from __future__ import annotations

import functools

import ag_gemm_runs
import gemm_rs_runs
import pytest
import torch
from ag_moe_runs import GATHERING
from moe_rs_runs import SCATTERING
from moe_runs import HALF
from operation_runs import INTERPRETER, message_of, values

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.elementwise_add import elementwise_add
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.persistent_gemm import persistent_matmul

pytestmark = INTERPRETER


def told(name: str, *asking: str) -> str:
    return (
        f"RuntimeError: {name} has no backward, but grad is enabled and required by {', '.join(asking)}: its "
        f"result would have no gradient. Call it under torch.no_grad(), or pass {asking[0]}.detach()"
    )


def asked_on_one_rank(rank):
    """Let rank 0 alone ask for gradients, and every rank call again without; return what it was told."""
    ag_gemm_runs.begin(rank)
    gemm_rs_runs.begin(rank)
    found = []
    with (
        AllGatherGemm(8, 16, HALF, timeout_s=10.0) as gather,
        GemmReduceScatter(8, 16, HALF, timeout_s=10.0) as scatter,
    ):
        for op, shapes, names in (
            (gather, ((8, 16), (24, 16)), ["a_shard", "weight"]),
            (scatter, ((8, 16), (16, 16)), ["a", "weight"]),
        ):
            left, right = (torch.ones(shape, dtype=HALF) for shape in shapes)
            texts = []
            if rank == 0:
                weight = torch.nn.Parameter(right)
                for given in (left, left.clone().requires_grad_()):
                    texts.append(message_of(functools.partial(op, given, weight)))
            with torch.no_grad():
                out = op(left, torch.nn.Parameter(right))
            wanted = 16.0 if op is gather else 32.0
            found.append((texts, names, type(op).__name__, bool((out == wanted).all()), out.requires_grad))
    return found


def test_one_rank_that_asks_for_gradients_is_told_and_the_next_call_is_right():
    for rank, found in enumerate(values(asked_on_one_rank, 2)):
        for texts, names, kind, right, requires_grad in found:
            assert texts == ([told(kind, names[1]), told(kind, *names)] if rank == 0 else [])
            assert right
            assert not requires_grad


def asked_of_experts(rank):
    """Let rank 0 alone ask for gradients of weights, where the hosts would otherwise have met."""
    found = []
    for runs in (GATHERING, SCATTERING):
        runs.begin(rank)
        of_operation, of_call = runs.sizes(16, 24)
        with runs.open(8, of_operation, HALF, timeout_s=10.0) as op:
            text = ""
            if rank == 0:
                given = [*runs.operands(op, [4, 4], of_call, 3, 2)]
                which = next(i for i, each in enumerate(given) if each.dim() == 3)
                given[which] = given[which].requires_grad_()
            else:
                runs.operands(op, [4, 4], of_call, 3, 2)  # its inputs come from all ranks
            if rank == 0:
                text = message_of(lambda op=op, given=given: op(*given))
            found.append((runs.name, text, runs.call_and_compare(op, [4, 4], of_call, 3, 2)))
    return found


def test_experts_that_ask_for_gradients_are_told_before_the_hosts_meet():
    for rank, found in enumerate(values(asked_of_experts, 2)):
        for name, text, error in found:
            assert text == (told(name, "weight") if rank == 0 else "")
            assert error < 1


def gates_with_gradients(rank):
    SCATTERING.begin(rank)
    with SCATTERING.open(8, 24, HALF) as op:
        y, weight, ids, weights = SCATTERING.operands(op, [4, 4], 16, 3, 2)
        return message_of(lambda: op(y, weight, ids, weights.requires_grad_()))


def test_gates_that_ask_for_gradients_are_told():
    assert values(gates_with_gradients, 2) == [told("MoEReduceScatter", "topk_weights")] * 2


@pytest.mark.parametrize(
    ("call", "name"),
    [(persistent_matmul, "persistent_matmul"), (elementwise_add, "elementwise_add")],
    ids=["persistent_matmul", "elementwise_add"],
)
def test_operations_of_one_process_refuse_gradients_where_grad_is_enabled(call, name):
    plain, asking = torch.ones(16, 16, dtype=HALF), torch.ones(16, 16, dtype=HALF, requires_grad=True)
    assert message_of(lambda: call(plain, asking)) == told(name, "b")
    assert message_of(lambda: call(asking, plain, asking)) == told(name, "a", "out")
    wanted = call(plain, plain)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(call(asking, asking.detach()), wanted)
    assert torch.equal(call(asking.detach(), plain), wanted)  # grad is enabled, and nobody asks for it
