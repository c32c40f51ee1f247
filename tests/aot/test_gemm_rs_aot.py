"""That every candidate of GemmReduceScatter compiles, fits, and orders its signals as the proof asks."""

from __future__ import annotations

import re

import pytest
import torch
from compiled import (
    BLACKWELL,
    CDNA3,
    HOPPER,
    REGISTERS,
    SHARED_BYTES,
    compile_for,
    compiled_on,
    resources,
)

from dist_autotune.kernels import configs
from dist_autotune.kernels.gemm_rs.plain import GPU_CANDIDATES, gemm_reduce_scatter

pytestmark = pytest.mark.aot

TYPES = {
    **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr", "partial_ptr", "staged_ptr", "addend_ptr"), "*bf16"),
    **dict.fromkeys(("flags_ptr", "counts_ptr"), "*i32"),
    "errors_ptr": "*i64",
    **dict.fromkeys(("M", "N", "K", "capacity", "stride_am", "stride_b", "stride_cm"), "i32"),
    **dict.fromkeys(("first", "chunks", "rank", "patience_ticks", "size_class"), "i32"),
}
PLAIN = {"BY_COLUMNS": False, "HAS_ADDEND": False}
OF_BACKWARD = {"BY_COLUMNS": True, "HAS_ADDEND": True}
SCALES = ("row_scale_ptr", "column_scale_ptr")
# Bytes of a thread; on Blackwell with tiles of 128 x 256. On CDNA3 scalar registers, which go to vector ones.
SPILLED = {HOPPER: 0, BLACKWELL: 72, CDNA3: 6}
TARGETS = {"hopper": HOPPER, "blackwell": BLACKWELL, "cdna3": CDNA3}


def compile_candidate(config, target, world=8, *, fp8=False, **values):
    constexprs = {"WORLD": world, "TMA_LEGAL": target.backend == "cuda", "UPCAST": False, **PLAIN, **values}
    in_fp8 = dict.fromkeys(("a_ptr", "b_ptr"), "*fp8e4nv") | dict.fromkeys(SCALES, "*fp32")
    return compile_for(
        target,
        gemm_reduce_scatter.fn,
        TYPES | (in_fp8 if fp8 else {}),
        constexprs | config.kwargs | ({} if fp8 else dict.fromkeys(SCALES)),
        any_value=tuple(gemm_reduce_scatter.fn.do_not_specialize),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@pytest.mark.parametrize(
    ("target", "values"),
    [*((target, PLAIN) for target in TARGETS.values()), (HOPPER, OF_BACKWARD)],
    ids=[*TARGETS, "hopper, a weight by columns and an addend"],
)
def test_candidates_fit_the_device(target, values, monkeypatch):
    monkeypatch.setattr(configs, "shared_memory_bytes", lambda: SHARED_BYTES[target])
    monkeypatch.setattr(torch.version, "hip", "6.4" if target is CDNA3 else None)
    args = {"a_ptr": torch.empty(1, dtype=torch.bfloat16), "M": 8192, "N": 8192, "K": 8192}
    usable = configs.prune_overlapped(GPU_CANDIDATES, args, WORLD=8, TMA_LEGAL=target is not CDNA3)
    assert len(usable) >= 4
    for config in compiled_on(target, usable) if values is PLAIN else GPU_CANDIDATES[:2]:
        used = resources(compile_candidate(config, target, **values), target)
        assert used["registers"] <= REGISTERS[target], config
        assert used["spilled"] <= SPILLED[target], config
        assert used["shared_bytes"] <= SHARED_BYTES[target], config


LARGEST = [GPU_CANDIDATES[place] for place in (0, 4, 12)]  # with most sums for a thread; the last without TMA


@pytest.mark.parametrize("config", LARGEST, ids=["tma", "tma, high tiles", "pointers"])
def test_in_fp8_the_largest_tiles_multiply_bytes_and_are_scaled_behind_the_loop_without_spills(config):
    compiled = compile_candidate(config, HOPPER, fp8=True)
    used = resources(compiled, HOPPER)
    assert used["registers"] <= REGISTERS[HOPPER]
    assert used["spilled"] == 0
    assert used["shared_bytes"] <= SHARED_BYTES[HOPPER]
    assert "k32.f32.e4m3.e4m3" in compiled.asm["ptx"]
    ttgir = compiled.asm["ttgir"]
    scales = [found.start() for found in re.finditer(r"tt\.load .*!tt\.ptr<f32>", ttgir)]
    assert len(scales) == 2
    assert min(scales) > ttgir.rindex("warp_group_dot ")


def of_tiles(ttgir):
    """Return in program order what the signals must be ordered against, and the signals."""
    patterns = {
        "multiply": r"warp_group_dot ",
        "poll": r"atomic_rmw add, acquire, sys",
        "load": r"tt\.load .*tensor<",
        "store": r"tt\.store .*tensor<",
        "barrier": r"gpu\.barrier|ttg\.barrier",
        "count": r"atomic_rmw add, acq_rel, gpu",
        "signal": r"atomic_rmw exch, release, sys, .*%c1_i32",
    }
    lines = ttgir[ttgir.index("scf.while") :].splitlines()
    return [name for line in lines for name, pattern in patterns.items() if re.search(pattern, line)]


@pytest.mark.parametrize("config", GPU_CANDIDATES[:1] + GPU_CANDIDATES[7:8], ids=["halves", "whole tiles"])
def test_sums_are_loaded_behind_the_poll_and_handed_over_behind_the_stores(config):
    compiled = compile_candidate(config, HOPPER)
    order = of_tiles(compiled.asm["ttgir"])
    halves = 2 if config.kwargs["EPILOGUE_SUBTILE"] else 1
    own_rows = ["poll", "poll", *["load", "store"] * halves]  # one poll in front of its loop, one in it
    handed_over = [*["store"] * halves, "barrier", "count", "barrier", "signal"]
    assert order[: order.index("signal") + 1] == ["multiply", *own_rows, *handed_over]
    # Of a TMA store the program does not know when it is done.
    assert "async_tma_copy_local_to_global" not in compiled.asm["ttgir"]


def test_signals_have_the_scope_of_those_who_read_them():
    ptx = compile_candidate(GPU_CANDIDATES[0], HOPPER).asm["ptx"]
    assert "ld.global.sys.acquire" in ptx
    assert "atom.global.gpu.acq_rel.add" in ptx
    assert "atom.global.sys.release.exch" in ptx
    assert not re.search(r"atom\.global\.sys\.\S*add", ptx)  # a poll is a load
