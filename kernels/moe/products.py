"""One tile of A @ B.T where the rows of A lie anywhere or by expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..products import add_product, multiply


class Weight(NamedTuple):
    """The arguments of a kernel about the matrices of all experts, [experts, N, K]."""

    ptr: Any
    experts: Any
    N: Any
    K: Any
    expert_stride: Any
    pitch: Any  # between the rows of an expert's matrix, or BY_COLUMNS its columns


@triton.jit
def describe_weight(weight, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BY_COLUMNS: tl.constexpr):
    """Return a descriptor of all experts' matrices, one below the other, in blocks of a tile."""
    if BY_COLUMNS:
        return tl.make_tensor_descriptor(
            weight.ptr, [weight.experts * weight.K, weight.N], [weight.pitch, 1], [BLOCK_K, BLOCK_N]
        )
    else:  # noqa: RET505  the compiler returns from both
        return tl.make_tensor_descriptor(
            weight.ptr, [weight.experts * weight.N, weight.K], [weight.pitch, 1], [BLOCK_N, BLOCK_K]
        )


@triton.jit
def describe_neighbours(a_ptr, rows, pitch, weight, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return a descriptor of A, with rows sorted by expert, in blocks of a tile."""
    return tl.make_tensor_descriptor(a_ptr, [rows, weight.K], [pitch, 1], [BLOCK_M, BLOCK_K])


@triton.jit
def multiply_rows(
    a_rows_ptr,  # [BLOCK_M]: where each row of A begins
    weight,
    b_desc,  # as `describe_weight` returns it, if USE_TMA
    expert,  # `experts`: a product of zeros, for which nothing is read
    col,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_TMA: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return the rows of A times columns `col` and following of the expert's B.T, in float32."""
    N, K = weight.N, weight.K
    inner = tl.where(expert < weight.experts, K, 0)
    expert = tl.minimum(expert, weight.experts - 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if USE_TMA:
        offs_k = tl.arange(0, BLOCK_K)
        a_ptrs = a_rows_ptr[:, None] + offs_k[None, :]
        for k in range(0, tl.cdiv(inner, BLOCK_K)):
            a = tl.load(a_ptrs, mask=(offs_k < K - k * BLOCK_K)[None, :], other=0.0)
            b = _load_weight(b_desc, weight, expert, col, k * BLOCK_K, BY_COLUMNS)
            acc = add_product(a, b, acc, UPCAST)
            a_ptrs += BLOCK_K
    else:
        cols = col + tl.arange(0, BLOCK_N)
        # Columns beyond the edge read the first one: in bounds, and no mask in the K loop.
        b_rows = tl.cast(tl.where(cols < N, cols, 0), tl.int64) * (1 if BY_COLUMNS else weight.pitch)
        b_rows_ptr = weight.ptr + tl.cast(expert, tl.int64) * weight.expert_stride + b_rows
        k_step = weight.pitch if BY_COLUMNS else 1
        acc = multiply(a_rows_ptr, b_rows_ptr, 1, k_step, inner, acc, BLOCK_K, UPCAST)
    return acc


@triton.jit
def multiply_neighbours(
    a_desc,  # as `describe_neighbours` returns it
    row,
    weight,
    b_desc,  # as `describe_weight` returns it
    expert,  # `experts`: a product of zeros, for which nothing is read
    col,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return rows `row` and following of A times columns `col` and following of the expert's B.T, by TMA.

    Rows after the block's last one belong to the next expert or lie beyond A: computed, and not stored.
    """
    inner = tl.where(expert < weight.experts, weight.K, 0)
    expert = tl.minimum(expert, weight.experts - 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(inner, BLOCK_K)):
        b = _load_weight(b_desc, weight, expert, col, k * BLOCK_K, BY_COLUMNS)
        acc = add_product(a_desc.load([row, k * BLOCK_K]), b, acc, UPCAST)
    return acc


@triton.jit
def _load_weight(b_desc, weight, expert, col, inner, BY_COLUMNS: tl.constexpr):
    """Return a block of the expert's B.T, by TMA."""
    if BY_COLUMNS:
        b = b_desc.load([expert * weight.K + inner, col])
    else:  # the last columns of an expert's last tile belong to the next one, and are not stored
        b = b_desc.load([expert * weight.N + col, inner]).T
    return b


@triton.jit
def table_of(BLOCK_M: tl.constexpr):
    """Return which table, of an order, is the one for blocks of BLOCK_M rows: 0 for 16, 1 for 32, ..."""
    return (BLOCK_M >= 32) + (BLOCK_M >= 64) + (BLOCK_M >= 128) + (BLOCK_M >= 256)
