"""That the state dict of a mixture of experts is that of the modules it was made from, both ways."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from operation_runs import message_of, values
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from tp_runs import FeedForward, assert_close, tensor_of, workspaces

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


def loaded_and_saved(rank, dp, directory):
    """Load plain values in each way that there is, and let a plain model load what the layer saves."""
    with workspaces(rank) as world:
        mesh = dist.init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
        plain = PlainMoE(0)
        loaded, shared, checkpointed = (layer_of(seed, mesh, dp) for seed in (1, 2, 3))
        set_model_state_dict(loaded, plain.state_dict(), options=FULL)
        shared.load_state_dict(loaded.state_dict())
        dcp.save({"model": get_model_state_dict(loaded)}, checkpoint_id=directory)
        read = {"model": get_model_state_dict(checkpointed)}
        dcp.load(read, checkpoint_id=directory)
        set_model_state_dict(checkpointed, read["model"])
        back = PlainMoE(4)
        of_back = {"model": back.state_dict()}
        dcp.load(of_back, checkpoint_id=directory)
        x = tensor_of(rank, 4, FEATURES)
        with torch.no_grad():
            assert_close(checkpointed(x), loaded(x))
        tp.release(mesh["tp"])
        alike = [torch.equal(each, plain.get_parameter(name)) for name, each in back.named_parameters()]
        return [all(alike), *(are_equal(each, plain) for each in (loaded, shared, checkpointed))]


@pytest.mark.parametrize(("world", "dp"), [(1, 1), (3, 1), (4, 2)])
def test_state_dicts_are_by_expert_and_load_and_save_both_ways(tmp_path, world, dp):
    assert values(loaded_and_saved, world, dp, tmp_path) == [[True] * 4] * world


def damaged(rank):
    """Load state dicts that lack a matrix, have one of another size, and have one alone."""
    with workspaces(rank):
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer, other = (layer_of(seed, mesh, 1).experts for seed in (0, 1))
        whole, name = other.state_dict(), "1.w2.weight"
        lacking = {key: each for key, each in whole.items() if key != name}
        texts = [
            message_of(lambda: layer.load_state_dict(lacking)),
            message_of(lambda: layer.load_state_dict({**whole, name: torch.zeros(3, FEATURES)})),
            message_of(lambda: layer.load_state_dict({**whole, "3.w2.weight": whole[name]})),
        ]
        layer.load_state_dict(PlainMoE(0).experts.state_dict())
        layer.load_state_dict({name: whole[name]}, strict=False)
        wanted = {**PlainMoE(0).experts.state_dict(), name: PlainMoE(1).experts[1].w2.weight}
        kept = [torch.equal(each.full_tensor(), wanted[key]) for key, each in layer.state_dict().items()]
        return texts, all(kept)


def test_a_state_dict_that_does_not_fit_names_the_expert_and_one_matrix_may_be_loaded_alone():
    for (missing, size, unexpected), kept in values(damaged, 2):
        assert 'Missing key(s) in state_dict: "1.w2.weight".' in missing
        assert "size mismatch for 1.w2.weight: [3, 16] is given, [16, 24] is needed." in size
        assert 'Unexpected key(s) in state_dict: "3.w2.weight".' in unexpected
        assert kept
