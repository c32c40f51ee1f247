"""That the warp-specialised kernels of all operations compile and fit, and that each call has a candidate."""

from __future__ import annotations

import re

import pytest
from compiled import BLACKWELL, HOPPER
from specialized_kernels import EACH, GATHER, SCALED, SCATTER, TARGETS, candidate

from dist_autotune.kernels.gemm.pruning import fewest_rows

LARGE = candidate(GATHER, "cooperative", (128, 256, 64), 8)
BLACKWELL_S = candidate(GATHER, "cooperative", (128, 256, 64), 4)
PINGPONG = candidate(GATHER, "pingpong", (128, 128, 64), 4)
SMALL_DEEP = candidate(GATHER, "cooperative", (64, 128, 128), 4)


@TARGETS
@EACH
def test_candidates_fit_the_device_without_spills(kernel, target):
    assert kernel.compiled_for(target)
    for config, compiled in kernel.compiled_for(target):
        kernel.check_fits(config, compiled, target)


def by_columns(variant):
    usable = SCATTER.usable_on(HOPPER, 2048, by_rows=False)
    return next(config for config in usable if config.kwargs["VARIANT"] == variant)


GELU = {"types": {"bias_ptr": "*fp32"}, "ACTIVATION": "gelu"}
OF_BACKWARD = {"types": {"addend_ptr": "*bf16"}, "TRANS_B": False}
FURTHER = {
    "gather, a weight by columns": (GATHER, PINGPONG, HOPPER, {"TRANS_B": False}),
    "gather, a weight by columns, Blackwell": (GATHER, BLACKWELL_S, BLACKWELL, {"TRANS_B": False}),
    "gather, GELU": (GATHER, LARGE, HOPPER, GELU),
    "gather, SwiGLU in float16": (GATHER, PINGPONG, HOPPER, {"ACTIVATION": "swiglu", "dtype": "fp16"}),
    # Four warps spill 24 bytes of a gelu of 128 x 256 sums; eight do not.
    "gather, GELU, Blackwell": (GATHER, LARGE, BLACKWELL, GELU),
    "scatter, a weight by columns and an addend": (SCATTER, by_columns("cooperative"), HOPPER, OF_BACKWARD),
    "scatter, the same, pingpong": (SCATTER, by_columns("pingpong"), HOPPER, OF_BACKWARD),
}


@pytest.mark.parametrize(("kernel", "config", "target", "options"), FURTHER.values(), ids=FURTHER)
def test_what_a_call_may_add_fits_beside_the_accumulator(kernel, config, target, options):
    compiled = kernel.compile(config, target, **options)
    kernel.check_fits(config, compiled, target, is_estimated="ACTIVATION" not in options)


@pytest.mark.parametrize("config", [PINGPONG, SMALL_DEEP], ids=["pingpong", "small"])
def test_in_fp8_with_scales_it_multiplies_bytes_without_spills(config):
    compiled = GATHER.compile(config, dtype="fp8e4nv", types={**SCALED, "bias_ptr": "*bf16"})
    GATHER.check_fits(config, compiled, HOPPER)
    assert re.search(r"wgmma\.mma_async\S*k32\.f32\.e4m3\.e4m3", compiled.asm["ptx"])
    # Scales that peers write, and a cache that no acquire empties.
    assert "ld.global.nc" not in compiled.asm["ptx"]


@TARGETS
@EACH
@pytest.mark.parametrize("rows", [64, 100, 127, 128, 200, 4096])
def test_no_tile_is_higher_than_a_chunk_and_one_is_left_where_the_kernel_runs(kernel, target, rows):
    usable = kernel.usable_on(target, rows)
    assert all(config.kwargs["BLOCK_M"] <= rows for config in usable)
    assert bool(usable) == (rows >= fewest_rows(kernel.candidates, tensor_memory=target is BLACKWELL))


@TARGETS
@pytest.mark.parametrize("n", [8, 64, 1792])
def test_a_narrow_weight_leaves_a_candidate(target, n):
    assert GATHER.usable_on(target, 128, n)


def test_a_weight_by_columns_leaves_out_what_cannot_read_it():
    assert not any(config.kwargs["JOINED"] for config in SCATTER.usable_on(HOPPER, 2048, by_rows=False))


@EACH
def test_two_candidates_are_never_the_same(kernel):
    assert len({str(config) for config in kernel.candidates}) == len(kernel.candidates)
