"""That no call depends on the modes and defaults of the process: grad, inference, type, device."""

import pytest
import torch
import torch.distributed as dist
from every_operation import EVERY, OF_ONE_WAY, WITH_COLLECTIVES
from operation_runs import on_ranks
from process_defaults import odd_defaults
from torch import nn
from tp_runs import WIDTH, block, in_workspaces, tensor_of

from dist_autotune.kernels import tp

MODES = (torch.inference_mode, torch.no_grad, torch.enable_grad)
WAYS = {name: (runs, {}) for name, runs in (EVERY | OF_ONE_WAY).items()}
WAYS |= {f"{name}, by collectives": (runs, {"collective": True}) for name, runs in WITH_COLLECTIVES.items()}


@pytest.mark.parametrize(("runs", "options"), WAYS.values(), ids=WAYS)
@on_ranks(2)
def test_calls_in_any_mode_under_any_defaults_follow_opening_and_calls_in_any_other(rank, runs, options):
    errors = []
    for turn in range(len(MODES) if runs in EVERY.values() and not options else 1):
        modes = MODES[turn:] + MODES[:turn]
        with modes[0](), odd_defaults():
            runs.begin(rank)
            op = runs.open(20, 16, **options)
        for mode in modes:
            with mode():
                operands = runs.operands(op, [20, 7], 24)
                out = runs.new_out(op, [20, 7], operands)
                with odd_defaults():
                    runs.call(op, operands, out, [20, 7], told=mode is torch.no_grad)
                errors.append(runs.error_ratio(out, *operands))
        with odd_defaults():
            op.check()
            op.close()
    return errors


@in_workspaces(2)
def test_tensor_parallel_layers_train_and_infer_in_any_mode_under_any_defaults(rank):
    sizes = ((WIDTH, 16), (WIDTH, 16), (16, WIDTH))
    torch.manual_seed(0)
    router, *experts = (
        nn.Linear(WIDTH, 3),
        *([nn.Linear(*size, bias=False) for size in sizes] for _ in range(3)),
    )
    layer = tp.MoE(router, experts, dist.init_device_mesh("cpu", (2,)), topk=2)
    up, down = tensor_of(rank, 8, WIDTH, seed=1), tensor_of(rank, WIDTH, 8, seed=2)
    x, y = tensor_of(rank, 6, WIDTH), tensor_of(rank, 6, WIDTH)
    results = []
    for mode in (*MODES, torch.no_grad):
        with odd_defaults(), mode():
            found = block(x, up, down), layer(y)
            if mode is torch.enable_grad:
                for each in found:
                    each.backward(torch.ones_like(each))
        results.append([each.detach().clone() for each in found])
    for found in results:
        assert all(map(torch.equal, found, results[0]))
    assert x.grad.isfinite().all()
    assert y.grad.isfinite().all()
