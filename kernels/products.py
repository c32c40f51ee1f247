"""One tile of A @ B.T in float32, for kernels that loop over tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Factors(NamedTuple):
    """A and B [N, K] of a product A @ B.T, as a kernel has them; `factors_of` describes them for TMA."""

    a_ptr: Any
    a_pitch: Any  # between the rows of A
    b_ptr: Any
    b_pitch: Any  # between the rows of B, or BY_COLUMNS its columns
    N: Any
    K: Any
    a_desc: Any  # of A, in blocks of [BLOCK_M, BLOCK_K], if USE_TMA
    b_desc: Any  # of B, in blocks of [BLOCK_N, BLOCK_K], or BY_COLUMNS of B.T, [BLOCK_K, BLOCK_N]


@triton.jit
def factors_of(
    a_ptr,
    a_pitch,
    a_rows,  # of which the first ones are described
    b_ptr,
    b_pitch,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_TMA: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
):
    """Return `Factors`."""
    a_desc = a_ptr
    b_desc = b_ptr
    if USE_TMA:
        a_desc = tl.make_tensor_descriptor(a_ptr, [a_rows, K], [a_pitch, 1], [BLOCK_M, BLOCK_K])
        if BY_COLUMNS:
            b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [b_pitch, 1], [BLOCK_K, BLOCK_N])
        else:
            b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [b_pitch, 1], [BLOCK_N, BLOCK_K])
    return Factors(a_ptr, a_pitch, b_ptr, b_pitch, N, K, a_desc, b_desc)


@triton.jit
def multiply_tile(
    factors,
    origin,  # of the chunk's rows in A
    row,  # of the tile in the chunk
    rows,  # of the chunk
    col,
    acc,  # float32 [BLOCK_M, BLOCK_N], to which the product is added
    BLOCK_K: tl.constexpr,
    USE_TMA: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return acc + A @ B.T of the tile; its elements beyond the chunk's or B's rows mean nothing."""
    if USE_TMA:  # which reads zeros beyond the edges, but of a chunk's last tile rows of the next one
        for k in range(0, tl.cdiv(factors.K, BLOCK_K)):
            inner = k * BLOCK_K
            b = factors.b_desc.load([inner, col]) if BY_COLUMNS else factors.b_desc.load([col, inner]).T
            acc = add_product(factors.a_desc.load([origin + row, inner]), b, acc, UPCAST)
    else:
        # Rows and columns beyond the edge read the first one: in bounds, and no mask in the K loop.
        offs_m = row + tl.arange(0, acc.shape[0])
        offs_n = col + tl.arange(0, acc.shape[1])
        a_rows = tl.cast(origin + tl.where(offs_m < rows, offs_m, 0), tl.int64)
        b_rows = tl.cast(tl.where(offs_n < factors.N, offs_n, 0), tl.int64)
        acc = multiply(
            factors.a_ptr + a_rows * factors.a_pitch,
            factors.b_ptr + b_rows * (1 if BY_COLUMNS else factors.b_pitch),
            1,
            factors.b_pitch if BY_COLUMNS else 1,
            factors.K,
            acc,
            BLOCK_K,
            UPCAST,
        )
    return acc


@triton.jit
def halves(tile):
    """Return the left and the right half of a tile's columns."""
    HALF_N: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, HALF_N)), (0, 2, 1)))


@triton.jit
def store_rows(
    tile,
    rows_ptr,  # [BLOCK_M]: where each row of C begins
    real,  # [BLOCK_M]: whether the row exists
    col,
    N,
    SUBTILE: tl.constexpr,
):
    """Store a tile, rounded, to rows that lie anywhere; SUBTILE: one half of its columns after the other."""
    if SUBTILE:
        left, right = halves(tile)
        store_rows(left, rows_ptr, real, col, N, False)
        store_rows(right, rows_ptr, real, col + left.shape[1], N, False)
    else:
        cols = col + tl.arange(0, tile.shape[1])
        mask = real[:, None] & (cols < N)[None, :]
        tl.store(rows_ptr[:, None] + cols[None, :], tile.to(rows_ptr.dtype.element_ty), mask=mask)


@triton.jit
def multiply(
    a_rows_ptr,  # [BLOCK_M]: where each row of A begins
    b_rows_ptr,  # [BLOCK_N]: where each row of B begins
    stride_ak,  # between the elements of a row of A
    stride_bk,  # and of B
    K,
    acc,  # float32 [BLOCK_M, BLOCK_N], to which the product is added
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return acc + A @ B.T of one tile, loaded through pointers to rows that must all be in bounds."""
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_rows_ptr[:, None] + offs_k[None, :] * stride_ak
    b_ptrs = b_rows_ptr[None, :] + offs_k[:, None] * stride_bk
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        inside = offs_k < K - k * BLOCK_K
        a = tl.load(a_ptrs, mask=inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None], other=0.0)
        acc = add_product(a, b, acc, UPCAST)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    return acc


@triton.jit
def add_product(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a @ b."""
    if UPCAST:  # the interpreter has no arithmetic in bfloat16 and fp8
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)
