"""That candidates of the operations' plain kernels compile, fit, and load nothing before they have waited.

In which order each signals what it has done is in a file of its own.
"""

import re

import pytest
from compiled import HOPPER, check_fits, compile_for, compiled_on, early_load, events
from plain_kernels import COMBINE, DISPATCH, EACH, GATHER, IN_FP8, ON_EACH, SCATTER, SIZES, in_type

from dist_autotune.bits.tensor_hash import BLOCK, hash_kernel
from dist_autotune.kernels.elementwise_add.operation import pipelined_add
from dist_autotune.kernels.exchange.absence import await_parts
from dist_autotune.kernels.exchange.streams import await_peers
from dist_autotune.kernels.tp.gating import gate_backward_kernel, gate_kernel


@ON_EACH
@EACH
def test_candidates_fit_the_device_and_wait_before_they_load(kernel, target):
    usable = kernel.usable_on(target)
    assert len(usable) >= 4
    for config in compiled_on(target, usable):
        compiled = kernel.compile(config, target)
        kernel.check_fits(compiled, target, config)
        if kernel is GATHER:
            assert early_load(compiled.asm["ttgir"]) is None, config


ONES = dict.fromkeys(("N", "K", "capacity", "stride_b", "stride_cm"), 1)  # Triton makes them constants


def by_pointers(kernel):
    return next(config for config in kernel.candidates if not config.kwargs["TMA"])


OF_BACKWARD = {"BY_COLUMNS": True, "HAS_ADDEND": True}
FURTHER = {
    "gather, a weight by columns": (GATHER, GATHER.candidates[0], {"BY_COLUMNS": True}),
    "gather, float16": (GATHER, GATHER.candidates[0], {"types": in_type(GATHER, "fp16")}),
    "gather, sizes of one": (GATHER, GATHER.candidates[0], {"WORLD": 1, "TMA_LEGAL": False, **ONES}),
    "gather, sizes of one, by pointers": (
        GATHER,
        GATHER.candidates[-1],
        {"WORLD": 1, "TMA_LEGAL": False, **ONES},
    ),
    **{
        f"gather by stores, tiles {index}": (GATHER, GATHER.candidates[index], {"STORERS": 16})
        for index in (0, 7, 8, 12)
    },
    "scatter, a weight by columns and an addend": (SCATTER, SCATTER.candidates[0], OF_BACKWARD),
    "scatter, the same, other tiles": (SCATTER, SCATTER.candidates[1], OF_BACKWARD),
    **{
        f"scatter to the peers, tiles {index}": (SCATTER, SCATTER.candidates[index], {"STORES": True})
        for index in (0, 4, 7, 8, 12)
    },
    **{
        f"combine for the peers, tiles {index}": (COMBINE, COMBINE.candidates[index], {"STORES": True})
        for index in (0, 1, 4, 7, 12)
    },
    "combine for the peers, rows by TMA": (
        COMBINE,
        COMBINE.candidates[0],
        {"STORES": True, "SORTED": True, "A_TMA_LEGAL": True},
    ),
    "dispatch, weights by columns": (DISPATCH, DISPATCH.candidates[0], {"BY_COLUMNS": True}),
    "combine, weights by columns": (COMBINE, COMBINE.candidates[0], {"BY_COLUMNS": True}),
    "dispatch, one element an expert": (DISPATCH, by_pointers(DISPATCH), dict.fromkeys(SIZES, 1)),
    "combine, one element an expert": (COMBINE, by_pointers(COMBINE), dict.fromkeys(SIZES, 1)),
}


@pytest.mark.parametrize(("kernel", "config", "options"), FURTHER.values(), ids=FURTHER)
def test_other_layouts_types_and_sizes_fit_like_the_plain_one(kernel, config, options):
    compiled = kernel.compile(config, **options)
    kernel.check_fits(compiled, HOPPER)
    if kernel is GATHER and not {"WORLD", "STORERS"} & options.keys():
        assert early_load(compiled.asm["ttgir"]) is None


FOR_A_PEER = {  # a kernel, its candidate, its option, and how many stores of 16 bytes a thread makes
    "rows": (GATHER, 8, {"STORERS": 16}, 8192 // 8 // 128),  # a block, by 128 threads
    "a tile": (SCATTER, 0, {"STORES": True}, 2 * 128 * 256 // 8 // 256),  # there and here, by 256 threads
    "sums of tokens": (COMBINE, 0, {"STORES": True}, None),  # as many as of pushed ones
}


@pytest.mark.parametrize(("kernel", "index", "option", "stores"), FOR_A_PEER.values(), ids=FOR_A_PEER)
def test_what_is_for_a_peer_is_stored_by_16_bytes_and_counted_and_told_to_it_at_system_scope(
    kernel, index, option, stores
):
    config = kernel.candidates[index]
    ptx = kernel.compile(config, **option).asm["ptx"]
    if stores is None:
        stores = kernel.compile(config, STORES=False).asm["ptx"].count("st.global.v4.b32")
    assert ptx.count("st.global.v4.b32") == stores
    assert kernel is not SCATTER or "st.global.b16" not in ptx
    assert re.search(r"atom\.global\.sys\.acq_rel\.add", ptx)  # a program's share
    assert re.search(r"atom\.global\.sys\.release\.exch", ptx)  # all of them


# The largest tiles have most sums for a thread; the last ones are without TMA.
OF_FP8 = {
    "gather, tma": (GATHER, 1),
    "gather, pointers": (GATHER, -1),
    "scatter, tma": (SCATTER, 0),
    "scatter, high tiles": (SCATTER, 4),
    "scatter, pointers": (SCATTER, 11),
}


@pytest.mark.parametrize(("kernel", "index"), OF_FP8.values(), ids=OF_FP8)
def test_in_fp8_bytes_are_multiplied_and_scaled_behind_the_loop_without_spills(kernel, index):
    compiled = kernel.compile(kernel.candidates[index], types=IN_FP8)
    kernel.check_fits(compiled, HOPPER)
    assert re.search(r"wgmma\.mma_async\S*k32\.f32\.e4m3\.e4m3", compiled.asm["ptx"])
    ttgir = compiled.asm["ttgir"]
    scales = [found.start() for found in re.finditer(r"tt\.load .*!tt\.ptr<f32>", ttgir)]
    assert len(scales) == 2
    assert min(scales) > ttgir.rindex("warp_group_dot ")  # of the same tile, whose rows have been waited for
    if kernel is GATHER:
        assert "ld.global.nc" not in compiled.asm["ptx"]
        assert early_load(re.sub(r"tt\.load (.*!tt\.ptr<f32>)", r"\1", ttgir)) is None


# ---- kernels without candidates

HERE = {"rank": "i32", "patience_ticks": "i32", "errors_ptr": "*i64"}
PARTS = {"flags_ptr": "*i32", **HERE}
GATED = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16") | {"n": "i32"}
OF_GATED = dict.fromkeys(("grad_ptr", "gate_ptr", "up_ptr", "of_gate_ptr", "of_up_ptr"), "*bf16") | {
    "n": "i32"
}
ADD = {"a_ptr": "*fp32", "b_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
SMALL = {  # a kernel, the types of its arguments, its constants, its warps
    "wait in place of a call": (await_parts, PARTS, {"WORLD": 8, "COUNTED": True, "ANNOUNCED": False}, 1),
    "over experts": (await_parts, PARTS, {"WORLD": 8, "COUNTED": False, "ANNOUNCED": True}, 1),
    "meeting": (await_peers, {"flags_ptr": "*i32", "epoch": "i32", **HERE}, {"WORLD": 8}, 1),
    "gated": (gate_kernel, GATED, {"BLOCK": 2048}, 4),
    "gated, backward": (gate_backward_kernel, OF_GATED | {"n": "i32"}, {"BLOCK": 2048}, 4),
    "elementwise add": (pipelined_add.fn, ADD, {"BLOCK": 2048, "STAGES": 4}, 4),
} | {
    f"hash of {bits} bits, {size}": (
        hash_kernel,
        {"words_ptr": f"*i{bits}", "partial_ptr": "*i64", "n": size},
        {"BITS": bits, "BLOCK": BLOCK},
        4,
    )
    for bits, size in ((8, "i64"), (16, "i64"), (32, "i32"), (64, "i64"))
}


@ON_EACH
@pytest.mark.parametrize(("kernel", "types", "constants", "warps"), SMALL.values(), ids=SMALL)
def test_small_kernels_fit_and_spill_nothing(target, kernel, types, constants, warps):
    scalars = tuple(name for name, kind in types.items() if kernel is not pipelined_add.fn and kind[0] == "i")
    compiled = compile_for(target, kernel, types, constants, any_value=scalars, num_warps=warps)
    check_fits(compiled, target)
    assert compiled.metadata.num_warps == warps
    ttgir = compiled.asm["ttgir"]
    if kernel is await_parts:
        assert "poll" in [name for _, name in events(ttgir)]
    if kernel is pipelined_add.fn and target is HOPPER:  # two loads, three blocks ahead and one in the loop
        assert ttgir.count("async_copy_global_to_local") == 2 * 4
