"""That products of tensor parallelism and their gradients are those of torch, in every order of use."""

import copy

import pytest
import torch
from operation_runs import message_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from tp_runs import assert_close, block, in_workspaces, tensor_of, tensors_of_all

from dist_autotune.kernels import tp
from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.tp.registry import WORKSPACES

# ---- against plain torch


@pytest.mark.parametrize(
    ("world", "columns", "save_gathered"),
    [(1, True, False), (2, False, False), (3, True, True), (3, False, False)],
)
@in_workspaces()
def test_products_behind_one_gather_and_their_gradients_are_those_of_torch(
    rank, world, columns, save_gathered
):
    for seed, rows in enumerate((12, 5, 0, 20)):
        shards, sizes = tensors_of_all(world, rows, 16, seed=seed), (24, 9)
        weights = [tensors_of_all(world, n, 16, seed=10 * n + seed) for n in sizes]
        biases = tensors_of_all(world, 24, seed=77)
        grads = [tensors_of_all(world, world * rows, n, seed=99 + n) for n in sizes]
        full, wanted = torch.cat(shards), torch.zeros(())
        for each in range(world):
            first = full @ weights[0][each].T + biases[each]
            wanted = wanted + (first * grads[0][each]).sum()
            wanted = wanted + (full @ weights[1][each].T * grads[1][each]).sum()
        own = [shards[rank], weights[0][rank], weights[1][rank], biases[rank]]
        expected = torch.autograd.grad(wanted, own)
        given = [each[rank].T.contiguous().T if columns else each[rank] for each in weights]
        bias = [biases[rank], None]
        results = tp.all_gather_matmul(shards[rank], given, bias=bias, save_gathered=save_gathered)
        assert_close(results[0], full @ weights[0][rank].T + biases[rank])
        assert_close(results[1], full @ weights[1][rank].T)
        got = torch.autograd.grad(results, own, [each[rank] for each in grads])
        for pair in zip(got, expected, strict=True):
            assert_close(*pair)


@pytest.mark.parametrize(("world", "columns"), [(1, True), (2, True), (3, False)])
@in_workspaces()
def test_scattered_sums_and_their_gradients_are_those_of_torch(rank, world, columns):
    for seed, rows in enumerate((8, 3, 0, 12)):
        inputs = tensors_of_all(world, world * rows, 12, seed=seed)
        weights, bias = tensors_of_all(world, 16, 12, seed=10 + seed), tensor_of(0, 16, seed=5)
        grads = tensors_of_all(world, rows, 16, seed=20)
        sums = sum(a @ weight.T for a, weight in zip(inputs, weights, strict=True)) + bias
        own = [inputs[rank], weights[rank], bias]
        expected = torch.autograd.grad(sums, own, torch.cat(grads))
        weight = weights[rank].T.contiguous().T if columns else weights[rank]
        got = tp.matmul_reduce_scatter(inputs[rank], weight, bias=bias)
        assert_close(got, sums.detach()[rank * rows : (rank + 1) * rows])
        for pair in zip(torch.autograd.grad(got, own, grads[rank]), expected, strict=True):
            assert_close(*pair)


# ---- orders of use


SHAPES = ((4, 8), (12, 8), (8, 12))  # of a shard and of two weights


def plain_gradients(world, rank):
    """Return the gradients of the sum of all ranks' results of `block`, in plain torch."""
    shards, ups, downs = (tensors_of_all(world, *shape) for shape in SHAPES)
    full = torch.cat(shards)
    loss = sum(((full @ up.T).relu() @ down.T).sum() for up, down in zip(ups, downs, strict=True))
    return torch.autograd.grad(loss, [shards[rank], ups[rank], downs[rank]])


@in_workspaces(2)
def test_accumulation_checkpoints_and_repeated_backwards_give_the_gradients_of_torch(rank):
    own = x, up, down = [tensor_of(rank, *shape) for shape in SHAPES]
    once = plain_gradients(2, rank)

    def compare(name, result, times=1):
        result.sum().backward()
        for tensor, wanted in zip(own, once, strict=True):
            torch.testing.assert_close(
                tensor.grad, times * wanted, rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
            )
            tensor.grad = None

    compare("once", block(x, up, down))
    compare("two passes before any backward", block(x, up, down) + block(x, up, down), 2)
    for _ in range(2):
        block(x, up, down).sum().backward()
    compare("accumulation over three passes", block(x, up, down), 3)
    kept = block(x, up, down)
    kept.sum().backward(retain_graph=True)
    block(x.detach() + 1, up.detach(), down.detach())  # what it writes must not be what was saved
    compare("backward twice of one graph, calls between", kept, 2)
    for reentrant in (True, False):
        again = checkpoint(block, x, up, down, use_reentrant=reentrant)
        compare(f"checkpointing, reentrant={reentrant}", again)
    compare("gradients of two passes at once", torch.cat([block(x, up, down), block(x, up, down)]), 2)
    with torch.no_grad():
        assert not block(x, up, down).requires_grad
    with torch.inference_mode():
        block(x, up, down)
    compare("after calls without gradients", block(x, up, down))


@in_workspaces(2)
def test_frozen_weights_keep_no_gathered_rows_and_get_no_gradient(rank):
    shard, weight = 4 * 8, 12 * 8
    for of_x, elements in ((True, [shard, weight]), (False, [2 * shard, weight])):
        x, up, down = tensors = [tensor_of(rank, *shape, grad=False) for shape in SHAPES]
        for tensor, asks in zip(tensors, (of_x, not of_x, not of_x), strict=True):
            tensor.requires_grad_(asks)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, to=kept: to.append(t.numel()) or t, lambda t: t
        ):
            hidden = tp.all_gather_matmul(x, up)
        tp.matmul_reduce_scatter(hidden.relu(), down).sum().backward()
        assert [each.grad is not None for each in tensors] == [of_x, not of_x, not of_x]
        assert kept == elements


@in_workspaces(2)
def test_one_weight_may_serve_both_products_and_its_transpose_is_not_copied(rank):
    shards, weights = tensors_of_all(2, 4, 8), tensors_of_all(2, 12, 8, seed=3)
    own = [shards[rank], weights[rank]]
    result = tp.matmul_reduce_scatter(tp.all_gather_matmul(*own), weights[rank].T)
    wanted = sum(torch.cat(shards) @ weight.T @ weight for weight in weights)
    pairs = (torch.autograd.grad(each.sin().sum(), own) for each in (result, wanted))
    for pair in zip(*pairs, strict=True):
        assert_close(*pair)


# ---- what goes wrong


@in_workspaces(2)
def test_mistakes_raise_with_values_and_the_next_call_works(rank):
    x, up = tensor_of(rank, 4, 8), tensor_of(0, 12, 8, seed=1)
    hidden = tp.all_gather_matmul(x, up, save_gathered=False)
    mistakes = {
        "ValueError: gather_dim=1 of a tensor [4, 8]; it is 0 to 0, a dimension before the last": (
            lambda: tp.all_gather_matmul(x, up, gather_dim=1)
        ),
        "ValueError: 2 weights and 1 biases; as many of each, at least one": (
            lambda: tp.all_gather_matmul(x, [up, up], bias=[None])
        ),
        "ValueError: 0 weights and 0 biases; as many of each, at least one": (
            lambda: tp.all_gather_matmul(x, [])
        ),
        "ValueError: a_shard [4, 8] and weight [12, 6] must both have K=8 columns; the weight is [N, K], "
        "not [K, N]": lambda: tp.all_gather_matmul(x, up[:, :6]),
        "ValueError: dimension 1 of a has 3 entries; pad it to 4 for 2 ranks": (
            lambda: tp.matmul_reduce_scatter(torch.ones(2, 3, 8), up, scatter_dim=1)
        ),
        "RuntimeError: these products have no second derivative: call backward without create_graph=True": (
            lambda: torch.autograd.grad(hidden.sum(), x, create_graph=True)
        ),
    }
    assert [message_of(call) for call in mistakes.values()] == [*mistakes]
    leaf = x.detach().requires_grad_()
    result = tp.all_gather_matmul(leaf, up, save_gathered=False)
    with torch.no_grad():
        leaf += 1
    assert message_of(lambda: result.sum().backward()).startswith(
        "RuntimeError: one of the variables needed for gradient computation has been modified by an "
        "inplace operation: ["
    )
    assert block(x, up, up.T).shape == (4, 8)


@in_workspaces(2)
def test_after_a_failed_call_release_raises_it_and_the_next_call_works(rank):
    up, told = tensor_of(0, 12, 8), f"ValueError: AllGatherGemm, rank {rank}: rank {1 - rank} pushed"
    tp.reserve(16, 8, torch.float32, timeout_s=20.0)
    texts = [message_of(lambda: tp.all_gather_matmul(tensor_of(rank, 4 + rank, 8), up)) for _ in range(2)]
    for text in (*texts, message_of(tp.release)):
        assert text.startswith(f"{told} {5 - rank} rows")
    assert tp.all_gather_matmul(tensor_of(rank, 5, 8), up).shape == (10, 12)


# ---- layers for serving, whose tokens are on all ranks

WIDTH = 16
PLAN = {"0": tp.ColumnParallel(gather=False), "2": tp.RowParallel(all_reduce=True)}


def model_of_all() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(), nn.Linear(3 * WIDTH, WIDTH))


@in_workspaces(3)
def test_layers_for_serving_compute_what_the_whole_model_does(rank):
    whole, mesh = model_of_all(), init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))["tp"]
    parallel = tp.parallelize(copy.deepcopy(whole), mesh, PLAN)
    tp.reserve(6, WIDTH, torch.float32, mesh, all_reduce=True)
    assert [key.kind for key in WORKSPACES.open] == [GemmAllReduce]
    with torch.no_grad():
        for shape in ((6, WIDTH), (2, 3, WIDTH), (2, 0, WIDTH), (1, WIDTH), (WIDTH,)):
            x = tensor_of(0, *shape, grad=False)
            assert_close(parallel(x), whole(x))


@in_workspaces(2)
def test_layers_for_serving_refuse_gradients_and_go_on(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"]
    parallel, x = tp.parallelize(model_of_all(), mesh, PLAN), tensor_of(0, 4, WIDTH, grad=False)
    told = "RuntimeError: ColumnParallelLinear(gather=False) has no backward"
    assert message_of(lambda: parallel(x)).startswith(told)
    told = "RuntimeError: matmul_all_reduce has no backward, but grad is enabled"
    assert message_of(lambda: parallel[2](x.repeat(1, 3)[:, :24])).startswith(told)
    with torch.no_grad():
        assert_close(parallel(x), model_of_all()(x))


@pytest.mark.usefixtures("compiler")
@in_workspaces(2)
@torch.no_grad()
def test_a_compiled_call_sees_one_operator(rank):
    factors = [(tensor_of(r, 5, 8, grad=False), tensor_of(r, WIDTH, 8, seed=1, grad=False)) for r in range(2)]
    (a, weight), bias = factors[rank], tensor_of(0, WIDTH, seed=2, grad=False)
    compiled = torch.compile(
        lambda a: tp.matmul_all_reduce(a, weight, bias=bias), backend="eager", fullgraph=True
    )
    assert_close(compiled(a), sum(left @ right.T for left, right in factors) + bias)
