"""That every candidate of AllGatherGemm compiles, fits, and reads no chunk before it has waited for it."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from compiled import (
    BLACKWELL,
    CDNA3,
    HOPPER,
    REGISTERS,
    SHARED_BYTES,
    compile_for,
    compiled_on,
    early_load,
    events,
    resources,
)

from dist_autotune.kernels import configs
from dist_autotune.kernels.ag_gemm.matmul import await_chunks
from dist_autotune.kernels.ag_gemm.plain import GPU_CANDIDATES, all_gather_gemm
from dist_autotune.kernels.epilogues import NO_ACTIVATION

pytestmark = pytest.mark.aot

TYPES = {
    "a_ptr": "*bf16",
    "b_ptr": "*bf16",
    "c_ptr": "*bf16",
    "flags_ptr": "*i32",
    "errors_ptr": "*i64",
    **dict.fromkeys(("M", "N", "K", "slots", "capacity", "stride_b", "stride_cm"), "i32"),
    **dict.fromkeys(("rank", "epoch", "base", "pushed", "patience_ticks", "size_class"), "i32"),
}
TARGETS = {"hopper": HOPPER, "blackwell": BLACKWELL, "cdna3": CDNA3}


def compile_candidate(config, target, dtype="bf16", **values):
    on_nvidia = target.backend == "cuda"
    types = {name: kind.replace("bf16", dtype) for name, kind in TYPES.items() if name not in values}
    if dtype == "fp8e4nv":
        types["c_ptr"] = "*bf16"
    constexprs = {"WORLD": 8, "TMA_LEGAL": on_nvidia, "FENCE": on_nvidia, "UPCAST": False}
    constexprs |= {"BY_COLUMNS": False, "bias_ptr": None, "ACTIVATION": NO_ACTIVATION}
    constexprs |= dict.fromkeys(("row_scale_ptr", "column_scale_ptr"))
    constexprs |= config.kwargs | values
    for name in ("row_scale_ptr", "column_scale_ptr", "bias_ptr"):
        if constexprs[name] is not None:
            types[name] = constexprs.pop(name)
    return compile_for(
        target,
        all_gather_gemm.fn,
        types,
        constexprs,
        any_value=tuple(all_gather_gemm.fn.do_not_specialize),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def usable_on(target, monkeypatch):
    """Return the candidates that a large call on this device leaves in the race."""
    monkeypatch.setattr(configs, "shared_memory_bytes", lambda: SHARED_BYTES[target])
    monkeypatch.setattr(torch.version, "hip", "6.4" if target is CDNA3 else None)
    a = torch.empty(1, dtype=torch.bfloat16)
    args = {"a_ptr": a, "M": 8192, "N": 8192, "K": 8192}
    return configs.prune_overlapped(GPU_CANDIDATES, args, WORLD=8, TMA_LEGAL=target is not CDNA3)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_candidates_fit_the_device_without_spills_and_wait_before_they_load(target, monkeypatch):
    usable = usable_on(target, monkeypatch)
    assert len(usable) >= 4
    for config in compiled_on(target, usable):
        compiled = compile_candidate(config, target)
        used = resources(compiled, target)
        assert used["registers"] <= REGISTERS[target], config
        assert used["spilled"] == 0, config
        assert used["shared_bytes"] <= SHARED_BYTES[target], config
        assert early_load(compiled.asm["ttgir"]) is None, config


def test_a_weight_by_columns_is_loaded_by_tma_like_one_by_rows():
    compiled = compile_candidate(GPU_CANDIDATES[0], HOPPER, BY_COLUMNS=True)
    assert resources(compiled, HOPPER)["spilled"] == 0
    assert early_load(compiled.asm["ttgir"]) is None


@pytest.mark.parametrize("config", [GPU_CANDIDATES[1], GPU_CANDIDATES[-1]], ids=["tma", "pointers"])
def test_an_epilogue_fits_and_no_chunk_is_read_early(config):
    """A gelu by erf spills up to 128 bytes of large tiles, behind their K loop, and 472 without TMA."""
    compiled = compile_candidate(config, HOPPER, bias_ptr="*fp32", ACTIVATION="gelu_tanh")
    used = resources(compiled, HOPPER)
    assert used["spilled"] == 0
    assert used["shared_bytes"] <= SHARED_BYTES[HOPPER]
    lines = compiled.asm["ttgir"].splitlines()
    of_chunks = [line for line in lines if not re.search(r"tt\.load .*!tt\.ptr<f32>", line)]
    assert len(lines) - len(of_chunks) == 1  # the bias, in float32
    assert early_load("\n".join(of_chunks)) is None


@pytest.mark.parametrize("config", [GPU_CANDIDATES[1], GPU_CANDIDATES[-1]], ids=["tma", "pointers"])
def test_rows_in_fp8_and_their_scales_are_not_read_early(config):
    values = {"row_scale_ptr": "*fp32", "column_scale_ptr": "*fp32"}
    compiled = compile_candidate(config, HOPPER, "fp8e4nv", **values)
    assert resources(compiled, HOPPER)["spilled"] == 0
    assert re.search(r"wgmma\.mma_async\S*k32\.f32\.e4m3\.e4m3", compiled.asm["ptx"])
    assert "ld.global.nc" not in compiled.asm["ptx"]
    ttgir = compiled.asm["ttgir"]
    scales = [found.start() for found in re.finditer(r"tt\.load .*!tt\.ptr<f32>", ttgir)]
    assert len(scales) == 2
    assert min(scales) > ttgir.rindex("warp_group_dot ")  # of the same tile, whose rows have been waited for
    assert early_load(re.sub(r"tt\.load (.*!tt\.ptr<f32>)", r"\1", ttgir)) is None


def test_float16_compiles_like_bfloat16():
    compiled = compile_candidate(GPU_CANDIDATES[0], HOPPER, "fp16")
    assert resources(compiled, HOPPER)["spilled"] == 0
    assert early_load(compiled.asm["ttgir"]) is None


@pytest.mark.parametrize("config", [GPU_CANDIDATES[0], GPU_CANDIDATES[-1]], ids=["tma", "pointers"])
def test_sizes_of_one_compile(config):
    ones = dict.fromkeys(("N", "K", "capacity", "stride_b", "stride_cm"), 1)  # Triton makes them constants
    compiled = compile_candidate(config, HOPPER, WORLD=1, TMA_LEGAL=False, **ones)
    assert resources(compiled, HOPPER)["spilled"] == 0


def test_the_k_loop_is_pipelined_all_the_same():
    names = [name for _, name in events(compile_candidate(GPU_CANDIDATES[0], HOPPER).asm["ttgir"])]
    first_multiply = names.index("multiply")
    stages = GPU_CANDIDATES[0].num_stages
    assert names[:first_multiply].count("load") == 2 * (stages - 1)  # of A and of B, before the first product


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_a_poll_is_a_load_and_the_proxy_fence_stands_between_it_and_tma(target):
    compiled = compile_candidate(GPU_CANDIDATES[0], target)
    assert "ld.global.sys.acquire" in compiled.asm["ptx"]
    assert not re.search(r"atom\.\S*add", compiled.asm["ptx"])
    # Not in PTX, whose blocks do not stand in program order.
    names = [name for _, name in events(compiled.asm["ttgir"])]
    first_load = names.index("load")
    assert [name for name in names[:first_load] if name != "loop"][:3] == ["poll", "poll", "fence"]


@pytest.mark.parametrize("config", [c for c in GPU_CANDIDATES if not c.kwargs["TMA"]][:1], ids=["pointers"])
def test_pointer_loads_need_no_proxy_fence(config):
    assert "fence.proxy.async.global" not in compile_candidate(config, HOPPER).asm["ptx"]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_kernel_that_waits_before_a_product_of_cublas_compiles(target):
    scalars = ("rank", "m", "epoch", "base", "pushed", "patience_ticks")
    types = {"flags_ptr": "*i32", "errors_ptr": "*i64", **dict.fromkeys(scalars, "i32")}
    compiled = compile_for(target, await_chunks, types, {"WORLD": 8}, any_value=scalars, num_warps=1)
    assert resources(compiled, target)["spilled"] == 0
    names = [name for _, name in events(compiled.asm["ttgir"])]
    assert "poll" in names


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
