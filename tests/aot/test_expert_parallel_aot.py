"""That the kernels of ExpertParallel compile, spill nothing, and count behind their stores."""

import re

import pytest
from compiled import CDNA3, HOPPER, check_fits, compile_for, order_of

from dist_autotune.kernels.ep import combine_kernels, dispatch_kernels, product_kernel, sorting_kernels

HALVES = (
    *("x_ptr", "rows_ptr", "tokens_ptr", "choices_ptr", "grad_ptr", "out_ptr"),
    *("a_ptr", "b_ptr", "c_ptr"),
)
OTHERS = {
    **dict.fromkeys(("given_ids_ptr", "tables_ptr", "errors_ptr"), "*i64"),
    **dict.fromkeys(("given_weights_ptr", "weights_ptr", "dots_ptr"), "*fp32"),
    **dict.fromkeys(("ids_ptr", "counts_ptr", "flags_ptr", "state_ptr", "found_ptr"), "*i32"),
    **dict.fromkeys(("sources_ptr", "places_ptr", "offsets_ptr"), "*i32"),
}
NUMBERS = ("size_class", "T", "most_tokens", "experts", "rank", "length", "capacity", "patience_ticks")
STRIDES = (
    *("stride_x", "stride_rows", "stride_out", "stride_grad", "stride_am", "stride_be", "stride_b"),
    *("N", "K"),
)
OF_ROW = {"H": 7168, "K": 8, "WORLD": 4, "BLOCK": 4096}
WIDE = {"BLOCK": 8192}
PLACED = {"KEYS": 16, "POSITIONS": 512}
OF_POSITIONS = {"K": 8, "WORLD": 4, "RANKS": 4, "FP8": False, "BLOCK": 1024}
OF_SENDING = {**OF_ROW, "RANKS": 4, "WEIGHTED": True, "TO_ALL": True, "FP8": False, "CHOICES": 8}
SPILLED = {("dispatch at once", "hip"): 64}  # scalar registers, in lanes of a vector one
IN_FP8 = {"WEIGHTED": False, "TO_ALL": True}
OF_COMBINE = {**OF_ROW, "ALL_RETURNED": False, "PART": 4096, "SIDE_BY_SIDE": 4}
FORMS_OF_KERNELS = {
    "send_tokens": (
        dispatch_kernels.send_tokens,
        {**OF_SENDING, "AT_ONCE": False, "GATHERS": False, **PLACED},
    ),
    "dispatch at once": (
        dispatch_kernels.send_tokens,
        {**OF_SENDING, "WEIGHTED": False, "AT_ONCE": True, "GATHERS": True, **PLACED, **WIDE},
    ),
    "gather_rows": (dispatch_kernels.gather_rows, {**OF_ROW, "FP8": False}),
    "return_rows": (combine_kernels.combine_rows, {**OF_COMBINE, "RETURNS": True, "SUMS": False}),
    "sum_rows": (combine_kernels.combine_rows, {**OF_COMBINE, "RETURNS": False, "SUMS": True}),
    "combine at once": (
        combine_kernels.combine_rows,
        {**OF_COMBINE, "RETURNS": True, "SUMS": True, "PART": 2048, **WIDE},
    ),
    "grade_rows": (combine_kernels.grade_rows, OF_ROW),
    "collect_dots": (combine_kernels.collect_dots, {"K": 8, "WORLD": 4, "BLOCK": 1024}),
    "count_choices": (sorting_kernels.count_choices, OF_POSITIONS),
    "place_choices": (sorting_kernels.place_choices, {**OF_POSITIONS, "SEGMENTS": 16, "EXPERTS": 64}),
}
KERNELS = {name: kernel for name, (kernel, _) in FORMS_OF_KERNELS.items()}
OF_PRODUCT = {"TOPK": 8, "WORLD": 4, "EXPERTS": 64, "TMA_LEGAL": True, "BY_COLUMNS": False, "UPCAST": False}
FORMS = {
    "from slots": {"FROM_SLOTS": True, "TO_PEERS": False},
    "to peers": {"FROM_SLOTS": False, "TO_PEERS": True},
}


SIGNALS = {
    "barrier": r"gpu\.barrier|ttg\.barrier",
    "count": r"atomic_rmw add, acq_rel, gpu",
    "raise": r"atomic_cas release, sys",
}


def compiled(name, target=HOPPER, config=None, form=None, **more):
    kernel = KERNELS[name] if form is None else product_kernel.multiply_rows
    function = getattr(kernel, "fn", kernel) if hasattr(kernel, "configs") else kernel
    constants = dict(FORMS_OF_KERNELS[name][1]) if form is None else OF_PRODUCT | FORMS[form]
    constants |= more
    if config is not None:
        constants |= config.kwargs
    types = {**dict.fromkeys(HALVES, "*bf16"), **OTHERS, **dict.fromkeys((*NUMBERS, *STRIDES), "i32")}
    if name == "collect_dots":
        types["out_ptr"] = "*fp32"
    arguments = {each: types[each] for each in function.arg_names if each in types and each not in constants}
    return compile_for(
        target,
        function,
        arguments,
        constants,
        any_value=[each for each in NUMBERS if each in arguments],
        num_warps=4 if config is None else config.num_warps,
        num_stages=1 if config is None else config.num_stages,
    )


@pytest.mark.parametrize("name", ["send_tokens", "gather_rows", "dispatch at once"])
def test_rows_in_fp8_are_copied_at_least_4_bytes_at_a_time(name):
    for config in KERNELS[name].configs:
        found = compiled(name, config=config, FP8=True, **({} if name == "gather_rows" else IN_FP8))
        check_fits(found, HOPPER, config)
        ptx = found.asm["ptx"]
        if name != "gather_rows":
            assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
            assert re.search(r"st\.global(\.\w+)*\.(v2|v4)?\.?b32", ptx)
        if name != "send_tokens":
            assert "cvt.rn.f16x2.e4m3x2" in ptx
            assert re.search(r"ld\.global(\.\w+)*\.(v2|v4)?\.?b32", ptx)


@pytest.mark.parametrize("form", FORMS)
def test_products_fit_and_their_rows_are_stored_16_bytes_at_a_time_before_the_flags_rise(form):
    for config in product_kernel.CANDIDATES:
        found = compiled("multiply_rows", config=config, form=form)
        check_fits(found, HOPPER, config)
    (first, *_) = product_kernel.CANDIDATES
    found = compiled("multiply_rows", config=first, form=form)
    ptx = found.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert re.search(r"st\.global(\.\w+)*\.v4\.b32", ptx)
    order = order_of(found.asm["ttgir"], {**SIGNALS, "store": r"tt\.store .*tensor<\d+x\d+x!tt\.ptr<bf16>"})
    behind = order[len(order) - order[::-1].index("store") :]
    assert behind == ["barrier", "count", *(["barrier", "raise"] if form == "to peers" else [])]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", [HOPPER, CDNA3], ids=["hopper", "cdna3"])
def test_kernels_compile_and_spill_nothing(name, target):
    kernel = KERNELS[name]
    spilled = SPILLED.get((name, target.backend), 0)
    for config in getattr(kernel, "configs", [None]):
        check_fits(compiled(name, target, config), target, (name, config), spilled=spilled)
        if target is not HOPPER:
            return


@pytest.mark.parametrize("name", ["dispatch at once", "combine at once"])
def test_in_one_launch_programs_send_all_that_they_claim_before_they_wait(name):
    (config, *_) = KERNELS[name].configs
    patterns = {
        "claim": r"atomic_rmw add, relaxed, gpu",
        "rows": r"tt\.store .*tensor<\d+x!tt\.ptr<bf16>",
        **SIGNALS,
        "wait": r"atomic_rmw add, acquire, sys",
    }
    order = order_of(compiled(name, config=config).asm["ttgir"], patterns)
    sends = ["claim", "rows", "claim", "barrier", "count", "barrier", "raise"]
    assert order == [*sends, "wait", "wait", "rows", "barrier", "count"]


@pytest.mark.parametrize("name", ["send_tokens", "return_rows", "grade_rows"])
def test_programs_count_behind_their_stores_and_the_last_raises_the_flags(name):
    (config, *_) = KERNELS[name].configs
    found = compiled(name, config=config)
    order = order_of(found.asm["ttgir"], {**SIGNALS, "store": r"tt\.store .*tensor<\d+x!tt\.ptr<bf16>"})
    behind = order[len(order) - order[::-1].index("store") :]
    assert behind == ["barrier", "count", "barrier", "raise"]
    assert re.search(r"st\.global(\.\w+)*\.v4\.b32", found.asm["ptx"])
    assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", found.asm["ptx"])
