"""That the state dict of a mixture of experts is that of the modules it was made from, both ways."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from operation_runs import message_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from tp_runs import FeedForward, assert_close, in_workspaces, tensor_of

from dist_autotune.kernels import tp

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning:torch")

EXPERTS, FEATURES, HIDDEN = 3, 16, 24
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


@pytest.mark.parametrize(("world", "dp"), [(1, 1), (3, 1), (4, 2)])
@in_workspaces()
def test_state_dicts_are_by_expert_and_load_and_save_both_ways(rank, world, dp, tmp_path):
    """Load plain values in each way that there is, and let a plain model load what the layer saves."""
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
        ({**whole, "3.w2.weight": whole[name]}, 'Unexpected key(s) in state_dict: "3.w2.weight".'),
    ):
        assert told in message_of(lambda given=given: layer.load_state_dict(given))
    layer.load_state_dict(PlainMoE(0).experts.state_dict())
    layer.load_state_dict({name: whole[name]}, strict=False)
    wanted = {**PlainMoE(0).experts.state_dict(), name: PlainMoE(1).experts[1].w2.weight}
    kept = [torch.equal(each.full_tensor(), wanted[key]) for key, each in layer.state_dict().items()]
    assert all(kept)
