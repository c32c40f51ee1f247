"""That AllGatherGemm's plain kernel polls and fences in front of its loads, whatever the pipeliner does."""

from __future__ import annotations

import re

import pytest
import triton
import triton.language as tl
from compiled import BLACKWELL, HOPPER, compile_for, early_load, events
from plain_kernels import GATHER

CANDIDATES = GATHER.candidates


@pytest.mark.parametrize("config", [CANDIDATES[1], CANDIDATES[-1]], ids=["tma", "pointers"])
def test_an_epilogue_fits_and_no_chunk_is_read_early(config):
    """A gelu by erf spills up to 128 bytes of large tiles, behind their K loop, and 472 without TMA."""
    compiled = GATHER.compile(config, types={"bias_ptr": "*fp32"}, ACTIVATION="gelu_tanh")
    GATHER.check_fits(compiled, HOPPER)
    lines = compiled.asm["ttgir"].splitlines()
    of_chunks = [line for line in lines if not re.search(r"tt\.load .*!tt\.ptr<f32>", line)]
    assert len(lines) - len(of_chunks) == 1  # the bias, in float32
    assert early_load("\n".join(of_chunks)) is None


def test_the_k_loop_is_pipelined_all_the_same():
    names = [name for _, name in events(GATHER.compile(CANDIDATES[0]).asm["ttgir"])]
    first_multiply = names.index("multiply")
    stages = CANDIDATES[0].num_stages
    assert names[:first_multiply].count("load") == 2 * (stages - 1)  # of A and of B, before the first product


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_a_poll_is_a_load_and_the_proxy_fence_stands_between_it_and_tma(target):
    compiled = GATHER.compile(CANDIDATES[0], target)
    assert "ld.global.sys.acquire" in compiled.asm["ptx"]
    assert not re.search(r"atom\.\S*add", compiled.asm["ptx"])
    # Not in PTX, whose blocks do not stand in program order.
    names = [name for _, name in events(compiled.asm["ttgir"])]
    first_load = names.index("load")
    assert [name for name in names[:first_load] if name != "loop"][:3] == ["poll", "poll", "fence"]


@pytest.mark.parametrize("config", [c for c in CANDIDATES if not c.kwargs["TMA"]][:1], ids=["pointers"])
def test_pointer_loads_need_no_proxy_fence(config):
    assert "fence.proxy.async.global" not in GATHER.compile(config).asm["ptx"]


# ---- negative control: the check above can fail


@triton.jit
def wait_inside_the_k_loop(
    a_ptr, b_ptr, c_ptr, ready_ptr, M, N, K, ASM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """A kernel as it must not be: the pipeliner lets the loads run ahead of the wait beside them."""
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BLOCK, BLOCK_K])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK, BLOCK])
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK), tl.num_programs(0)):
        acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for k in range(0, tl.cdiv(K, BLOCK_K)):
            tl.inline_asm_elementwise(ASM, "=r,l", [ready_ptr + k], dtype=tl.int32, is_pure=False, pack=1)
            a = a_desc.load([tile * BLOCK, k * BLOCK_K])
            acc = tl.dot(a, b_desc.load([0, k * BLOCK_K]).T, acc)
        c_desc.store([tile * BLOCK, 0], acc.to(tl.bfloat16))


SPIN = """{
    .reg .pred %waiting;
    AGAIN_${:uid}:
    ld.acquire.sys.global.b32 $0, [$1];
    setp.eq.s32 %waiting, $0, 0;
    @%waiting bra AGAIN_${:uid};
}"""


def test_a_wait_inside_the_k_loop_is_found_out():
    types = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16", "ready_ptr": "*i32"}
    types |= dict.fromkeys(("M", "N", "K"), "i32")
    constexprs = {"ASM": SPIN.replace("\n", " "), "BLOCK": 128, "BLOCK_K": 64}
    compiled = compile_for(HOPPER, wait_inside_the_k_loop, types, constexprs, num_warps=8, num_stages=3)
    assert early_load(compiled.asm["ttgir"]) == "a load stands above the first poll of the tile loop"
