"""That layers multiply rows in fp8 in forward, and have the gradients of their bf16 tensors in backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from operation_runs import message_of, values
from torch import Tensor, nn
from tp_runs import FeedForward, tensor_of, workspaces

from dist_autotune.kernels import tp
from dist_autotune.kernels.tp import ColumnParallel, RowParallel, parallelize
from dist_autotune.kernels.tp.operators import rows_in_fp8

pytestmark = pytest.mark.usefixtures("compiler")

BF16, TOKENS, WIDTH, HIDDEN = torch.bfloat16, 6, 32, 64
# Between a few roundings to the 8 bits of bf16, and one of both factors to fp8's 4.
OF_BF16 = 0.012
# A rounding to bf16 in front of one to fp8 moves one number in sixteen to fp8's next, 6 % away.
OF_BLOCK = 0.032


def rounded(matrix):
    """Return what the rows of a matrix are in fp8."""
    rows, scales = rows_in_fp8(matrix.to(BF16))
    return rows.float() * scales


def linear(x, weight, parts=1):
    """Return x @ weight.T of rows in fp8, K in so many parts, with the gradients of x and weight as given."""
    pairs = zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
    in_fp8 = sum(rounded(one.detach()) @ rounded(other.detach()).T for one, other in pairs)
    product = x @ weight.T
    return product + (in_fp8 - product).detach()


def error_of(got, wanted):
    return float((got.float() - wanted).norm() / wanted.norm())


def products(rank):
    """Return errors of products in fp8 of given rows, and how far those are from the products in bf16."""
    with workspaces(rank) as world:
        whole = torch.cat([tensor_of(each, TOKENS, WIDTH, grad=False) for each in range(world)]).to(BF16)
        weights = [tensor_of(rank, rows, WIDTH, seed=rows, grad=False).to(BF16) for rows in (HIDDEN, 24)]
        own, across = whole.chunk(world)[rank], weights[1].T.contiguous().T
        results = tp.all_gather_matmul(own, [weights[0], across], fp8=True)
        wanted = [rounded(whole) @ rounded(weight).T for weight in weights]
        plain = [whole.float() @ weight.float().T for weight in weights]
        parts = [tensor_of(each, world * TOKENS, HIDDEN, grad=False).to(BF16) for each in range(world)]
        rights = [tensor_of(each, WIDTH, HIDDEN, seed=1, grad=False).to(BF16) for each in range(world)]
        pairs = list(zip(parts, rights, strict=True))
        results = [*results, tp.matmul_reduce_scatter(*pairs[rank], fp8=True)]
        for sums, kind in ((wanted, rounded), (plain, Tensor.float)):
            whole_sum = sum(kind(left) @ kind(right).T for left, right in pairs)
            sums.append(whole_sum.chunk(world)[rank])
        return [
            [error_of(*pair) for pair in zip(results, expected, strict=True)] for expected in (wanted, plain)
        ]


def test_products_are_those_of_rows_rounded_to_fp8():
    for errors, differences in values(products, 2):
        assert max(errors) < OF_BF16
        assert min(differences) > 2 * OF_BF16


def of_float32(plain, x, ranks):
    """Return the result of all tokens and the gradients of the layers' weights."""
    weights = [layer.weight.detach().float().requires_grad_() for layer in (plain.w1, plain.w3, plain.w2)]
    w1, w3, w2 = weights
    hidden = (F.silu(linear(x, w1).bfloat16().float()) * linear(x, w3)).bfloat16().float()
    result = linear(hidden, w2, ranks)
    return result.detach(), torch.autograd.grad(result.square().sum(), weights)


def trained(rank):
    """Return the errors of a block and its gradients, that of bf16, and whether compiling changes no bit."""
    with workspaces(rank) as world:
        mesh = dist.init_device_mesh("cpu", (world,))
        torch.manual_seed(0)
        plain = FeedForward(WIDTH, HIDDEN).to(BF16)
        style = {"": ColumnParallel("w1", "w3", fp8=True), "w2": RowParallel(fp8=True)}
        model = parallelize(copy.deepcopy(plain), mesh, style)
        whole = torch.randn(world * TOKENS, WIDTH).to(BF16)
        wanted, gradients = of_float32(plain, whole.float(), world)
        in_bf16 = plain(whole).detach().float()
        found = []
        compiled = torch.compile(lambda x: model(x), fullgraph=True, backend="aot_eager")  # with its hooks
        for forward in (model, compiled):
            model.zero_grad()
            result = forward(whole.chunk(world)[rank])
            result.float().square().sum().backward()
            of_weights = [layer.weight.grad.full_tensor() for layer in (model.w1, model.w3, model.w2)]
            found.append([result.detach(), *of_weights])
        eager, of_graph = found
        own = wanted.chunk(world)[rank]
        errors = [error_of(*pair) for pair in zip(eager, [own, *gradients], strict=True)]
        differs = error_of(in_bf16.chunk(world)[rank], own)
        with torch.no_grad():
            again = model(whole.chunk(world)[rank])
        alike = all(map(torch.equal, eager, of_graph)) and torch.equal(again, eager[0])
        return errors, differs, alike


def test_a_block_multiplies_in_fp8_and_its_gradients_are_those_of_its_bf16_tensors():
    for errors, differs, alike in values(trained, 2):
        assert max(errors) < OF_BLOCK < differs
        assert alike


def mistakes(rank):
    with workspaces(rank):
        x, up, halves = tensor_of(rank, 4, 16), tensor_of(0, 32, 16), tensor_of(0, 32, 24).to(BF16)
        layer, mesh = nn.Linear(16, 16), dist.init_device_mesh("cpu", (2,))
        texts = [
            message_of(lambda: tp.all_gather_matmul(x, up, fp8=True)),
            message_of(lambda: tp.matmul_reduce_scatter(x, up, fp8=True)),
            message_of(lambda: tp.all_gather_matmul(halves[:4], halves, fp8=True)),
            message_of(lambda: tp.matmul_reduce_scatter(halves[:4], halves, fp8=True)),
            message_of(lambda: tp.ColumnParallelLinear(layer, mesh, gather=False, fp8=True)),
            message_of(lambda: tp.RowParallelLinear(layer, mesh, all_reduce=True, fp8=True)),
        ]
        product = tp.matmul_reduce_scatter(halves[:4, :16], halves[:, :16], fp8=True)
        return texts, product.shape, product.dtype


def test_what_cannot_be_in_fp8_raises_with_values_and_the_next_call_works():
    of_type = "TypeError: fp8=True takes activations and weights in torch.bfloat16, not torch.float32"
    of_rows = "ValueError: k=24: rows of torch.float8_e4m3fn are whole 16 bytes; pad K to 32"
    for texts, shape, dtype in values(mistakes, 2):
        assert texts == [
            *(of_type, of_type, of_rows, of_rows),
            "ValueError: fp8=True, gather=False: without a gather the product is torch's, in bf16",
            "ValueError: fp8=True, all_reduce=True: products before an all-reduce are in bf16",
        ]
        assert (shape, dtype) == ((2, 32), BF16)


def test_the_largest_number_of_a_row_is_fp8s_and_rows_of_zeros_stay_zeros():
    matrix = torch.tensor([[3.0, -1.5], [0.0, 0.0], [1e-20, 5e-21]]).to(BF16)
    rows, scales = rows_in_fp8(matrix)
    assert rows.float().tolist() == [[448.0, -224.0], [0.0, 0.0], [448.0, 224.0]]
    assert scales.shape == (3, 1)
    assert torch.isfinite(scales).all()
    assert rows_in_fp8(matrix.T.contiguous().T)[0].is_contiguous()
