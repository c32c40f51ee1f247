"""A wait, compiled for GPUs that are not here: it polls for long before it reads the clock."""

from __future__ import annotations

import re

import pytest
import triton
from compiled import BLACKWELL, CDNA3, HOPPER, compile_for

from dist_autotune.kernels.signals import wait_until


@triton.jit
def wait(signal_ptr, error_ptr, epoch, patience_ticks):
    wait_until(signal_ptr, epoch, error_ptr, 1, patience_ticks)


def compiled_for(target, warps):
    types = {"signal_ptr": "*i32", "error_ptr": "*i64", "epoch": "i32", "patience_ticks": "i32"}
    return compile_for(target, wait, types, {}, any_value=("epoch", "patience_ticks"), num_warps=warps)


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=lambda target: str(target.arch))
def test_the_clock_is_read_behind_a_round_of_failed_polls_and_all_threads_agree(target, warps):
    """Blocks in PTX do not stand in program order: the way to the clock is followed jump by jump."""
    blocks = re.split(r"^(?=\$L__BB)", compiled_for(target, warps).asm["ptx"], flags=re.MULTILINE)
    named = {re.match(r"\$L__BB\w+", block)[0]: block for block in blocks[1:]}
    (clock,) = [name for name, block in named.items() if "%globaltimer" in block]
    agree = "vote.sync.any" if warps == 1 else "barrier.cta.red.or"
    assert agree in named[clock]
    assert "ld.global.sys.acquire" in blocks[0]  # the first poll
    assert "%globaltimer" not in blocks[0]
    # Without the loop of polls there is no way from the first poll to the clock.
    (loop,) = [name for name, block in named.items() if "ld.global.sys.acquire" in block]
    names = ["", *named]
    texts = dict(zip(names, blocks, strict=True))
    reached, ahead = set(), [""]
    while ahead:
        name = ahead.pop()
        if name in reached or name == loop:
            continue
        reached.add(name)
        ahead += re.findall(r"bra(?:\.uni)?\s+(\$L__BB\w+);", texts[name])
        if not re.search(r"^\s*(?:bra(?:\.uni)?\s+\S+|ret);\s*$", texts[name], flags=re.MULTILINE):
            ahead += names[names.index(name) + 1 :][:1]  # it falls through
    assert len(reached) > 1
    assert clock not in reached


def test_without_its_own_clock_a_wait_counts_polls():
    assert not re.search(r"s_memrealtime|s_memtime|s_getreg", compiled_for(CDNA3, 4).asm["amdgcn"])
