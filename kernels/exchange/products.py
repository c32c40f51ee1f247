"""One tile of A @ B.T in float32, for kernels that loop over tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Factors(NamedTuple):
    """The arguments of a kernel about A and B [N, K] of a product A @ B.T."""

    a_ptr: Any
    a_pitch: Any  # between the rows of A
    b_ptr: Any
    b_pitch: Any  # between the rows of B, or BY_COLUMNS its columns
    N: Any
    K: Any


@triton.jit
def describe_rows(factors, rows, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return a descriptor of the first rows of A."""
    return tl.make_tensor_descriptor(
        factors.a_ptr, [rows, factors.K], [factors.a_pitch, 1], [BLOCK_M, BLOCK_K]
    )


@triton.jit
def describe_columns(factors, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BY_COLUMNS: tl.constexpr):
    """Return a descriptor of B, or BY_COLUMNS of B.T."""
    N, K, pitch = factors.N, factors.K, factors.b_pitch
    if BY_COLUMNS:
        return tl.make_tensor_descriptor(factors.b_ptr, [K, N], [pitch, 1], [BLOCK_K, BLOCK_N])
    else:  # noqa: RET505  the compiler returns from both
        return tl.make_tensor_descriptor(factors.b_ptr, [N, K], [pitch, 1], [BLOCK_N, BLOCK_K])


@triton.jit
def multiply_tile(
    factors,
    a_desc,  # these two as above, if USE_TMA
    b_desc,
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
    if USE_TMA:
        # A chunk's last tile also multiplies rows of the next one.
        acc = multiply_tma(a_desc, b_desc, origin + row, col, factors.K, acc, BLOCK_K, BY_COLUMNS, UPCAST)
    else:
        # Rows and columns beyond the edge read the first one: in bounds, and no mask in the K loop.
        offs_m = row + tl.arange(0, acc.shape[0])
        offs_n = col + tl.arange(0, acc.shape[1])
        a_rows = tl.cast(origin + tl.where(offs_m < rows, offs_m, 0), tl.int64)
        b_rows = tl.cast(tl.where(offs_n < factors.N, offs_n, 0), tl.int64)
        acc = multiply(
            factors.a_ptr + a_rows * factors.a_pitch,
            factors.b_ptr + b_rows * (1 if BY_COLUMNS else factors.b_pitch),
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
def multiply_tma(
    a_desc,  # of A [.., K], blocks of [BLOCK_M, BLOCK_K]
    b_desc,  # of B [N, K], blocks of [BLOCK_N, BLOCK_K]; BY_COLUMNS: of B.T [K, N], [BLOCK_K, BLOCK_N]
    row,
    col,
    K,
    acc,  # float32 [BLOCK_M, BLOCK_N], to which the product is added
    BLOCK_K: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return acc + A[row:, :] @ B[col:, :].T of a tile, loaded by TMA, which reads zeros beyond the edges."""
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        b = b_desc.load([k * BLOCK_K, col]) if BY_COLUMNS else b_desc.load([col, k * BLOCK_K]).T
        acc = add_product(a_desc.load([row, k * BLOCK_K]), b, acc, UPCAST)
    return acc


@triton.jit
def multiply(
    a_rows_ptr,  # [BLOCK_M]: where each row of A begins
    b_rows_ptr,  # [BLOCK_N]: where each row of B begins
    stride_bk,  # between the elements of a row of B
    K,
    acc,  # float32 [BLOCK_M, BLOCK_N], to which the product is added
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return acc + A @ B.T of one tile, loaded through pointers to rows that must all be in bounds."""
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_rows_ptr[:, None] + offs_k[None, :]
    b_ptrs = b_rows_ptr[None, :] + offs_k[:, None] * stride_bk
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        inside = offs_k < K - k * BLOCK_K
        a = tl.load(a_ptrs, mask=inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None], other=0.0)
        acc = add_product(a, b, acc, UPCAST)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    return acc


@triton.jit
def add_product(a, b, acc, UPCAST: tl.constexpr):
    """Return acc + a @ b."""
    if UPCAST:  # the interpreter has no arithmetic in bfloat16 and fp8
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)
