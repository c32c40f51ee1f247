"""That the kernels over experts compile for every target, fit, and order signals as the proofs ask."""

from __future__ import annotations

import re

import pytest
import torch
from compiled import BLACKWELL, CDNA3, HOPPER, REGISTERS, SHARED_BYTES, compile_for, compiled_on, resources

from dist_autotune.kernels import configs
from dist_autotune.kernels.moe.ag_moe_kernel import GPU_CANDIDATES as GATHER_CANDIDATES
from dist_autotune.kernels.moe.ag_moe_kernel import all_gather_moe
from dist_autotune.kernels.moe.moe_rs_kernel import GPU_CANDIDATES as SCATTER_CANDIDATES
from dist_autotune.kernels.moe.moe_rs_kernel import moe_reduce_scatter
from dist_autotune.kernels.moe.plan import search_bits
from dist_autotune.kernels.moe.routing import count_choices, place_choices, sort_choices

pytestmark = pytest.mark.aot

PLAN = dict.fromkeys(("rows_ptr", "sources_ptr", "ends_ptr", "tables_ptr", "flags_ptr"), "*i32")
ANY_VALUE = (
    *("size_class", "experts", "topk", "capacity", "tokens_per_rank", "rank", "patience_ticks"),
    *("first_part", "parts"),
)
SIZES = ("N", "K", "stride_be", "stride_b", "stride_cm")
GATHER = {
    **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16"),
    **PLAN,
    "errors_ptr": "*i64",
    **dict.fromkeys((*SIZES, *ANY_VALUE), "i32"),
}
SCATTER = {
    **GATHER,
    **dict.fromkeys(("products_ptr", "partial_ptr", "staged_ptr"), "*bf16"),
    "weights_ptr": "*fp32",
    **dict.fromkeys(("offsets_ptr", "counters_ptr"), "*i32"),
    **dict.fromkeys(("stride_am", "first_part", "parts"), "i32"),
}
for name in ("tokens_per_rank", "first_part", "parts"):
    del GATHER[name]
# Bytes of a thread, and on CDNA3 scalar registers, which go to vector ones: the scatter's many loops.
# On Blackwell ptxas settles for 128 registers with tiles of 128 x 128.
SPILLED = {
    "gather": {HOPPER: 0, BLACKWELL: 0, CDNA3: 0},
    "scatter": {HOPPER: 8, BLACKWELL: 56, CDNA3: 25},
}
TARGETS = {"hopper": HOPPER, "blackwell": BLACKWELL, "cdna3": CDNA3}
KERNELS = {"gather": (all_gather_moe, GATHER), "scatter": (moe_reduce_scatter, SCATTER)}
CANDIDATES = {"gather": GATHER_CANDIDATES, "scatter": SCATTER_CANDIDATES}


def compile_candidate(
    name, config, target, world=8, ones=(), by_columns=False, is_sorted=False, by_tma=False
):
    """Return the compiled kernel; ones: sizes that are 1, which Triton makes constants."""
    kernel, types = KERNELS[name]
    types = {each: kind for each, kind in types.items() if each not in ones}
    constexprs = {"WORLD": world, "TMA_LEGAL": target.backend == "cuda", "UPCAST": False}
    constexprs |= {"BY_COLUMNS": by_columns, "SORTED": is_sorted}
    constexprs |= dict.fromkeys(ones, 1)
    if name == "gather":
        constexprs["HEIGHTS"] = 4
    else:
        constexprs["A_TMA_LEGAL"] = by_tma
    return compile_for(
        target,
        kernel.fn,
        types,
        constexprs | config.kwargs,
        any_value=tuple(each for each in ANY_VALUE if each in types),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@pytest.mark.parametrize("name", KERNELS)
def test_weights_by_columns_are_loaded_by_tma_like_those_by_rows(name):
    used = resources(compile_candidate(name, CANDIDATES[name][0], HOPPER, by_columns=True), HOPPER)
    assert used["spilled"] <= SPILLED[name][HOPPER]
    assert used["shared_bytes"] <= SHARED_BYTES[HOPPER]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_candidates_fit_the_device(name, target, monkeypatch):
    monkeypatch.setattr(configs, "shared_memory_bytes", lambda: SHARED_BYTES[target])
    monkeypatch.setattr(torch.version, "hip", "6.4" if target is CDNA3 else None)
    args = {"a_ptr": torch.empty(1, dtype=torch.bfloat16), "size_class": 16384, "N": 4096, "K": 4096}
    usable = configs.prune_overlapped(CANDIDATES[name], args, WORLD=8, TMA_LEGAL=target is not CDNA3)
    assert len(usable) >= 4
    for config in compiled_on(target, usable):
        used = resources(compile_candidate(name, config, target), target)
        assert used["registers"] <= REGISTERS[target], config
        assert used["spilled"] <= SPILLED[name][target], config
        assert used["shared_bytes"] <= SHARED_BYTES[target], config


@pytest.mark.parametrize("name", KERNELS)
def test_a_weight_of_one_element_an_expert_is_compiled(name):
    config = next(config for config in CANDIDATES[name] if not config.kwargs["TMA"])
    compiled = compile_candidate(name, config, HOPPER, ones=SIZES)
    assert resources(compiled, HOPPER)["shared_bytes"] <= SHARED_BYTES[HOPPER]


EVENTS = {
    "multiply": r"warp_group_dot |tt\.dot ",
    "copy of A": r"async_copy_global_to_local",
    "wait for peer": r"atomic_rmw add, acquire, sys",
    "wait for tiles": r"atomic_rmw add, acquire, gpu",
    "load": r"tt\.load .*tensor<.*(bf16|f32)",
    "store": r"tt\.store .*tensor<",
    "barrier": r"gpu\.barrier|ttg\.barrier",
    "count tile": r"atomic_rmw add, release, gpu",
    "count block": r"atomic_rmw add, acq_rel, gpu",
    "signal": r"atomic_rmw exch, release, sys, .*%c1_i32",
}


def order_of(compiled):
    """Return in program order what signals must be ordered against, and the signals; repetitions left out."""
    lines = compiled.asm["ttgir"].splitlines()
    found = [name for line in lines for name, pattern in EVENTS.items() if re.search(pattern, line)]
    return [name for name, before in zip(found, ["", *found], strict=False) if name != before]


def test_sorted_rows_are_multiplied_without_asking_where_they_are():
    """Compare how many words of the plan a kernel reads for its rows."""
    words = {}
    for name in KERNELS:
        for is_sorted in (False, True):
            compiled = compile_candidate(name, CANDIDATES[name][0], HOPPER, is_sorted=is_sorted)
            loads = re.findall(r"tt\.load .*tensor<128x!tt\.ptr<i32>", compiled.asm["ttgir"])
            words[name, is_sorted] = len(loads)
            assert resources(compiled, HOPPER)["spilled"] <= SPILLED[name][HOPPER]
    assert words == {
        ("gather", False): 2,  # source and row
        ("gather", True): 1,
        ("scatter", False): 2,  # row, and where its weight is
        ("scatter", True): 1,
    }


def test_sorted_rows_that_tma_can_address_are_loaded_by_it():
    for config in (SCATTER_CANDIDATES[index] for index in (2, 5, 10)):
        used = resources(compile_candidate("scatter", config, HOPPER, is_sorted=True, by_tma=True), HOPPER)
        assert used["registers"] <= REGISTERS[HOPPER], config
        assert used["spilled"] == 0, config
        assert used["shared_bytes"] <= SHARED_BYTES[HOPPER], config
    for config, by_tma in ((SCATTER_CANDIDATES[0], True), (SCATTER_CANDIDATES[11], False)):
        ptx = compile_candidate("scatter", config, HOPPER, is_sorted=True, by_tma=True).asm["ptx"]
        assert ("cp.async.bulk.tensor.2d" in ptx, "cp.async.c" in ptx) == (by_tma, not by_tma)


@pytest.mark.parametrize("config", [GATHER_CANDIDATES[0], GATHER_CANDIDATES[11]], ids=["TMA", "pointers"])
def test_rows_are_loaded_behind_the_wait_for_their_chunk(config):
    order = order_of(compile_candidate("gather", config, HOPPER))
    assert order == ["wait for peer", "copy of A", "multiply", "copy of A", "store", "wait for peer"]


@pytest.mark.parametrize(
    "config", [SCATTER_CANDIDATES[0], SCATTER_CANDIDATES[7]], ids=["halves", "whole tiles"]
)
def test_products_are_counted_behind_their_stores_and_combined_behind_the_counts(config):
    order = order_of(compile_candidate("scatter", config, HOPPER))
    assert order == [
        *("barrier", "signal"),  # of chunks without tokens
        *("copy of A", "multiply", "copy of A", "load", "store", "barrier", "count tile"),
        *("wait for tiles", "wait for peer", "load", "store", "barrier", "count block", "barrier", "signal"),
        "wait for peer",
    ]


def test_rows_of_a_are_copied_16_bytes_at_a_time_and_those_of_the_weight_by_tma():
    ptx = compile_candidate("gather", GATHER_CANDIDATES[0], HOPPER).asm["ptx"]
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*, (0x\w+)", ptx)) == {"0x10"}
    assert "cp.async.bulk.tensor.2d" in ptx
    assert "wgmma.mma_async" in ptx
    assert not re.search(r"atom\.global\.sys\.\S*add", ptx)  # a poll is a load


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_sorting_compiles_for_every_target(target):
    common = dict.fromkeys(("counts_ptr", "starts_ptr", "offsets_ptr", "within_ptr"), "*i32")
    numbers = ("pairs", "experts", "topk", "stride", "tokens", "told", "rank", "first", "patience_ticks")
    types = {"ids_ptr": "*i64", "flags_ptr": "*i32", "errors_ptr": "*i64", **common}
    types |= dict.fromkeys(numbers, "i32")
    counting = compile_for(
        target,
        count_choices,
        types,
        {"WORLD": 8, "STAGES": 8, "BLOCK": 1024, "SHARED": True},
        any_value=numbers,
        num_warps=8,
    )
    assert resources(counting, target)["spilled"] <= 8  # bytes; it runs once in a call
    for experts, by_first in ((64, False), (512, True))[: 2 if target is HOPPER else 1]:
        names = ("rows_ptr", "sources_ptr", "groups_ptr", "ends_ptr", "tables_ptr")
        types = {"ids_ptr": "*i64", **common, **dict.fromkeys(names, "*i32")}
        numbers = ("experts", "stride", "first", "capacity")
        types |= dict.fromkeys(numbers, "i32")
        constexprs = {"ORDERS": 2 - by_first, "HEIGHTS": 4, "BY_FIRST": by_first, "WORLD": 8, "BLOCK": 1024}
        constexprs |= {"STAGES": 8, "EXPERTS": experts, "SEARCH_BITS": search_bits(8, experts)}
        placing = compile_for(target, place_choices, types, constexprs, any_value=numbers, num_warps=8)
        assert resources(placing, target)["spilled"] <= 8
        del constexprs["ORDERS"], constexprs["BY_FIRST"], constexprs["STAGES"], types["within_ptr"]
        types |= {"weights_ptr": "*fp32", "sorted_weights_ptr": "*fp32"}
        sorting = compile_for(target, sort_choices, types, constexprs, any_value=numbers, num_warps=8)
        assert resources(sorting, target)["spilled"] <= 8
