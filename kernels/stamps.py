"""When and where something happens inside a kernel: for waits, and for pictures of what ran beside what."""

from __future__ import annotations

import triton
import triton.language as tl

from .compat import is_one_warp


@triton.jit
def nanoseconds():
    """Return the device's clock, the same on all SMs; it moves in steps, of 32 ns at best."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def ticks():
    """Return the device's clock in units of 2**20 ns, about a millisecond, as an int32 that wraps around."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b64 now;
        mov.u64 now, %globaltimer;
        shr.u64 now, now, 20;
        cvt.u32.u64 $0, now;
        }
        """,
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def in_any_thread(flag):
    """Return 1 in all threads if the flag, an int32, is not 0 in one of them, else 0.

    Threads that read the clock find different numbers. What decides which way a program goes must not differ:
    some would leave a loop in which the others wait for them at a barrier.
    """
    # Of a program that is not of one warp, all warps come here: barrier 0 is theirs.
    VOTE: tl.constexpr = "vote.sync.any.pred any, mine, -1;"
    BARRIER: tl.constexpr = "barrier.cta.red.or.pred any, 0, mine;"
    ASK: tl.constexpr = VOTE if is_one_warp() else BARRIER
    return tl.inline_asm_elementwise(
        "{ .reg .pred mine, any; setp.ne.s32 mine, $1, 0; " + ASK + " selp.s32 $0, 1, 0, any; }",
        "=r,r",
        [flag],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def multiprocessor():
    """Return the number of the SM that this runs on."""
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
