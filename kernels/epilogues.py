"""Epilogues: applied to a product's float32 sums before they are rounded and stored.

    activation(sums * row_scale * column_scale + bias)

`Epilogue` holds the arguments of a call; in a kernel `apply_scales` and `apply_epilogue` apply it to each
piece of a tile, in registers. Without an epilogue they compile to nothing.

A gated activation makes one column of two, activation(gate) * up. Gate and up take turns by eight columns:

    sums      gate 0 .. 7   up 0 .. 7   gate 8 .. 15   up 8 .. 15   ...
    result          0 .. 7                    8 .. 15               ...

On Hopper a thread has two columns of every eight, and rows that are eight apart. So it has the up of each of
its gates, also where a tile's rows are the product's columns, and its results lie in registers as its sums
do. With single columns in turn a thread would have no two results side by side, and would store each alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .tensors import layout_of

BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SQRT_HALF = tl.constexpr(0.7071067811865476)
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)

# As torch computes them; `activate` is the same in a kernel.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
OF_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "geglu_tanh": ACTIVATIONS["gelu_tanh"],
    "swiglu": ACTIVATIONS["silu"],
}
GATED = tuple(OF_GATES)
GATE_BLOCK = 8  # columns of gate, then of up
NO_ACTIVATION = "none"  # as a kernel is told


@triton.constexpr_function
def sums_of_a_result(activation):  # of a kernel's constexpr, or a call's text
    """Return how many columns of sums become one of the result: 2 under a gated activation."""
    return 2 if activation in GATED else 1


def result_columns(activation: str | None, columns: int) -> int:
    """Return how many columns of the result so many columns of sums become."""
    return columns // 2 if activation in GATED else columns


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the weight [2 * F, K] of a gated product, made of gate and up [F, K]; the same of biases [F].

    Its rows are 8 of gate, 8 of up, and so on; F is a multiple of 8. A rank's part of gate and up makes its
    part of these rows. Raises ValueError for other shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(
            f"gate has shape {tuple(gate.shape)}, up has shape {tuple(up.shape)}; they must be equal"
        )
    if gate.dim() == 0 or gate.shape[0] % GATE_BLOCK:
        raise ValueError(
            f"gate and up have shape {tuple(gate.shape)}; the first size must be a multiple of {GATE_BLOCK}, "
            "pad both with zeros"
        )
    return torch.stack([_in_blocks(gate), _in_blocks(up)], 1).flatten(0, 2)


def split_gate_up(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of gate and up: the inverse of `interleave_gate_up`, of a weight, bias or gradient.

    Raises ValueError unless the first size is a multiple of 16.
    """
    if weight.dim() == 0 or weight.shape[0] % (2 * GATE_BLOCK):
        raise ValueError(
            f"the weight has shape {tuple(weight.shape)}; the first size must be a multiple of "
            f"{2 * GATE_BLOCK}: {GATE_BLOCK} rows of gate, {GATE_BLOCK} of up, and so on"
        )
    gate, up = _in_blocks(weight).unflatten(0, (weight.shape[0] // (2 * GATE_BLOCK), 2)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)


def _in_blocks(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(0, (tensor.shape[0] // GATE_BLOCK, GATE_BLOCK))


class Epilogue(NamedTuple):
    """The epilogue of one call, for sums [M, N]. A NamedTuple, as making a frozen dataclass takes longer.

    It multiplies them by the scale of their row, [M] or [M, 1], and of their column, [N] or [1, N], adds bias
    [N], then applies the activation. A gated one leaves [M, N / 2].
    """

    bias: torch.Tensor | None = None
    activation: str | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None

    def check(self, columns: int, device: torch.device) -> None:
        """Raise TypeError or ValueError unless bias and activation are for so many columns on that device."""
        if self.activation is not None and self.activation not in (*ACTIVATIONS, *GATED):
            known = ", ".join(map(repr, (*ACTIVATIONS, *GATED)))
            raise ValueError(f"there is no activation {self.activation!r}; there are {known}, and None")
        if self.activation in GATED and columns % (2 * GATE_BLOCK):
            raise ValueError(
                f"activation {self.activation!r} takes {GATE_BLOCK} columns of gate, {GATE_BLOCK} of up, and "
                f"so on: a multiple of {2 * GATE_BLOCK}, not {columns}; make the weight by interleave_gate_up"
            )
        bias = self.bias
        if bias is None:
            return
        if not isinstance(bias, torch.Tensor):
            raise TypeError(f"bias is a {type(bias).__name__}; it must be a tensor or None")
        if bias.dtype not in BIAS_DTYPES:
            raise TypeError(f"bias is {bias.dtype}; it must be one of {', '.join(map(str, BIAS_DTYPES))}")
        if tuple(bias.shape) != (columns,):
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}; it must be ({columns},), an element for each column "
                "of the product"
            )
        if bias.device != device:
            raise ValueError(f"bias is on {bias.device}, the product is on {device}; move one of them")
        if columns > 1 and bias.stride(0) != 1:
            raise ValueError(f"bias has stride {bias.stride(0)}, not 1; call .contiguous()")

    def layout(self) -> Hashable:
        """Return the layouts of its tensors, and its activation."""
        if self is ONLY_SUMS:
            return NO_LAYOUT
        return layout_of(self.bias), self.activation, layout_of(self.scale_a), layout_of(self.scale_b)

    def key(self) -> tuple[str | bool, ...]:
        """Return the epilogue's part of a tuning key; () if it changes nothing."""
        if not any(each is not None for each in self):
            return ()
        bias_dtype = None if self.bias is None else self.bias.dtype
        scaled = self.scale_a is not None, self.scale_b is not None
        return (str(bias_dtype), self.activation or NO_ACTIVATION, *scaled)

    def of(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the result of the sums, computed by torch in their type."""
        if self.scale_a is not None:
            sums = sums * self.scale_a.reshape(-1, 1).to(sums.dtype)
        if self.scale_b is not None:
            sums = sums * self.scale_b.reshape(1, -1).to(sums.dtype)
        if self.bias is not None:
            sums = sums + self.bias.to(sums.dtype)
        if self.activation is None:
            return sums
        if self.activation in ACTIVATIONS:
            return ACTIVATIONS[self.activation](sums)
        pairs = sums.unflatten(-1, (sums.shape[-1] // (2 * GATE_BLOCK), 2, GATE_BLOCK))
        gate, up = pairs.unbind(-2)
        return (OF_GATES[self.activation](gate) * up).flatten(-2)


ONLY_SUMS = Epilogue()
NO_LAYOUT = (None,) * 4


# ---- in a kernel, of plain Triton or Gluon


@triton.jit
def apply_scales(sums, rows, columns, row_scale_ptr, column_scale_ptr, M, N, origin=0, pitch=1):
    """Return sums at these rows and columns of C [M, N], see `apply_epilogue`, times their scales.

    A row's scale is the (origin + row)-th, and scales of rows are `pitch` apart.
    """
    if row_scale_ptr is not None:
        at = tl.cast(rows + origin, tl.int64) * pitch
        sums *= tl.load(row_scale_ptr + at, mask=rows < M, other=0.0)[:, None]
    if column_scale_ptr is not None:
        sums *= tl.load(column_scale_ptr + columns, mask=columns < N, other=0.0)[None, :]
    return sums


@triton.jit
def apply_epilogue(
    sums,
    rows,  # of C, a vector; it may reach beyond C, and so may `columns`
    columns,
    row_bias_ptr,  # [M], for a product that is computed transposed; or None
    column_bias_ptr,  # [N], or None
    M,
    N,
    ACTIVATION: tl.constexpr,
    GATES_ROWS: tl.constexpr = False,  # gate and up are rows of the sums, not columns
):
    """Return the result of float32 sums at these rows and columns of the product [M, N].

    Under a gated activation it has half as many columns, or rows.
    """
    if row_bias_ptr is not None:
        bias = tl.load(row_bias_ptr + rows, mask=rows < M, other=0.0)
        sums += bias.to(tl.float32)[:, None]
    if column_bias_ptr is not None:
        bias = tl.load(column_bias_ptr + columns, mask=columns < N, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    if sums_of_a_result(ACTIVATION) == 2:
        result = _gated(sums, ACTIVATION, GATES_ROWS)
    else:
        result = activate(sums, ACTIVATION)
    return result


@triton.jit
def _gated(sums, ACTIVATION: tl.constexpr, GATES_ROWS: tl.constexpr):
    """Return activation(gate) * up. On Hopper a thread has both: no data moves."""
    ROWS: tl.constexpr = sums.shape[0]
    COLUMNS: tl.constexpr = sums.shape[1]
    if GATES_ROWS:
        gate, up = sums.reshape((ROWS // 16, 2, 8, COLUMNS)).permute((0, 2, 3, 1)).split()
        result = (activate(gate, ACTIVATION) * up).reshape((ROWS // 2, COLUMNS))
    else:
        gate, up = sums.reshape((ROWS, COLUMNS // 16, 2, 8)).permute((0, 1, 3, 2)).split()
        result = (activate(gate, ACTIVATION) * up).reshape((ROWS, COLUMNS // 2))
    return result


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of float32 numbers, or of gates; NaN stays NaN."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh" or ACTIVATION == "geglu_tanh":  # as (1 + tanh(y)) / 2 = sigmoid(2 y)
        x = x * _sigmoid((x + 0.044715 * x * x * x) * TWO_SQRT_2_OVER_PI)
    elif ACTIVATION == "silu" or ACTIVATION == "swiglu":
        x = x * _sigmoid(x)
    return x


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)), without an exp that overflows: the interpreter would warn of it."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1 + small)
