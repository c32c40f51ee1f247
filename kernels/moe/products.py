"""One tile of A @ B.T where the rows of A, and of what is written, lie anywhere."""

from __future__ import annotations

import triton
import triton.language as tl

from ..exchange.products import multiply


@triton.jit
def multiply_rows(
    a_rows_ptr,  # [BLOCK_M]: where each row of A begins
    b_ptr,  # [experts, N, K], an expert's matrix stride_be apart, rows stride_bn
    b_desc,  # of B as [experts * N, K], in blocks of [BLOCK_N, BLOCK_K], if USE_TMA
    expert,
    experts,  # `expert` == `experts`: a product of zeros, for which nothing is read
    col,
    N,
    K,
    stride_be,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_TMA: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return the rows of A times columns `col` and following of the expert's B.T, in float32."""
    inner = tl.where(expert < experts, K, 0)
    expert = tl.minimum(expert, experts - 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if USE_TMA:
        offs_k = tl.arange(0, BLOCK_K)
        a_ptrs = a_rows_ptr[:, None] + offs_k[None, :]
        for k in range(0, tl.cdiv(inner, BLOCK_K)):
            a = tl.load(a_ptrs, mask=(offs_k < K - k * BLOCK_K)[None, :], other=0.0)
            # The last columns of an expert's last tile belong to the next one; they are not stored.
            b = b_desc.load([expert * N + col, k * BLOCK_K]).T
            if UPCAST:  # the interpreter cannot do arithmetic in bfloat16
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc)
            a_ptrs += BLOCK_K
    else:
        cols = col + tl.arange(0, BLOCK_N)
        # Columns beyond the edge read the first one: in bounds, and no mask in the K loop.
        b_rows = tl.cast(tl.where(cols < N, cols, 0), tl.int64) * stride_bn
        b_rows_ptr = b_ptr + tl.cast(expert, tl.int64) * stride_be + b_rows
        acc = multiply(a_rows_ptr, b_rows_ptr, 1, inner, acc, BLOCK_K, UPCAST)
    return acc


@triton.jit
def store_rows(
    acc,
    rows_ptr,  # [BLOCK_M]: where each row of C begins
    real,  # [BLOCK_M]: which rows there are
    col,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUBTILE: tl.constexpr,
):
    """Store a tile, rounded, to rows that lie anywhere; SUBTILE: one half of its columns after the other."""
    if SUBTILE:
        HALF_N: tl.constexpr = BLOCK_N // 2
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF_N)), (0, 2, 1))
        left, right = tl.split(halves)
        _store_columns(left, rows_ptr, real, col, N, HALF_N)
        _store_columns(right, rows_ptr, real, col + HALF_N, N, HALF_N)
    else:
        _store_columns(acc, rows_ptr, real, col, N, BLOCK_N)


@triton.jit
def _store_columns(block, rows_ptr, real, col, N, COLUMNS: tl.constexpr):
    cols = col + tl.arange(0, COLUMNS)
    mask = real[:, None] & (cols < N)[None, :]
    tl.store(rows_ptr[:, None] + cols[None, :], block.to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit
def table_of(BLOCK_M: tl.constexpr):
    """Return which table, of an order, is the one for blocks of BLOCK_M rows: 0 for 16, 1 for 32, ..."""
    return (BLOCK_M >= 32) + (BLOCK_M >= 64) + (BLOCK_M >= 128) + (BLOCK_M >= 256)
