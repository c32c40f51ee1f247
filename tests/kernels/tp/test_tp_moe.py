"""That a mixture of experts trains as the same experts in plain torch do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from operation_runs import INTERPRETER, message_of, values
from torch import nn
from torch.utils.checkpoint import checkpoint
from tp_runs import assert_close, tensor_of, tensors_of_all, workspaces

from dist_autotune.kernels import tp

pytestmark = [
    INTERPRETER,
    # torch._dynamo makes an instance of every torch.autograd.Function.
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
]

EXPERTS, TOPK, FEATURES, TOKENS = 4, 2, 16, 6


def plain_experts(hidden):
    """Return router and experts with the same random weights on every rank."""
    torch.manual_seed(0)
    router = nn.Linear(FEATURES, EXPERTS, bias=False)
    sizes = ((FEATURES, hidden), (FEATURES, hidden), (hidden, FEATURES))
    return router, [tuple(nn.Linear(*size, bias=False) for size in sizes) for _ in range(EXPERTS)]


def plain_moe(router, experts, x):
    chances, ids = F.linear(x, router.weight).softmax(-1).topk(TOPK)
    weights = chances / chances.sum(-1, keepdim=True)
    of_all = torch.stack([down(F.silu(gate(x)) * up(x)) for gate, up, down in experts], 1)
    chosen = of_all.gather(1, ids[..., None].expand(-1, -1, FEATURES))
    return (chosen * weights[..., None]).sum(1)


def gradient(linear):
    return linear.weight.grad


def trained_beside_plain(rank, how):
    with workspaces(rank) as world:
        mesh, hidden = dist.init_device_mesh("cpu", (world,)), 8 * world
        router, experts = plain_experts(hidden)
        layer = tp.MoE(router, experts, mesh, topk=TOPK)
        forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if how == "compiled" else layer
        for step in range(2):  # gradients add up
            shards = tensors_of_all(world, TOKENS, FEATURES, seed=step)
            x = shards[rank].detach().requires_grad_()
            result = checkpoint(layer, x, use_reentrant=False) if how == "checkpointed" else forward(x)
            wanted = plain_moe(router, experts, torch.cat(shards))
            assert_close(result, wanted.chunk(world)[rank])
            result.sin().sum().backward()
            wanted.sin().sum().backward()
            assert_close(x.grad, shards[rank].grad)
        of_gates, of_ups, of_downs = (
            torch.stack(list(map(gradient, each))) for each in zip(*experts, strict=True)
        )
        assert_close(layer.router.grad.full_tensor(), router.weight.grad)
        assert_close(layer.gate_up.grad.full_tensor(), torch.stack([of_gates, of_ups], 1))
        assert_close(layer.down.grad.full_tensor(), of_downs)
        with torch.no_grad():
            assert layer(x.view(2, 3, FEATURES)).shape == (2, 3, FEATURES)


@pytest.mark.parametrize(
    ("world", "how"),
    [
        (1, "eager"),
        (2, "eager"),
        (3, "eager"),
        (2, "checkpointed"),
        pytest.param(2, "compiled", marks=pytest.mark.slow),
    ],
)
def test_a_mixture_of_experts_trains_as_plain_torch(world, how):
    values(trained_beside_plain, world, how)


def operators_with_dropped_choices(rank):
    """Drop choices (-1) whose row, and weight, are NaN; compare all gradients with plain torch."""
    with workspaces(rank) as world:
        ops, name = torch.ops.dist_autotune, dist.group.WORLD.group_name
        shards = tensors_of_all(world, TOKENS, 8)
        weights, backs = tensors_of_all(world, 3, 16, 8, seed=1), tensors_of_all(world, 3, 8, 16, seed=2)
        factors = tensors_of_all(world, TOKENS, TOPK, seed=3)
        ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % 4 - 1  # the same on all ranks
        all_ids, x = ids.repeat(world, 1).reshape(-1), torch.cat(shards).repeat_interleave(TOPK, 0)
        kept = (all_ids >= 0).float()[:, None]
        scale = kept * torch.cat(factors).reshape(-1, 1)
        sums = 0
        for each in range(world):
            rows = torch.einsum("rk,rnk->rn", x, weights[each][all_ids]).sin() * kept
            part = torch.einsum("rn,rkn->rk", rows, backs[each][all_ids]) * scale
            sums = sums + part.view(-1, TOPK, 8).sum(1)
        own = [shards[rank], weights[rank], backs[rank], factors[rank]]
        expected = torch.autograd.grad(sums.square().sum(), own)
        rows = ops.all_gather_moe(shards[rank], weights[rank], ids, name).sin()
        got = ops.moe_reduce_scatter(rows, backs[rank], ids, factors[rank], name)
        assert_close(got, sums.chunk(world)[rank])
        for pair in zip(torch.autograd.grad(got.square().sum(), own), expected, strict=True):
            assert_close(*pair)


def test_dropped_choices_count_nowhere_in_the_gradients():
    values(operators_with_dropped_choices, 2)


def opchecked(rank):
    with workspaces(rank) as world:
        ops, name = torch.ops.dist_autotune, dist.group.WORLD.group_name
        ids, factors = torch.tensor([[0, 2], [1, 0], [2, 2]]), tensor_of(rank, 3, 2)
        x, y = tensor_of(rank, 3, 8), tensor_of(rank, 6 * world, 16)
        found = [
            torch.library.opcheck(ops.all_gather_moe.default, (x, tensor_of(rank, 3, 16, 8), ids, name)),
            torch.library.opcheck(
                ops.moe_reduce_scatter.default, (y, tensor_of(rank, 3, 8, 16), ids, factors, name)
            ),
        ]
        return {result for one in found for result in one.values()}


@pytest.mark.slow
def test_the_operators_over_experts_pass_torchs_own_checks():
    assert values(opchecked, 2) == [{"SUCCESS"}] * 2


def mistakes(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    router, experts = plain_experts(16)
    return [
        message_of(lambda: tp.MoE(router, experts[:3], mesh, topk=2)),
        message_of(lambda: tp.MoE(router, experts, mesh, topk=5)),
        message_of(lambda: tp.MoE(*plain_experts(12), mesh, topk=2)),
        message_of(lambda: tp.MoE(nn.Linear(FEATURES, EXPERTS), experts, mesh, topk=2)),
    ]


def test_experts_that_do_not_fit_raise_with_values():
    router = "ValueError: a router of 4 experts"
    for texts in values(mistakes, 2):
        assert texts == [
            f"{router}, 3 experts and topk=2: as many of each, and topk of 1 to that many",
            f"{router}, 4 experts and topk=5: as many of each, and topk of 1 to that many",
            "ValueError: 6 hidden features of a rank; a multiple of 4 is needed, for the weights' gradients",
            "ValueError: router or an expert has a bias, which would be lost; layers without are needed",
        ]
