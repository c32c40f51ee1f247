"""Gradients of experts on different ranks are those of one rank that has all tokens and experts."""

import functools

import pytest
import torch
from expert_parallel_runs import HIDDEN, TOKENS, leave_one_candidate, matrices, opened, own_part, routing
from operation_runs import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

from dist_autotune.kernels.ep import (
    ExpertParallelMoE,
    combine,
    dispatch,
    dispatch_matmul,
    launches,
    matmul,
    matmul_combine,
)

INNER, TOPK = 16, 2
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Problem:
    """Tokens, choices and weights of all ranks, alike on each; experts with SwiGLU, or SiLU without w3."""

    def __init__(self, world: int, kind: str, counts: list[int], inner: int = INNER) -> None:
        torch.manual_seed(7)
        self.experts, counts = 2 * world, [counts[rank % len(counts)] for rank in range(world)]
        self.x = [torch.randn(count, HIDDEN) for count in counts]
        self.ids = [routing(kind, count, self.experts, TOPK) for count in counts]
        self.weights = [torch.rand(count, TOPK) for count in counts]
        self.up = [torch.randn(count, HIDDEN) for count in counts]
        self.w1, self.w2 = (matrices(self.experts, *size) for size in ((inner, HIDDEN), (HIDDEN, inner)))
        self.w3 = matrices(self.experts, inner, HIDDEN).flip(0)

    def gradients(self, *, is_gated: bool) -> tuple[list[torch.Tensor], ...]:
        """Return those of tokens and choices' weights, by rank, and of w1, w2, w3."""
        of_experts = [each.double().requires_grad_() for each in (self.w1, self.w2, self.w3)]
        xs, weights = ([each.double().requires_grad_() for each in of] for of in (self.x, self.weights))
        w1, w2, w3 = of_experts
        total = sum(each.sum() for each in of_experts) * 0.0
        for x, ids, w, up in zip(xs, self.ids, weights, self.up, strict=True):
            for choice in range(TOPK):
                real = (ids[:, choice] >= 0) & (ids[:, choice] < self.experts)
                expert = torch.where(real, ids[:, choice], 0)
                hidden = silu(torch.einsum("tfh,th->tf", w1[expert], x))
                if is_gated:
                    hidden = hidden * torch.einsum("tfh,th->tf", w3[expert], x)
                out = torch.einsum("thf,tf->th", w2[expert], hidden)
                total = total + (up * torch.where(real, w[:, choice], 0.0)[:, None] * out).sum()
        total.backward()
        return [x.grad for x in xs], [w.grad for w in weights], [each.grad for each in of_experts]


def expert_layer(op, x, ids, weights, w1, w2):
    d = dispatch_matmul(op, x, w1, ids)
    return matmul_combine(op, silu(d.rows), w2, d, weights)


def in_steps(op, x, ids, weights, w1, w2):
    d = dispatch(op, x, ids)
    return combine(op, matmul(op, silu(matmul(op, d.rows, w1, d)), w2, d), d, weights)


def checkpointed(layer):
    return lambda *given: checkpoint(functools.partial(layer, given[0]), *given[1:], use_reentrant=False)


def compiled(layer):
    return torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)


WAYS = {
    "eager": lambda layer: layer,
    "checkpointed": checkpointed,
    "compiled": compiled,
    "compiled and checkpointed": lambda layer: checkpointed(compiled(layer)),
}
ROUTINGS = {
    "dropped": ("dropped", [TOKENS, 10]),
    "a rank without tokens": ("skewed", [0, TOKENS]),
    "duplicates and an odd width": ("duplicates", [TOKENS], 13),
}


@on_ranks(timeout_s=150)
@pytest.mark.parametrize(
    ("world", "layer"), [(2, expert_layer), (3, expert_layer), (4, expert_layer), (2, in_steps)]
)
def test_gradients_are_those_of_one_rank(rank, world, layer):
    leave_one_candidate(rank)
    cases = {}
    for name, given in ROUTINGS.items():
        cases[name] = functools.partial(_has_right_gradients, rank, world, Problem(world, *given), layer)
    return cases


@on_ranks(2, timeout_s=150)
@pytest.mark.parametrize("layer", [expert_layer, in_steps])
@pytest.mark.parametrize("way", [*WAYS][1:])
def test_a_layer_may_be_compiled_and_checkpointed(rank, compiler, way, layer):
    assert _has_right_gradients(rank, 2, Problem(2, *ROUTINGS["dropped"]), WAYS[way](layer))


def _has_right_gradients(rank, world, problem, layer) -> bool:
    of_x, of_weights, of_experts = problem.gradients(is_gated=False)
    with opened(problem.experts, TOPK) as op:
        given = [each[rank].clone().requires_grad_() for each in (problem.x, problem.weights)]
        experts = [own_part(op, each).requires_grad_() for each in (problem.w1, problem.w2)]
        for _ in range(2):
            layer(op, given[0], problem.ids[rank], given[1], *experts).backward(problem.up[rank])
        torch.testing.assert_close(given[0].grad, 2 * of_x[rank].float(), **CLOSE)
        torch.testing.assert_close(given[1].grad, 2 * of_weights[rank].float(), **CLOSE)
        for own, of_all in zip(experts, of_experts, strict=False):
            torch.testing.assert_close(own.grad, 2 * own_part(op, of_all.float()), **CLOSE)
    return True


@pytest.mark.parametrize(("inner", "way"), [(13, None), (16, launches.TORCH), (16, launches.OURS)])
def test_the_layer_takes_experts_of_any_width_in_bfloat16(inner, way, monkeypatch):
    asked = []
    monkeypatch.setattr(launches, "tunable", lambda name, ways, *, key: asked.append(key) or way)
    problem = Problem(1, "any", [TOKENS], inner)
    wanted, _, _ = problem.gradients(is_gated=True)
    with opened(2, TOPK, torch.bfloat16) as op:
        layer = ExpertParallelMoE(op, inner)
        with torch.no_grad():
            for name in ("w1", "w2", "w3"):
                getattr(layer, name).copy_(getattr(problem, name))
        x = problem.x[0].bfloat16().requires_grad_()
        layer(x, problem.ids[0], problem.weights[0]).backward(problem.up[0].bfloat16())
    assert (x.grad - wanted[0]).norm() < 0.05 * wanted[0].norm()
    assert bool(asked) == (way is not None)


@on_ranks(4, timeout_s=150)
def test_the_layer_trains_in_shards_of_fsdp2_beside_it(rank):
    """The ranks of a dimension have the same experts and, here, the same tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    problem, own = Problem(2, *ROUTINGS["dropped"]), mesh["ep"].get_local_rank()
    of_x, of_weights, of_experts = problem.gradients(is_gated=True)
    with opened(problem.experts, TOPK, group=mesh["ep"].get_group()) as op:
        layer = ExpertParallelMoE(op, INNER)
        with torch.no_grad():
            for name in ("w1", "w2", "w3"):
                getattr(layer, name).copy_(own_part(op, getattr(problem, name)))
        fully_shard(layer, mesh=mesh["dp"])
        x, weights = (each[own].clone().requires_grad_() for each in (problem.x, problem.weights))
        layer(x, problem.ids[own], weights).backward(problem.up[own])
        torch.testing.assert_close(x.grad, of_x[own].float(), **CLOSE)
        torch.testing.assert_close(weights.grad, of_weights[own].float(), **CLOSE)
        for name, of_all in zip(("w1", "w2", "w3"), of_experts, strict=True):
            found = getattr(layer, name).grad.full_tensor()
            torch.testing.assert_close(found, own_part(op, of_all.float()), **CLOSE)
