"""The barrier over ranks, compiled for GPUs that are not here: released before, acquired while it polls."""

from __future__ import annotations

import re

import pytest
import triton
from barrier import barrier_all
from compiled import BLACKWELL, CDNA3, HOPPER, compile_for

from dist_autotune.kernels.signals import wait_until

TYPES = {"signals_ptr": "*i64", "errors_ptr": "*i64", "rank": "i32", "epoch": "i32", "patience_ticks": "i32"}


def compiled_for(target, world):
    fence = target.backend == "cuda"
    return compile_for(
        target,
        barrier_all,
        TYPES,
        {"WORLD": world, "FENCE": fence},
        any_value=("rank", "epoch", "patience_ticks"),
    )


@triton.jit
def wait(signal_ptr, error_ptr, epoch, patience_ticks):
    wait_until(signal_ptr, epoch, error_ptr, 1, patience_ticks, False)


def ptx_of_wait(target, warps):
    types = {"signal_ptr": "*i32", "error_ptr": "*i64", "epoch": "i32", "patience_ticks": "i32"}
    compiled = compile_for(target, wait, types, {}, any_value=("epoch", "patience_ticks"), num_warps=warps)
    return compiled.asm["ptx"]


@pytest.mark.parametrize("warps", [1, 4])
@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=lambda target: str(target.arch))
def test_the_clock_is_read_behind_a_round_of_failed_polls_and_all_threads_agree(target, warps):
    """Blocks in PTX do not stand in program order: the way to the clock is followed jump by jump."""
    blocks = re.split(r"^(?=\$L__BB)", ptx_of_wait(target, warps), flags=re.MULTILINE)
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
    compiled = compiled_for(CDNA3, 2)
    assert not re.search(r"s_memrealtime|s_memtime|s_getreg", compiled.asm["amdgcn"])


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=lambda target: str(target.arch))
def test_the_barrier_releases_before_it_acquires_and_fences_last(target):
    text = compiled_for(target, 2).asm["ptx"]
    found = re.findall(
        r"atom\.global\.sys\.release|ld\.global\.sys\.acquire|fence\.proxy\.async\.global", text
    )
    release, acquire, fence = (
        [index for index, name in enumerate(found) if word in name]
        for word in ("release", "acquire", "fence")
    )
    assert release
    assert acquire
    assert fence
    assert max(release[:2]) < min(acquire)  # both peers are told before either is waited for
    assert max(fence) > max(acquire)
