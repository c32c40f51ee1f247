"""That projections of one tensor share a gather, while it is the same tensor and somebody reads them."""

import contextlib
import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from tp_runs import WIDTH, Attention, alike_on_all_ranks, assert_close, in_workspaces, part_of, tensor_of

from dist_autotune.kernels.tp import ColumnParallel, RowParallel, parallelize


@in_workspaces(2)
def test_projections_of_one_input_share_a_gather_and_of_others_do_not(rank):
    mesh, attention = dist.init_device_mesh("cpu", (2,)), alike_on_all_ranks(Attention)
    with torch.no_grad():
        wanted = attention(torch.cat([tensor_of(each, 1, 3, WIDTH) for each in range(2)], 1))
    plan = {"": ColumnParallel("wq", "wk", "wv", dim=1), "wo": RowParallel(dim=1)}
    parallelize(attention, mesh, plan)
    x = tensor_of(rank, 1, 3, WIDTH)
    assert_close(attention(x), part_of(wanted, mesh, 1))
    apart = [layer(x + number) for number, layer in enumerate((attention.wq, attention.wk))]
    assert [each.shape for each in apart] == [(1, 6, 8), (1, 6, 4)]
    attention(x).sum().backward()
    gathers = attention.wq._together[0]
    assert (len(gathers._products), gathers._input) == (0, None)


class Projections(nn.Module):
    """Projections of one tensor, with something done between the first and the second."""

    def __init__(self, between=lambda x: None, first_without_grad=False) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.between, self.first_without_grad = between, first_without_grad

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.first_without_grad):
            q = self.wq(x)
        self.between(x)
        return q, self.wk(x)


def parallel_projections(*options):
    mesh = dist.init_device_mesh("cpu", (2,))
    plain = alike_on_all_ranks(lambda: Projections(*options))
    return plain, parallelize(copy.deepcopy(plain), mesh, {"": ColumnParallel("wq", "wk", "wv")})


def double(x):
    x.mul_(2)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("how", ["eager", "compiled", "inference"])
@in_workspaces(2)
def test_a_tensor_changed_in_place_between_projections_is_gathered_again(rank, how):
    with torch.inference_mode(how == "inference"), torch.no_grad():
        plain, layer = parallel_projections(double)
        forward = torch.compile(layer, fullgraph=True, backend="aot_eager") if how == "compiled" else layer
        for one_after_another in ([forward], [layer.wq, double, layer.wk]):
            x = tensor_of(rank, 3, WIDTH, grad=False)
            found = [step(x) for step in one_after_another]
            q, k = found[0] if len(found) == 1 else (found[0], found[2])
            whole_x = torch.cat([tensor_of(each, 3, WIDTH, grad=False) for each in range(2)])
            for got, wanted in zip((q, k), plain(whole_x), strict=True):
                assert_close(got, wanted.chunk(2, -1)[rank])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("how", ["eager", "compiled"])
@in_workspaces(2)
def test_a_projection_behind_one_without_gradients_has_its_own(rank, how):
    _, layer = parallel_projections(lambda x: None, True)
    forward = torch.compile(layer, backend="aot_eager") if how == "compiled" else layer
    x = tensor_of(rank, 3, WIDTH)
    q, k = forward(x)
    k.sum().backward()
    assert (q.requires_grad, k.requires_grad) == (False, True)
    assert x.grad is not None
    assert layer.wk.weight.grad is not None


@pytest.mark.parametrize("how", ["in a call", "the call fails", "alone"])
@in_workspaces(2)
def test_a_product_that_nobody_reads_is_let_go_with_its_input(rank, how):
    failing = how == "the call fails"

    def fail(x):
        raise RuntimeError("in between")

    _, layer = parallel_projections(*([fail] if failing else []))
    x = tensor_of(rank, 3, WIDTH) * 2
    ended = weakref.ref(x)
    if failing:
        with contextlib.suppress(RuntimeError):
            layer(x)
    else:
        result = layer.wq(x) if how == "alone" else layer(x)
        del result
    del x
    assert ended() is None
    assert len(layer.wq._together[0]._products) == 0
