"""That silu(gate) * up and its gradients are torch's, however the operands lie."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from dist_autotune.kernels.tp import gating

LIE = {
    "rows": lambda: torch.randn(7, 33),
    "moved": lambda: torch.randn(4, 6, 8).movedim(0, 1),
    "with gaps": lambda: torch.randn(5, 16)[:, :8],
    "several programs": lambda: torch.randn(3, gating.BLOCK),
    "none": lambda: torch.randn(0, 8),
}


def check(make, device, dtype):
    gate, up, grad = (make().to(device, dtype) for _ in range(3))
    leaves = [each.detach().requires_grad_() for each in (gate, up)]
    exact = [each.detach().float().requires_grad_() for each in (gate, up)]
    result, wanted = gating.silu_times(*leaves), silu(exact[0]) * exact[1]
    found = [result, *torch.autograd.grad(result, leaves, grad)]
    expected = [wanted, *torch.autograd.grad(wanted, exact, grad.float())]
    for each, right in zip(found, expected, strict=True):
        assert each.dtype is dtype
        torch.testing.assert_close(each.float(), right, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    with torch.inference_mode():
        assert torch.equal(gating.silu_times(gate, up), result)


@pytest.mark.parametrize("make", LIE.values(), ids=LIE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results_and_gradients_are_torch_s(make, dtype):
    check(make, "cpu", dtype)


def test_types_that_no_kernel_computes_in_are_torch_s():
    gate, up = torch.randn(2, 3, 8, dtype=torch.float64)
    assert torch.equal(gating.silu_times(gate, up), silu(gate) * up)


def test_a_launch_is_prepared_for_each_alignment_of_each_operand(monkeypatch):
    kinds = []
    recorder = SimpleNamespace(launch=lambda kind, *_: kinds.append(kind))
    monkeypatch.setattr(gating, "_FORWARD", recorder)
    aligned, between = torch.randn(64), torch.randn(65)[1:]
    for operands in ((aligned, aligned), (aligned, between), (between, aligned), (between, between)):
        gating.silu_times(*operands)
    assert len(set(kinds)) == 4


@pytest.mark.gpu(devices=1, seconds=20)
@pytest.mark.parametrize("make", LIE.values(), ids=LIE)
def test_results_and_gradients_are_torch_s_on_a_gpu(make):
    check(make, "cuda", torch.bfloat16)
    check(make, "cuda", torch.bfloat16)  # by prepared launches
