"""What becomes of a product's float32 sums before they are rounded and stored.

    activation(sums * row_scale * column_scale + bias)

`Epilogue` is what a call asks for; in a kernel `apply_scales` and `apply_epilogue` do it with each piece of a
tile, in registers. Without an epilogue they compile to nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

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
NO_ACTIVATION = "none"  # as a kernel is told


class Epilogue(NamedTuple):
    """What a call does to the sums of its product, [M, N]. Made in each call: no dataclass.

    It multiplies them by the scale of their row, [M] or [M, 1], and of their column, [N] or [1, N], adds bias
    [N], then applies the activation.
    """

    bias: torch.Tensor | None = None
    activation: str | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None

    def check(self, columns: int, device: torch.device) -> None:
        """Raise TypeError or ValueError unless bias and activation are for so many columns on that device."""
        if self.activation is not None and self.activation not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"there is no activation {self.activation!r}; there are {known}, and None")
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

    def kind(self) -> EpilogueKind:
        """Return what the code and its tuning depend on."""
        bias_dtype = None if self.bias is None else self.bias.dtype
        scaled = self.scale_a is not None, self.scale_b is not None
        return EpilogueKind(bias_dtype, self.activation or NO_ACTIVATION, scaled)

    def of(self, sums: torch.Tensor) -> torch.Tensor:
        """Return what becomes of the sums, computed by torch in their type."""
        if self.scale_a is not None:
            sums = sums * self.scale_a.reshape(-1, 1).to(sums.dtype)
        if self.scale_b is not None:
            sums = sums * self.scale_b.reshape(1, -1).to(sums.dtype)
        if self.bias is not None:
            sums = sums + self.bias.to(sums.dtype)
        return sums if self.activation is None else ACTIVATIONS[self.activation](sums)


class EpilogueKind(NamedTuple):
    """What epilogues with the same code have in common."""

    bias_dtype: torch.dtype | None = None
    activation: str = NO_ACTIVATION
    scaled: tuple[bool, bool] = (False, False)  # the rows, the columns

    def key(self) -> tuple[str | bool, ...]:
        """Return what it adds to the key of a choice: nothing where the product is the sums."""
        return () if self == NO_EPILOGUE else (str(self.bias_dtype), self.activation, *self.scaled)


NO_EPILOGUE = EpilogueKind()
ONLY_SUMS = Epilogue()


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
):
    """Return what becomes of float32 sums at these rows and columns of C [M, N]."""
    if row_bias_ptr is not None:
        bias = tl.load(row_bias_ptr + rows, mask=rows < M, other=0.0)
        sums += bias.to(tl.float32)[:, None]
    if column_bias_ptr is not None:
        bias = tl.load(column_bias_ptr + columns, mask=columns < N, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    return activate(sums, ACTIVATION)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of float32 numbers; NaN stays NaN."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":  # as (1 + tanh(y)) / 2 = sigmoid(2 y)
        x = x * _sigmoid((x + 0.044715 * x * x * x) * TWO_SQRT_2_OVER_PI)
    elif ACTIVATION == "silu":
        x = x * _sigmoid(x)
    return x


@triton.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(-x)), without an exp that overflows: the interpreter would warn of it."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1 + small)
