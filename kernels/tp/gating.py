"""silu(gate) * up in one kernel, and both gradients in another one, where torch takes two and three.

Each of torch's kernels reads and writes whole matrices of hidden features: beside products of few tokens that
is time, and an intermediate result that is saved for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from ..configs import INTERPRETED
from ..launches.prepared import PlainLaunches
from ..launches.settled import kinds_of
from .operator import Operator

BLOCK = 2048  # elements of a program
DTYPES = {torch.float16, torch.bfloat16, torch.float32}
if INTERPRETED:
    DTYPES.remove(torch.bfloat16)  # whose arithmetic is wrong there


@triton.jit
def _load(ptr, places, n):
    return tl.load(ptr + places, mask=places < n, other=0.0).to(tl.float32)


@triton.jit
def gate_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate, up = _load(gate_ptr, places, n), _load(up_ptr, places, n)
    tl.store(out_ptr + places, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=places < n)


@triton.jit
def gate_backward_kernel(grad_ptr, gate_ptr, up_ptr, of_gate_ptr, of_up_ptr, n, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad, gate, up = _load(grad_ptr, places, n), _load(gate_ptr, places, n), _load(up_ptr, places, n)
    share = tl.sigmoid(gate)
    of_gate, of_up = grad * up * share * (1 + gate * (1 - share)), grad * gate * share
    tl.store(of_gate_ptr + places, of_gate.to(of_gate_ptr.dtype.element_ty), mask=places < n)
    tl.store(of_up_ptr + places, of_up.to(of_up_ptr.dtype.element_ty), mask=places < n)


_FORWARD, _BACKWARD = (
    PlainLaunches(gate_kernel, num_warps=4),
    PlainLaunches(gate_backward_kernel, num_warps=4),
)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up; rounded once, unless torch computes it: compiled, or of differing layouts."""
    if torch.compiler.is_compiling() or not _can_take(gate, up):
        return silu(gate) * up
    result: Tensor = _gated(gate, up)
    return result


def _can_take(gate: Tensor, up: Tensor) -> bool:
    """Return whether both are of one layout without gaps, of one of DTYPES, and on a GPU or interpreted."""
    lie_alike = gate.shape == up.shape and gate.stride() == up.stride() and gate.dtype == up.dtype
    if not lie_alike or gate.dtype not in DTYPES or not (gate.is_cuda or INTERPRETED):
        return False
    return gate.is_contiguous() or torch.empty_like(gate).stride() == gate.stride()


def _launch(launches: PlainLaunches, *tensors: Tensor) -> None:
    n = tensors[0].numel()
    if n:
        kind = (tensors[0].device, n, *kinds_of(tensors))
        launches.launch(kind, (triton.cdiv(n, BLOCK), 1, 1), tensors, (n,), {"BLOCK": BLOCK})


def _silu_times(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    _launch(_FORWARD, gate, up, out)
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, needed: Sequence[bool], grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    grad = grad if grad.stride() == gate.stride() else torch.empty_like(gate).copy_(grad)
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    _launch(_BACKWARD, grad, gate, up, of_gate, of_up)
    return of_gate, of_up


_gated = Operator(_silu_times, lambda gate, up: torch.empty_like(gate), _gradients, _keep, meets_peers=False)
