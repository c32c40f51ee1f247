"""That operations without a backward refuse tensors that ask for one."""

from __future__ import annotations

import functools

import pytest
import torch
from every_operation import WITH_COLLECTIVES
from expert_runs import SCATTERING
from operation_runs import message_of, on_ranks
from operations import HALF

from dist_autotune.kernels.elementwise_add import elementwise_add
from dist_autotune.kernels.persistent_gemm import persistent_matmul


def told(name: str, *asking: str) -> str:
    return (
        f"RuntimeError: {name} has no backward, but grad is enabled and required by {', '.join(asking)}: its "
        f"result would have no gradient. Call it under torch.no_grad(), or pass {asking[0]}.detach()"
    )


NAMES = {"AllGatherGemm": "a_shard", "GemmReduceScatter": "a", "AllGatherMoE": "x_shard"}


@on_ranks(2)
def test_one_rank_that_asks_for_gradients_is_told_and_the_next_call_is_right(rank):
    for runs in WITH_COLLECTIVES.values():
        runs.begin(rank)
        with runs.open(8, 16, timeout_s=10.0) as op:
            left, weight, *rest = operands = runs.operands(op, [4, 4], 24)
            asking = torch.nn.Parameter(weight.clone())
            name = NAMES.get(runs.name, "y")
            for given, names in ((left, ()), (left.clone().requires_grad_(), (name,))):
                given, factor = (given, asking) if rank == 0 else (left, weight)
                text = message_of(functools.partial(op, given, factor, *rest))
                refused = told(runs.name, *names, "weight")
                assert (text == refused) if rank == 0 else (refused in text), text
            out = runs.new_out(op, [4, 4], operands)
            with torch.no_grad():
                runs.call(op, (left, torch.nn.Parameter(weight), *rest), out, [4, 4])
            assert runs.error_ratio(out, *operands) < 1
            assert not out.requires_grad


@on_ranks(2)
def test_gates_that_ask_for_gradients_are_told(rank):
    SCATTERING.begin(rank)
    with SCATTERING.open(8, 24, HALF) as op:
        y, weight, ids, weights = SCATTERING.operands(op, [4, 4], 16, 3, 2)
        text = message_of(lambda: op(y, weight, ids, weights.requires_grad_()))
        assert text == told("MoEReduceScatter", "topk_weights")


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
