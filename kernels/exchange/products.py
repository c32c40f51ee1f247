"""One tile of A @ B.T in float32, for kernels that loop over tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(tile):
    """Return the left and the right half of a tile's columns."""
    HALF_N: tl.constexpr = tile.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, HALF_N)), (0, 2, 1)))


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
        acc = _dot(a_desc.load([row, k * BLOCK_K]), b, acc, UPCAST)
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
        acc = _dot(a, b, acc, UPCAST)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    return acc


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    if UPCAST:  # the interpreter cannot do arithmetic in bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)
