"""When and where something happens inside a kernel, for pictures of what ran beside what."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nanoseconds():
    """Return the device's clock, the same on all SMs; it moves in steps, of 32 ns at best."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def multiprocessor():
    """Return the number of the SM that this runs on."""
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
