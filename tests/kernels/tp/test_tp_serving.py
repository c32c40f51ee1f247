"""That layers for serving, whose tokens are on all ranks, compute what ordinary ones do and do not train."""

from __future__ import annotations

import copy

import pytest
import torch
from operation_runs import message_of, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from tp_runs import assert_close, tensor_of, workspaces

from dist_autotune.kernels import tp
from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.tp.registry import WORKSPACES

WIDTH = 16
PLAN = {
    "0": tp.ColumnParallel(gather=False),
    "2": tp.RowParallel(all_reduce=True),
}


def model_of_all() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(), nn.Linear(3 * WIDTH, WIDTH))


def serves(rank):
    """Return whether each of some batches, with and without a compiler, gives what the whole model does."""
    with workspaces(rank) as world:
        whole = model_of_all()
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))["tp"]
        parallel = tp.parallelize(copy.deepcopy(whole), mesh, PLAN)
        tp.reserve(6, WIDTH, torch.float32, mesh, all_reduce=True)
        opened = [key.kind for key in WORKSPACES.open]
        with torch.no_grad():
            for shape in ((6, WIDTH), (2, 3, WIDTH), (2, 0, WIDTH), (1, WIDTH), (WIDTH,)):
                x = tensor_of(0, *shape, grad=False)
                assert_close(parallel(x), whole(x))
        return opened == [GemmAllReduce]


@pytest.mark.parametrize("world", [3])
def test_layers_for_serving_compute_what_the_whole_model_does(world):
    assert values(serves, world) == [True] * world


def trains(rank):
    with workspaces(rank) as world:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))["tp"]
        parallel = tp.parallelize(model_of_all(), mesh, PLAN)
        x = tensor_of(0, 4, WIDTH, grad=False)
        texts = [
            message_of(lambda: parallel(x)),
            message_of(lambda: parallel[2](x.repeat(1, 3)[:, : 48 // world])),
        ]
        with torch.no_grad():
            assert_close(parallel(x), model_of_all()(x))
        return texts


def test_layers_for_serving_refuse_gradients_and_go_on():
    for first, second in values(trains, 2):
        assert first.startswith("RuntimeError: ColumnParallelLinear(gather=False) has no backward")
        assert second.startswith("RuntimeError: matmul_all_reduce has no backward, but grad is enabled")


def traced(rank):
    """Trace a call: its operator gives the shape, and the graph the sum."""
    with workspaces(rank) as world, torch.no_grad():
        a, weight = tensor_of(rank, 5, 8, grad=False), tensor_of(rank, WIDTH, 8, seed=1, grad=False)
        bias = tensor_of(0, WIDTH, seed=2, grad=False)
        compiled = torch.compile(
            lambda a: tp.matmul_all_reduce(a, weight, bias=bias), backend="eager", fullgraph=True
        )
        parts = [
            tensor_of(r, 5, 8, grad=False) @ tensor_of(r, WIDTH, 8, seed=1, grad=False).T
            for r in range(world)
        ]
        assert_close(compiled(a), torch.stack(parts).sum(0) + bias)
        return True


@pytest.mark.usefixtures("compiler")
def test_a_compiled_call_sees_one_operator():
    assert values(traced, 2) == [True, True]
