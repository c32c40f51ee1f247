"""The body in plain Triton: for AMD's GPUs, for strides that TMA cannot take, and for the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from ..configs import do_bench
from ..tiles import claim_number, reset_counter, scheduled_number, scheduled_tile
from .candidates import PLAIN_CANDIDATES
from .pruning import prune_plain


@triton.autotune(
    configs=PLAIN_CANDIDATES,
    key=["m_class", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn", "programs", "SCHEDULE"],
    prune_configs_by={"early_config_prune": prune_plain},
    do_bench=do_bench,
)
@triton.jit(do_not_specialize=["programs", "m_class"])
def plain_gemm(
    a_ptr,
    b_ptr,
    c_ptr,
    counter_ptr,  # int32 [2], zeros: for the dynamic schedule
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    programs,  # the most that run at once: what the best config depends on, no part of the code
    m_class,  # as what M is tuned, see `size_classes`; no part of the code either
    SCHEDULE: tl.constexpr,
    CHIPLETS: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter cannot do arithmetic in bfloat16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Write C = A @ B; each program takes tiles until the schedule has no more for it."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    visit = 0
    number = _number(visit, tiles, counter_ptr, SCHEDULE, CHIPLETS)
    while number < tiles:
        pid_m, pid_n = scheduled_tile(number, tiles_m, tiles_n, SCHEDULE, GROUP_M)
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows and columns beyond the edge read the first one: in bounds, and no mask in the K loop.
        a_rows = tl.cast(tl.where(rows < M, rows, 0), tl.int64)
        b_cols = tl.cast(tl.where(cols < N, cols, 0), tl.int64)
        offs_k = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + a_rows[:, None] * stride_am + tl.cast(offs_k, tl.int64)[None, :] * stride_ak
        b_ptrs = b_ptr + tl.cast(offs_k, tl.int64)[:, None] * stride_bk + b_cols[None, :] * stride_bn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            inside = offs_k < K - k * BLOCK_K
            a = tl.load(a_ptrs, mask=inside[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=inside[:, None], other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc)
            a_ptrs += BLOCK_K * tl.cast(stride_ak, tl.int64)
            b_ptrs += BLOCK_K * tl.cast(stride_bk, tl.int64)
        c_rows = tl.cast(rows, tl.int64)[:, None] * stride_cm
        c_ptrs = c_ptr + c_rows + tl.cast(cols, tl.int64)[None, :] * stride_cn
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])
        visit += 1
        number = _number(visit, tiles, counter_ptr, SCHEDULE, CHIPLETS)
    if SCHEDULE == "dynamic":
        reset_counter(counter_ptr, tl.num_programs(0))


@triton.jit
def _number(visit, tiles, counter_ptr, SCHEDULE: tl.constexpr, CHIPLETS: tl.constexpr):
    """Return the number of this program's next tile."""
    if SCHEDULE == "dynamic":
        number = claim_number(counter_ptr)
    else:
        number = scheduled_number(
            visit, tl.program_id(0), tl.num_programs(0), tiles, SCHEDULE, CHIPLETS, 4 * CHIPLETS
        )
    return number
