"""Products of tensor parallelism as registered operators: compiled, in order, by torch's checks."""

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from tp_runs import in_workspaces, tensor_of

from dist_autotune.kernels import tp

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.mark.parametrize("save_gathered", [True, False], ids=["saved", "gathered again"])
@in_workspaces(2)
def test_a_compiled_layer_is_one_graph_with_the_same_bits(rank, save_gathered):
    up, gate, down = (tensor_of(0, *shape, seed=1) for shape in ((12, 8), (12, 8), (8, 12)))
    x, bias = tensor_of(rank, 4, 8), tensor_of(0, 8, seed=7)
    for group in (None, dist.group.WORLD, dist.group.WORLD.group_name):

        def layer(x, group=group):
            of_up, of_gate = tp.all_gather_matmul(x, [up, gate], group, save_gathered=save_gathered)
            return tp.matmul_reduce_scatter(of_up * of_gate.sigmoid(), down, group, bias=bias)

        results = []
        for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            result = function(x)
            results.append([result, *torch.autograd.grad(result.square().sum(), [x, up, gate, down, bias])])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@in_workspaces(2)
def test_the_operators_pass_torchs_own_checks(rank):
    ops, name = torch.ops.dist_autotune, dist.group.WORLD.group_name
    x, up, gate = tensor_of(rank, 4, 8), tensor_of(0, 12, 8), tensor_of(0, 6, 8)
    a, b = tensor_of(rank, 8, 12), tensor_of(rank, 8, 6)
    down, gate_down = tensor_of(0, 8, 12), tensor_of(0, 8, 6)
    gradients = tensor_of(rank, 4, 8, grad=False), [a.detach()], [down.detach()], name, [True], [True]
    for operator, arguments in (
        (ops.all_gather_matmul, (x, [up, gate], name, True)),
        (ops.all_gather_matmul, (x, [up], name, False)),
        (ops.all_gather_matmul, (tensor_of(rank, 0, 8), [up], name, True)),
        (ops.matmul_reduce_scatter, ([a], [down], name)),
        (ops.matmul_reduce_scatter, ([a, b], [down, gate_down], name)),
        (ops.matmul_reduce_scatter_backward, gradients),
    ):
        assert set(torch.library.opcheck(operator.default, arguments).values()) == {"SUCCESS"}


@in_workspaces(2)
def test_a_graph_keeps_every_call_that_peers_wait_for(rank):
    ops, name = torch.ops.dist_autotune, dist.group.WORLD.group_name
    x, up, down = (tensor_of(0, *shape, grad=False) for shape in ((4, 8), (12, 8), (8, 12)))
    weight, ids = tensor_of(0, 3, 12, 8, grad=False), torch.zeros(4, 1, dtype=torch.int64)
    words, y = torch.zeros(64, dtype=torch.int32), tensor_of(0, 8, 8, grad=False)
    for operator, arguments in {
        ops.all_gather_matmul: (x, [up], name, True),
        ops.matmul_reduce_scatter: ([tensor_of(0, 8, 12, grad=False)], [down], name),
        ops.matmul_reduce_scatter_backward: (x, [y[:, :4]], [up.T[:, :4]], name, [True], [True]),
        ops.all_gather_moe: (x, weight, ids, ids.float(), name),
        ops.all_gather_routed: (x, weight, words, 1, name),
        ops.moe_reduce_scatter: (y, weight, words, None, 1, name),
    }.items():
        assert calls_kept(operator, arguments, x) == 1, operator


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # that torch itself uses
@in_workspaces(2)
def test_inductor_keeps_independent_calls_in_their_order_whose_sizes_differ_between_ranks(rank):
    """Multiply by a wide and a narrow weight, the other way round on each rank; backward scatters twice."""
    x, y = tensor_of(rank, 4, 8), tensor_of(rank, 4, 16, seed=4)
    up, gate = tensor_of(0, (12, 64)[rank], 8), tensor_of(0, (64, 12)[rank], 16, seed=2)

    def layer():
        of_gate = tp.all_gather_matmul(y, gate).sin().sum(1, keepdim=True)
        return tp.all_gather_matmul(x, up).sin().sum(1, keepdim=True) * of_gate

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="inductor")):
        result = function()
        results.append([result, *torch.autograd.grad(result.sum(), [x, y, up, gate])])
    for pair in zip(*results, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)


def calls_kept(operator, arguments, x):
    def unread(x):
        operator(*arguments)
        return x + 1

    graph = make_fx(unread, tracing_mode="fake", _allow_non_fake_inputs=True)(x).graph
    graph.eliminate_dead_code()
    return sum(node.target is operator.default for node in graph.nodes)
