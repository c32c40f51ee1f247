"""That a mixture of experts trains as the same experts in plain torch do."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from operation_runs import message_of, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from tp_runs import FeedForward, assert_close, in_workspaces, tensor_of, tensors_of_all

from dist_autotune.kernels import tp

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


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("world", "how"), [(1, "eager"), (3, "eager"), (2, "checkpointed"), (2, "compiled")])
@in_workspaces()
def test_a_mixture_of_experts_trains_as_plain_torch(rank, world, how):
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
        torch.stack([linear.weight.grad for linear in each]) for each in zip(*experts, strict=True)
    )
    assert_close(layer.gate.weight.grad.full_tensor(), router.weight.grad)
    assert_close(layer.experts.gate_up.grad.full_tensor(), torch.stack([of_gates, of_ups], 1))
    assert_close(layer.experts.down.grad.full_tensor(), of_downs)
    with torch.no_grad(), torch.profiler.profile() as profile:
        assert layer(x.view(2, 3, FEATURES)).shape == (2, 3, FEATURES)
    assert not any(event.name.startswith("dist_autotune::") for event in profile.events())


@in_workspaces(2)
def test_dropped_choices_count_nowhere_in_the_gradients(rank):
    ops, name = torch.ops.dist_autotune, dist.group.WORLD.group_name
    shards = tensors_of_all(2, TOKENS, 8)
    weights, backs = tensors_of_all(2, 3, 16, 8, seed=1), tensors_of_all(2, 3, 8, 16, seed=2)
    factors = tensors_of_all(2, TOKENS, TOPK, seed=3)
    ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % 4 - 1  # the same on all ranks
    all_ids, x = ids.repeat(2, 1).reshape(-1), torch.cat(shards).repeat_interleave(TOPK, 0)
    kept = (all_ids >= 0).float()[:, None]
    scale = kept * torch.cat(factors).reshape(-1, 1)
    sums = 0
    for weight, back in zip(weights, backs, strict=True):
        rows = torch.einsum("rk,rnk->rn", x, weight[all_ids]).sin() * kept
        part = torch.einsum("rn,rkn->rk", rows, back[all_ids]) * scale
        sums = sums + part.view(-1, TOPK, 8).sum(1)
    own = [shards[rank], weights[rank], backs[rank], factors[rank]]
    expected = torch.autograd.grad(sums.square().sum(), own)
    given = factors[rank].where(ids >= 0, float("nan"))
    rows, routing = ops.all_gather_moe(shards[rank], weights[rank], ids, given, name)
    rows = rows.sin().where((torch.arange(len(rows)) < int(kept.sum()))[:, None], float("nan"))
    got = ops.moe_reduce_scatter(rows, backs[rank], routing, given, TOPK, name)
    assert_close(got, sums.chunk(2)[rank])
    for pair in zip(torch.autograd.grad(got.square().sum(), own), expected, strict=True):
        assert_close(*pair)


def sigmoid_route(bias):
    """Return routing by biased sigmoids, weighted without the bias; it drops some second choices."""

    def route(logits):
        scores = logits.sigmoid()
        ids = (scores + bias).topk(TOPK).indices
        weights = scores.gather(1, ids)
        kept = torch.ones_like(ids, dtype=torch.bool)
        kept[::3, 1] = False
        return 2.5 * weights / weights.sum(-1, keepdim=True), ids.where(kept, -1)

    return route


def softmax_route(logits):
    return logits.softmax(-1).topk(TOPK)


BIASED, ALL_TO_TWO = (
    sigmoid_route(torch.tensor(bias)) for bias in ([0.0, 0.3, 0.0, 0.1], [9.0, 0.0, 0.0, 9.0])
)
ROUTED = {  # options, what they mean for plain torch
    "weights that do not add up to 1": ({"normalize": False}, softmax_route),
    "sigmoids with a bias, and dropped choices": ({"route": BIASED}, BIASED),
    "two experts that take all": ({"route": ALL_TO_TWO}, ALL_TO_TWO),
}


@pytest.mark.parametrize(("options", "route"), ROUTED.values(), ids=ROUTED)
@in_workspaces(2)
def test_routers_of_other_models_and_shared_experts_train_as_plain_torch(rank, options, route):
    """Add a shared expert behind a gate of its own, as Qwen's models have it."""
    mesh = dist.init_device_mesh("cpu", (2,))
    router, experts = plain_experts(16)
    *shared, gate = *experts.pop(), nn.Linear(FEATURES, 1, bias=False)
    experts.append(tuple(nn.Linear(each.in_features, each.out_features, bias=False) for each in shared))
    layer = tp.MoE(router, experts, mesh, topk=TOPK, **options)
    of_shared = tp.SwiGLU(*shared, mesh)
    of_gate = tp.parallelize(copy.deepcopy(gate), mesh, {"": tp.SequenceParallel()})
    x = tensor_of(rank, TOKENS, FEATURES)
    result = layer(x) + of_gate(x).sigmoid() * of_shared(x)
    all_x = torch.cat(tensors_of_all(2, TOKENS, FEATURES)).detach().requires_grad_()
    routed = [route(F.linear(part, router.weight)) for part in all_x.chunk(2)]
    weights, ids = (torch.cat(each) for each in zip(*routed, strict=True))
    of_all = torch.stack([down(F.silu(gate(all_x)) * up(all_x)) for gate, up, down in experts], 1)
    chosen = of_all.gather(1, ids.clamp(min=0)[..., None].expand(-1, -1, FEATURES))
    wanted = (chosen * (weights * (ids >= 0))[..., None]).sum(1)
    wanted = wanted + gate(all_x).sigmoid() * shared[2](F.silu(shared[0](all_x)) * shared[1](all_x))
    assert_close(result, wanted.chunk(2)[rank])
    result.square().sum().backward()
    wanted.square().sum().backward()
    assert_close(x.grad, all_x.grad.chunk(2)[rank])
    downs = [each[2].weight for each in experts]
    of_downs = [torch.zeros_like(each) if each.grad is None else each.grad for each in downs]
    pairs = {
        layer.gate.weight: router.weight.grad,
        of_gate.weight: gate.weight.grad,
        of_shared.down_proj.weight: shared[2].weight.grad,
        layer.experts.down: torch.stack(of_downs),
    }
    for parameter, expected in pairs.items():
        assert_close(parameter.grad.full_tensor(), expected)


@in_workspaces(2)
def test_ranks_may_be_without_tokens_and_the_router_in_another_type(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    router, experts = plain_experts(16)
    rounded = [tuple(copy.deepcopy(layer).bfloat16() for layer in expert) for expert in experts]
    with torch.no_grad():
        layer, halves = (tp.MoE(router, each, mesh, topk=TOPK) for each in (experts, rounded))
    layer(torch.empty(0, FEATURES)).sum().backward()
    parameters = [*layer.parameters()]
    assert len(parameters) == 3
    assert not any(each.grad.full_tensor().any() for each in parameters)
    x = tensor_of(rank, TOKENS, FEATURES, grad=False).bfloat16()
    with torch.no_grad():
        wanted = plain_moe(router, [[layer.float() for layer in each] for each in rounded], x.float())
        error = float((halves(x) - wanted).norm() / wanted.norm())
    assert error < 4 * torch.finfo(torch.bfloat16).eps  # of gates, ups, what they make, and its products


@on_ranks(2)
def test_experts_that_do_not_fit_raise_with_values(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    router, experts = plain_experts(16)
    (gate, up, down), *others = experts

    def moe(*experts, topk=2, **options):
        return tp.MoE(router, experts, mesh, topk=topk, **options)

    wrong = moe(*experts, route=lambda logits: logits.topk(3))
    of_router, as_first = "a router of 4 experts", "in torch.float32, as expert 0 has it, is needed"
    for call, told in (
        (lambda: moe(*others), f"{of_router}, 3 experts and topk=2: as many of each, and topk of 1 to 3"),
        (
            lambda: moe(*experts, topk=5),
            f"{of_router}, 4 experts and topk=5: as many of each, and topk of 1 to 4",
        ),
        (
            lambda: tp.MoE(*plain_experts(12), mesh, topk=2),
            "6 hidden features of a rank; a multiple of 4 is needed, for the weights' gradients",
        ),
        (
            lambda: moe(*others, (gate, up, nn.Linear(16, FEATURES))),
            "expert 3 has a bias, which would be lost; layers without are needed",
        ),
        (
            lambda: moe(*others, (gate, nn.Linear(FEATURES, 24, bias=False), down)),
            f"up of expert 3 is [24, 16] in torch.float32; [16, 16] {as_first}",
        ),
        (
            lambda: moe(*others, (gate, up, copy.deepcopy(down).half())),
            f"down of expert 3 is [16, 16] in torch.float16; [16, 16] {as_first}",
        ),
        (
            lambda: wrong(torch.zeros(TOKENS, FEATURES)),
            "route returned weights [6, 3] and ids [6, 3]; both must be [tokens, topk] = [6, 2]",
        ),
    ):
        assert message_of(call) == f"ValueError: {told}"


# ---- state dicts, those of the modules that a layer was made from


HIDDEN = 24
MIXTRAL = ("gate", "w1", "w3", "w2")
FULL = StateDictOptions(full_state_dict=True)


class PlainMoE(nn.Module):
    """The parameters of a Mixtral's block of experts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gate = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.experts = nn.ModuleList(FeedForward(FEATURES, HIDDEN) for _ in range(EXPERTS))


def parallel(plain, mesh):
    experts = [(expert.w1, expert.w3, expert.w2) for expert in plain.experts]
    return tp.MoE(plain.gate, experts, mesh, topk=2, names=MIXTRAL)


def layer_of(seed, mesh, dp):
    layer = parallel(PlainMoE(seed), mesh["tp"])
    return fully_shard(layer, mesh=mesh["dp"]) if dp > 1 else layer


def are_equal(layer, plain):
    mine, wanted = get_model_state_dict(layer, options=FULL), plain.state_dict()
    assert mine.keys() == wanted.keys()
    return all(torch.equal(mine[name], each) for name, each in wanted.items())


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning:torch")
@pytest.mark.parametrize(("world", "dp"), [(1, 1), (3, 1), (4, 2)])
@in_workspaces()
def test_state_dicts_are_by_expert_and_load_and_save_both_ways(rank, world, dp, tmp_path):
    mesh = dist.init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
    plain = PlainMoE(0)
    loaded, shared, checkpointed = (layer_of(seed, mesh, dp) for seed in (1, 2, 3))
    set_model_state_dict(loaded, plain.state_dict(), options=FULL)
    shared.load_state_dict(loaded.state_dict())
    dcp.save({"model": get_model_state_dict(loaded)}, checkpoint_id=tmp_path)
    read = {"model": get_model_state_dict(checkpointed)}
    dcp.load(read, checkpoint_id=tmp_path)
    set_model_state_dict(checkpointed, read["model"])
    back = PlainMoE(4)
    of_back = {"model": back.state_dict()}
    dcp.load(of_back, checkpoint_id=tmp_path)
    x = tensor_of(rank, 4, FEATURES)
    with torch.no_grad():
        assert_close(checkpointed(x), loaded(x))
    tp.release(mesh["tp"])
    assert all(torch.equal(each, plain.get_parameter(name)) for name, each in back.named_parameters())
    assert all(are_equal(each, plain) for each in (loaded, shared, checkpointed))


@in_workspaces(2)
def test_a_state_dict_that_does_not_fit_names_the_expert_and_one_matrix_may_be_loaded_alone(rank):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layer, other = (layer_of(seed, mesh, 1).experts for seed in (0, 1))
    whole, name = other.state_dict(), "1.w2.weight"
    lacking = {key: each for key, each in whole.items() if key != name}
    for given, told in (
        (lacking, f'Missing key(s) in state_dict: "{name}".'),
        (
            {**whole, name: torch.zeros(3, FEATURES)},
            f"size mismatch for {name}: [3, 16] is given, [16, 24] is needed.",
        ),
        ({**whole, "4.w2.weight": whole[name]}, 'Unexpected key(s) in state_dict: "4.w2.weight".'),
    ):
        assert told in message_of(lambda given=given: layer.load_state_dict(given))
    layer.load_state_dict(PlainMoE(0).experts.state_dict())
    layer.load_state_dict({name: whole[name]}, strict=False)
    wanted = {**PlainMoE(0).experts.state_dict(), name: PlainMoE(1).experts[1].w2.weight}
    kept = [torch.equal(each.full_tensor(), wanted[key]) for key, each in layer.state_dict().items()]
    assert all(kept)
