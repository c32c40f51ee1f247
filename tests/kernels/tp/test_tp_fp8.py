"""That layers multiply rows in fp8 in forward, and have the gradients of their bf16 tensors in backward."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from operation_runs import message_of
from torch import nn
from tp_runs import FeedForward, in_workspaces, tensor_of

from dist_autotune.kernels import tp
from dist_autotune.kernels.tp import ColumnParallel, RowParallel, parallelize
from dist_autotune.kernels.tp.operators import rows_in_fp8

pytestmark = pytest.mark.usefixtures("compiler")

BF16, TOKENS, WIDTH, HIDDEN = torch.bfloat16, 6, 32, 64
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


def of_float32(plain, x, ranks):
    """Return the result of all tokens and the gradients of the layers' weights."""
    weights = [layer.weight.detach().float().requires_grad_() for layer in (plain.w1, plain.w3, plain.w2)]
    w1, w3, w2 = weights
    hidden = (F.silu(linear(x, w1).bfloat16().float()) * linear(x, w3)).bfloat16().float()
    result = linear(hidden, w2, ranks)
    return result.detach(), torch.autograd.grad(result.square().sum(), weights)


@in_workspaces(2)
def test_a_block_multiplies_in_fp8_and_its_gradients_are_those_of_its_bf16_tensors(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = FeedForward(WIDTH, HIDDEN).to(BF16)
    style = {"": ColumnParallel("w1", "w3", fp8=True), "w2": RowParallel(fp8=True)}
    model = parallelize(copy.deepcopy(plain), mesh, style)
    whole = torch.randn(2 * TOKENS, WIDTH).to(BF16)
    wanted, gradients = of_float32(plain, whole.float(), 2)
    in_bf16 = plain(whole).detach().float()
    found = []
    compiled = torch.compile(lambda x: model(x), fullgraph=True, backend="aot_eager")  # with its hooks
    for forward in (model, compiled):
        model.zero_grad()
        result = forward(whole.chunk(2)[rank])
        result.float().square().sum().backward()
        of_weights = [layer.weight.grad.full_tensor() for layer in (model.w1, model.w3, model.w2)]
        found.append([result.detach(), *of_weights])
    eager, of_graph = found
    own = wanted.chunk(2)[rank]
    errors = [error_of(*pair) for pair in zip(eager, [own, *gradients], strict=True)]
    assert max(errors) < OF_BLOCK < error_of(in_bf16.chunk(2)[rank], own)
    assert all(map(torch.equal, eager, of_graph))  # compiling changes no bit
    with torch.no_grad():
        assert torch.equal(model(whole.chunk(2)[rank]), eager[0])


@in_workspaces(2)
def test_what_cannot_be_in_fp8_raises_with_values_and_the_next_call_works(rank):
    of_type = "TypeError: fp8=True takes activations and weights in torch.bfloat16, not torch.float32"
    of_rows = "ValueError: k=24: rows of torch.float8_e4m3fn are whole 16 bytes; pad K to 32"
    x, up, halves = tensor_of(rank, 4, 16), tensor_of(0, 32, 16), tensor_of(0, 32, 24).to(BF16)
    layer, mesh = nn.Linear(16, 16), dist.init_device_mesh("cpu", (2,))
    for call, told in (
        (lambda: tp.all_gather_matmul(x, up, fp8=True), of_type),
        (lambda: tp.matmul_reduce_scatter(x, up, fp8=True), of_type),
        (lambda: tp.all_gather_matmul(halves[:4], halves, fp8=True), of_rows),
        (lambda: tp.matmul_reduce_scatter(halves[:4], halves, fp8=True), of_rows),
        (
            lambda: tp.ColumnParallelLinear(layer, mesh, gather=False, fp8=True),
            "ValueError: fp8=True, gather=False: without a gather the product is torch's, in bf16",
        ),
        (
            lambda: tp.RowParallelLinear(layer, mesh, all_reduce=True, fp8=True),
            "ValueError: fp8=True, all_reduce=True: products before an all-reduce are in bf16",
        ),
    ):
        assert message_of(call) == told
    product = tp.matmul_reduce_scatter(halves[:4, :16], halves[:, :16], fp8=True)
    assert (product.shape, product.dtype) == ((2, 32), BF16)
