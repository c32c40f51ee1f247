"""That a wait polls for long before it reads the clock, and signals are ordered as the proofs ask."""

import re

import pytest
import triton
from compiled import BLACKWELL, HOPPER, compile_for, early_load, events, order_of, resources
from plain_kernels import COMBINE, DISPATCH, EACH, GATHER, ON_EACH, SCATTER

from dist_autotune.kernels.moe.plan import search_bits
from dist_autotune.kernels.moe.routing import count_choices, place_choices
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


@EACH
def test_one_thread_reads_a_flag_for_all(kernel):
    """Another program may give the peer up between the loads of two threads: one would wait, the other not.

    AFTER, which is read past the caches, decides nothing but whether sums are NaN.
    """
    flags, loads = {"%flags_ptr"}, []
    for line in kernel.compile(kernel.candidates[0]).asm["ttir"].splitlines():
        match = re.match(r"\s*(%\w+) = ([\w.]+) (%\w+)", line)
        if match is None:
            continue
        name, operation, operand = match.groups()  # a name may stand for another value in another region
        is_flag = operation == "tt.addptr" and operand in flags
        flags = flags | {name} if is_flag else flags - {name}
        loads += [line] if operation == "tt.load" and operand in flags else []
    of_after = [line for line in loads if "isVolatile" in line]
    assert len(of_after) == (8 if kernel in (SCATTER, COMBINE) else 0)
    assert loads == of_after


# ---- GemmReduceScatter

OF_TILES = {  # what the signals must be ordered against, and the signals
    "multiply": r"warp_group_dot ",
    "poll": r"atomic_rmw add, acquire, sys",
    "load": r"tt\.load .*tensor<",
    "store": r"tt\.store .*tensor<",
    "barrier": r"gpu\.barrier|ttg\.barrier",
    "count": r"atomic_rmw add, acq_rel, gpu",
    "signal": r"atomic_rmw exch, release, sys, .*%c1_i32",
}


@pytest.mark.parametrize(
    "config", SCATTER.candidates[:1] + SCATTER.candidates[6:7], ids=["halves", "whole tiles"]
)
def test_sums_are_loaded_behind_the_poll_and_handed_over_behind_the_stores(config):
    compiled = SCATTER.compile(config)
    ttgir = compiled.asm["ttgir"]
    order = order_of(ttgir[ttgir.index("scf.while") :], OF_TILES)
    halves = 2 if config.kwargs["EPILOGUE_SUBTILE"] else 1
    polls = ["poll"] * 2  # one in front of its loop, one in it
    # For the first row; ROWS_SENT; for the rows of the tile.
    own_rows = [*polls, "poll", *polls, *["load", "store"] * halves]
    handed_over = [*["store"] * halves, "barrier", "count", "barrier", "signal"]
    assert order[: order.index("signal") + 1] == ["multiply", *own_rows, *handed_over]
    # Of a TMA store the program does not know when it is done.
    assert "async_tma_copy_local_to_global" not in ttgir


def test_signals_have_the_scope_of_those_who_read_them():
    ptx = SCATTER.compile(SCATTER.candidates[0]).asm["ptx"]
    assert "ld.global.sys.acquire" in ptx
    assert "atom.global.gpu.acq_rel.add" in ptx
    assert "atom.global.sys.release.exch" in ptx
    assert not re.search(r"atom\.global\.sys\.\S*add", ptx)  # a poll is a load


# ---- over experts

OF_EXPERTS = {
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


def order_over_experts(compiled):
    """Return the order of these, repetitions left out."""
    found = order_of(compiled.asm["ttgir"], OF_EXPERTS)
    return [name for name, before in zip(found, ["", *found], strict=False) if name != before]


@pytest.mark.parametrize("config", [DISPATCH.candidates[0], DISPATCH.candidates[11]], ids=["TMA", "pointers"])
def test_rows_are_loaded_behind_the_wait_for_their_chunk(config):
    order = order_over_experts(DISPATCH.compile(config))
    assert order == ["wait for peer", "copy of A", "multiply", "copy of A", "store", "wait for peer"]


@pytest.mark.parametrize(
    "config", [COMBINE.candidates[0], COMBINE.candidates[7]], ids=["halves", "whole tiles"]
)
def test_products_are_counted_behind_their_stores_and_combined_behind_the_counts(config):
    order = order_over_experts(COMBINE.compile(config))
    assert order == [
        *("barrier", "signal"),  # of chunks without tokens
        *("copy of A", "multiply", "copy of A", "load", "store", "barrier", "count tile"),
        *("wait for tiles", "wait for peer", "load", "store", "barrier", "count block", "barrier", "signal"),
        "wait for peer",
    ]


@ON_EACH
def test_the_sorting_compiles_for_every_target(target):
    words = ("counts_ptr", "starts_ptr", "offsets_ptr", "chosen_ptr", "within_ptr")
    common = dict.fromkeys(words, "*i32")
    numbers = ("pairs", "experts", "topk", "stride", "tokens", "told", "rank", "first", "patience_ticks")
    types = {"ids_ptr": "*i64", "flags_ptr": "*i32", "errors_ptr": "*i64", **common}
    types |= dict.fromkeys(numbers, "i32")
    for shared in (False, True):
        constexprs = {"WORLD": 8, "STAGES": 8, "PARTS": 8 if shared else 1, "BLOCK": 1024, "SHARED": shared}
        counting = compile_for(target, count_choices, types, constexprs, any_value=numbers, num_warps=8)
        assert resources(counting, target)["spilled"] <= 8  # bytes; it runs once in a call
    names = ("rows_ptr", "sources_ptr", "groups_ptr", "ends_ptr", "tables_ptr")
    types = {**common, **dict.fromkeys(names, "*i32"), "weights_ptr": "*fp32", "sorted_weights_ptr": "*fp32"}
    numbers = ("experts", "stride", "first", "capacity")
    types |= dict.fromkeys(numbers, "i32")
    for experts, orders in ((64, 2), (64, 3), (512, 1))[: 3 if target is HOPPER else 2]:
        shared = orders == 3
        constexprs = {"ORDERS": orders, "HEIGHTS": 4, "BY_FIRST": orders == 1, "WORLD": 8, "BLOCK": 1024}
        constexprs |= {"STAGES": 8, "PARTS": 8 if shared else 1, "SHARED": shared}
        constexprs |= {"EXPERTS": experts, "SEARCH_BITS": search_bits(8, experts)}
        placing = compile_for(target, place_choices, types, constexprs, any_value=numbers, num_warps=8)
        assert resources(placing, target)["spilled"] <= 8


# ---- AllGatherGemm polls and fences in front of its loads, whatever the pipeliner does

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


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
def test_a_poll_is_a_load_and_the_proxy_fence_stands_between_it_and_tma(target):
    compiled = GATHER.compile(CANDIDATES[0], target)
    assert "ld.global.sys.acquire" in compiled.asm["ptx"]
    assert not re.search(r"atom\.\S*add", compiled.asm["ptx"])
    # Not in PTX, whose blocks do not stand in program order.
    names = [name for _, name in events(compiled.asm["ttgir"])]
    first_load = names.index("load")
    assert [name for name in names[:first_load] if name != "loop"][:3] == ["poll", "poll", "fence"]
