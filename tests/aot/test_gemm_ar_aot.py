"""That kernels which send rows as words, of GemmAllReduce and by mail, compile, fit, and order them."""

import re

import pytest
import torch
from compiled import BLACKWELL, CDNA3, HOPPER, SHARED_BYTES, check_fits, compile_for, order_of

from dist_autotune.kernels import configs
from dist_autotune.kernels.ag_gemm import by_mail
from dist_autotune.kernels.gemm_ar import low_latency, pull, rows, sending

TYPES = {
    **dict.fromkeys(("table_ptr", "words_table_ptr", "words_ptr", "ticket_ptr", "errors_ptr"), "*i64"),
    **dict.fromkeys(("mail_ptr",), "*i64"),
    **dict.fromkeys(("part_ptr", "lost_ptr"), "*i32"),
    **dict.fromkeys(("residual_ptr", "weight_ptr", "out_ptr", "sum_ptr"), "*bf16"),
    **dict.fromkeys(("first", "rows", "m", "chunk", "capacity", "size_class", "N"), "i32"),
    **dict.fromkeys(("stride_residual", "stride_out", "rank", "patience_ticks"), "i32"),
    "eps": "fp32",
}
ANY_VALUE = ("first", "rows", "m", "chunk", "capacity", "size_class", "rank", "patience_ticks", "eps")
TARGETS = {"hopper": HOPPER, "blackwell": BLACKWELL, "cdna3": CDNA3}
COLUMNS = 8192


SUMS = {"HAS_RESIDUAL": False, "NORM": False, "ROW": 1}
NORMS = {"HAS_RESIDUAL": True, "NORM": True}


def compile_candidate(config, target=HOPPER, world=8, kernel=pull.add_rows, **values):
    of_end = SUMS if config.kwargs["BLOCK_N"] else {**NORMS, "ROW": COLUMNS}
    of_kernel = {"OWNER": False} if kernel is pull.add_rows else {"PACK": 2, "SENT": False}
    names = kernel.fn.arg_names
    return compile_for(
        target,
        kernel.fn,
        {name: kind for name, kind in TYPES.items() if name in names},
        {"WORLD": world, **of_kernel, **of_end, **values, **config.kwargs},
        any_value=ANY_VALUE,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def usable(candidates, columns, *, norm):
    found = rows.prune(candidates, {"N": columns}, NORM=norm)
    return [config for config in found if config.kwargs["PER_SM"] == 1]  # it changes the grid alone


KERNELS = {"pull": (pull.add_rows, pull.CANDIDATES)}
KERNELS |= {"low latency": (low_latency.exchange_rows, low_latency.CANDIDATES)}
# Bytes of a thread, or on CDNA3 registers: ptxas stops at 64 registers, one or four short of what some need.
MOST_SPILLED = {pull.add_rows: 0, low_latency.exchange_rows: 16}
BY_KERNEL = pytest.mark.parametrize(("kernel", "candidates"), KERNELS.values(), ids=KERNELS)


@BY_KERNEL
@pytest.mark.parametrize(("target", "world"), [*zip(TARGETS.values(), (8, 2, 8), strict=True)], ids=TARGETS)
def test_candidates_fit_the_device(kernel, candidates, target, world):
    sums = usable(candidates, COLUMNS, norm=False)
    (norm,) = usable(candidates, COLUMNS, norm=True)
    assert len(sums) >= 4
    assert norm.num_warps == 32
    for config in (*sums, norm) if target is HOPPER else (sums[0], norm):
        compiled = compile_candidate(config, target, world, kernel=kernel)
        used = check_fits(compiled, target, config, spilled=MOST_SPILLED[kernel])
        assert used["registers"] * 32 * config.num_warps <= 65536 or target is CDNA3, config


@pytest.mark.parametrize("norm", [False, True], ids=["sum", "norm"])
def test_rows_are_read_behind_the_acquire_and_before_the_release(norm):
    (config, *_) = [each for each in pull.CANDIDATES if norm == (not each.kwargs["BLOCK_N"])]
    compiled = compile_candidate(config, world=2)
    patterns = {
        "ticket": r"atomic_rmw add, relaxed, gpu",
        "publish": r"atomic_rmw exch, release, sys",
        "poll": r"atomic_rmw add, acquire, sys",
        "load": r"tt\.load .*tensor<\d+x!tt\.ptr<bf16>",
        "barrier": r"gpu\.barrier|ttg\.barrier",
        "read": r"atomic_rmw add, release, sys",
    }
    order = order_of(compiled.asm["ttgir"], patterns)
    first_load, last_load = order.index("load"), len(order) - 1 - order[::-1].index("load")
    assert order[0] == "ticket"
    assert order.index("publish") < order.index("poll") < first_load
    assert order[last_load + 1 : last_load + 3] == ["barrier", "read"]
    assert "poll" in order[last_load + 3 :]


def test_words_have_the_scope_of_those_who_read_them_and_rows_are_loaded_by_sixteen_bytes():
    ptx = compile_candidate(pull.CANDIDATES[0], world=2).asm["ptx"]
    assert "ld.global.sys.acquire.b64" in ptx
    assert re.search(r"atom\.global\.sys\.release\.exch\.b64", ptx)
    assert re.search(r"(atom|red)\.global\.sys\.release\.add\.u64", ptx)
    assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", ptx)
    assert not re.search(r"ld\.global(\.\w+)*\.b16", ptx)


@pytest.mark.parametrize("norm", [False, True], ids=["sum", "norm"])
def test_stamped_words_are_moved_whole_and_past_the_nearest_cache(norm):
    (config, *_) = [each for each in low_latency.CANDIDATES if norm == (not each.kwargs["BLOCK_N"])]
    assert_moved_whole(compile_candidate(config, world=2, kernel=low_latency.exchange_rows).asm["ptx"])


def assert_moved_whole(ptx):
    assert re.search(r"st\.global\.v2\.b64", ptx)
    assert re.search(r"ld\.volatile\.global\.v2\.b64", ptx)
    assert not re.search(r"ld\.volatile\.global(?:\.v\d)?\.b(?:8|16|32)", ptx)


OF_PRODUCTS = {
    **dict.fromkeys(("table_ptr", "ticket_ptr"), "*i64"),
    **dict.fromkeys(("a_ptr", "weight_ptr"), "*bf16"),
    **dict.fromkeys(("rows", "capacity", "size_class", "N", "K", "stride_a", "stride_weight", "rank"), "i32"),
    "sums_ptr": "*fp32",
    "arrived_ptr": "*i32",
}


def compile_product(config):
    return compile_for(
        HOPPER,
        sending.multiply_and_send.fn,
        OF_PRODUCTS,
        {"WORLD": 8, "STEP_K": sending.LARGEST_STEP, **config.kwargs},
        any_value=("rows", "capacity", "size_class", "rank"),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@pytest.mark.parametrize("size_class", [16, 32, 48])
def test_a_product_of_few_rows_keeps_tiles_of_all_its_stages_in_flight(size_class, monkeypatch):
    monkeypatch.setattr(configs, "shared_memory_bytes", lambda: SHARED_BYTES[HOPPER])
    given = {"size_class": size_class, "a_ptr": torch.empty(1, dtype=torch.bfloat16)}
    candidates = sending.prune(sending.CANDIDATES, given)
    assert len(candidates) >= 4
    for config in candidates:
        compiled = compile_product(config)
        check_fits(compiled, HOPPER, config)
        ptx = compiled.asm["ptx"]
        assert "wgmma.mma_async" in ptx
        assert set(re.findall(r"cp\.async\.cg\S* \[[^]]*\], \[[^]]*\], (\S+),", ptx)) == {"0x10"}
        assert f"cp.async.wait_group \t{2 * (config.num_stages - 2)};" in ptx  # of two operands
        assert re.search(r"st\.global\.v2\.b64", ptx)


@pytest.mark.parametrize("norm", [False, True], ids=["sum", "norm"])
def test_what_was_sent_is_counted_behind_the_kernel_that_sent_it(norm):
    (config, *_) = usable(low_latency.CANDIDATES, COLUMNS, norm=norm)
    for sent in (False, True):
        compiled = compile_candidate(config, world=2, kernel=low_latency.exchange_rows, SENT=sent)
        check_fits(compiled, HOPPER, config)
        wait = r"griddepcontrol\.wait|grid_dependency_wait"
        patterns = {"count": r"atomic_rmw add, relaxed, gpu", "wait": wait}
        order = order_of(compiled.asm["ttgir"], patterns)
        assert order == (["count", "wait", "count"] if sent else ["count"] * 3)
    assert compile_product(sending.CANDIDATES[0]).asm["ptx"].count("griddepcontrol.launch_dependents") == 1


# ---- AllGatherGemm of few rows, by mail

OF_MAIL = {
    **dict.fromkeys(("table_ptr", "mail_ptr", "ticket_ptr", "errors_ptr"), "*i64"),
    **dict.fromkeys(("lost_ptr", "shard_ptr", "gathered_ptr"), "*i32"),
    **dict.fromkeys(
        ("rows", "capacity", "size_class", "length", "rank", "lost_word", "patience_ticks"), "i32"
    ),
}


def compile_mail(config, target=HOPPER, world=8):
    any_value = tuple(name for name, kind in OF_MAIL.items() if kind == "i32" and name != "length")
    constants = {"WORLD": world, **config.kwargs}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_for(target, by_mail.exchange_shards.fn, OF_MAIL, constants, any_value=any_value, **options)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_candidates_that_gather_by_mail_fit_the_device(target):
    for config in by_mail.GPU_CANDIDATES if target is HOPPER else by_mail.GPU_CANDIDATES[:1]:
        spilled = MOST_SPILLED[low_latency.exchange_rows]
        check_fits(compile_mail(config, target), target, config, spilled=spilled)


def test_words_of_mail_are_moved_whole_and_rows_are_sent_before_any_is_waited_for():
    compiled = compile_mail(by_mail.GPU_CANDIDATES[0], world=2)
    assert_moved_whole(compiled.asm["ptx"])
    patterns = {"ticket": r"atomic_rmw add, relaxed, gpu", "lost": r"atomic_rmw or, relaxed, gpu"}
    order = order_of(compiled.asm["ttgir"], patterns)
    assert (order[:2], order[-1]) == (["ticket"] * 2, "ticket")
    assert set(order[2:-1]) == {"lost"}
