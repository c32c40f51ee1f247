"""The source of the Gluon body, run on the CPU: it ends, no buffer is overwritten too early, C is right."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import gluon_model
import pytest
from gluon_products import change, fails, multiply
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("one_core")  # its tasks are threads that take turns

PROBLEM = importlib.import_module("kernels_in_the_model.gemm.problem")
TMA_BEGINS_AT = PROBLEM.ALIGNED
SCHEDULES = ("contiguous", "strided", "grouped", "chiplet", "dynamic")


@pytest.fixture(scope="module", autouse=True)
def narrow_tiles() -> Iterator[None]:
    with gluon_model.tma_begins_anywhere():
        yield


HOPPER = ("pipelined", "persistent", "persistent_pipelined", "cooperative", "pingpong")
BLACKWELL = ("pipelined", "persistent", "persistent_pipelined", "cooperative")
KINDS = [*((name, False) for name in HOPPER), *((name, True) for name in BLACKWELL)]


@pytest.mark.parametrize(("variant", "tensor_memory"), KINDS)
@settings(max_examples=10)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 11)),
    programs=st.integers(1, 3),
    buffers=st.integers(2, 5),
    store=st.sampled_from([(4, 1), (4, 2), (8, 1), (2, 4)]),
    schedule=st.sampled_from(SCHEDULES),
    transposed=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 10**6),
)
def test_every_variant_ends_with_the_right_product(
    variant, tensor_memory, sizes, programs, buffers, store, schedule, transposed, seed
):
    multiply(
        variant,
        *sizes,
        programs=programs,
        buffers=buffers,
        store=store,
        schedule=schedule,
        transposed=transposed,
        tensor_memory=tensor_memory,
        seed=seed,
    )


@pytest.mark.parametrize("tensor_memory", [False, True], ids=["hopper", "blackwell"])
@settings(max_examples=15)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 13)),
    programs=st.integers(1, 3),
    buffers=st.integers(2, 5),
    store_n=st.sampled_from([4, 8]),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 10**6),
)
def test_an_epilogue_that_steals_operand_buffers_harms_no_load(
    tensor_memory, sizes, programs, buffers, store_n, schedule, seed
):
    multiply(
        "persistent_pipelined",
        *sizes,
        programs=programs,
        blocks=(2, 8, 2),
        buffers=buffers,
        store=(store_n, 0),
        schedule=schedule,
        tensor_memory=tensor_memory,
        seed=seed,
    )


@pytest.mark.parametrize("variant", ["cooperative", "pingpong", "persistent_pipelined", "pipelined"])
@settings(max_examples=10)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 50), st.integers(1, 9)),
    programs=st.integers(1, 3),
    store_buffers=st.sampled_from([1, 3]),
    transposed=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_tile_of_two_widths_is_one_tile(variant, sizes, programs, store_buffers, transposed, seed):
    store, transposed = (4, store_buffers), (False, transposed)
    multiply(variant, *sizes, programs=programs, extra_n=4, store=store, transposed=transposed, seed=seed)


JOINED = {"transposed": (False, True), "store": (32, 2), "joined": True}
WIDTHS = [(64, 0), (64, 8), (128, 24), (128, 16), (32, 8)]


@pytest.mark.parametrize("variant", HOPPER)
@settings(max_examples=12)
@given(
    sizes=st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 500)),
    widths=st.sampled_from(WIDTHS),
    rows_warps=st.sampled_from([(64, 4), (128, 4), (128, 8), (256, 8)]),
    programs=st.integers(1, 3),
    buffers=st.integers(2, 4),
    store=st.sampled_from([(8, 1), (16, 3), (32, 1), (32, 2)]),
    swap_ab=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_a_tile_of_any_width_is_one_product(
    variant, sizes, widths, rows_warps, programs, buffers, store, swap_ab, seed
):
    (block_n, extra_n), (block_m, warps) = widths, rows_warps
    multiply(
        variant,
        *sizes,
        programs=programs,
        blocks=(block_m, block_n, 64),
        extra_n=extra_n,
        buffers=buffers,
        swap_ab=swap_ab,
        warps=warps,
        seed=seed,
        **JOINED | {"store": store},
    )


CUT_KINDS = [("cooperative", False), ("pingpong", False), ("cooperative", True)]


@pytest.mark.parametrize(("variant", "tensor_memory"), KINDS)
@settings(max_examples=7)
@given(
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 12), st.integers(1, 11)),
    programs=st.integers(1, 3),
    extra_n=st.sampled_from([0, 4]),
    trans_a=st.booleans(),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 10**6),
)
def test_rows_that_a_small_matrix_has_not_need_not_be_loaded(
    variant, tensor_memory, sizes, programs, extra_n, trans_a, schedule, seed
):
    (m, n, k), (block_m, block_n) = sizes, (8, 8)
    extra_n = 0 if tensor_memory else extra_n
    multiply(
        variant,
        m,
        n,
        k,
        blocks=(block_m, block_n, 2),
        loaded=(m, min(n, block_n), max(min(n - block_n, extra_n), 1) if extra_n else min(n, block_n)),
        programs=programs,
        extra_n=extra_n,
        transposed=(trans_a, True),
        schedule=schedule,
        tensor_memory=tensor_memory,
        seed=seed,
    )


@pytest.mark.parametrize("variant", ["pipelined", "persistent", "persistent_pipelined", "cooperative"])
@settings(max_examples=7)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 23)),
    programs=st.integers(1, 5),
    buffers=st.integers(2, 4),
    transposed=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 10**6),
)
def test_rows_that_pass_through_registers(variant, sizes, programs, buffers, transposed, seed):
    multiply(
        variant,
        *sizes,
        programs=programs,
        buffers=buffers,
        transposed=transposed,
        extra_n=4,
        stream_k=2 if variant == "cooperative" else 0,
        warps=8,
        seed=seed,
    )


@pytest.mark.parametrize(
    ("size", "inside_rows", "expected"),
    [(336, True, 80), (333, True, 333), (333, False, 77), (256, True, 0), (16, True, 0), (15, True, 15)],
)
def test_a_tile_is_moved_only_to_where_tma_can_begin(size, inside_rows, expected, monkeypatch):
    monkeypatch.setattr(PROBLEM, "ALIGNED", TMA_BEGINS_AT)
    assert PROBLEM.last_start(size, 256, inside_rows) == expected


STREAM_K = {
    "ragged everywhere": {"m": 11, "n": 30, "k": 9, "programs": 5},
    "one tile in the last wave": {"m": 20, "n": 8, "k": 16, "programs": 4},
    "one tile for all": {"m": 3, "n": 5, "k": 23, "programs": 6},
    "more programs than k blocks": {"m": 4, "n": 8, "k": 6, "programs": 7},
    "a tile more than half of the programs": {"m": 12, "n": 8, "k": 20, "programs": 5},
    "no last wave": {"m": 16, "n": 16, "k": 9, "programs": 4},
    "one program": {"m": 9, "n": 17, "k": 7, "programs": 1},
    "one k block": {"m": 12, "n": 8, "k": 2, "programs": 4},
    "no k block": {"m": 12, "n": 8, "k": 0, "programs": 4},
}


@pytest.mark.parametrize(("variant", "tensor_memory"), CUT_KINDS)
@pytest.mark.parametrize("stream_k", [1, 3])
@pytest.mark.parametrize("case", STREAM_K)
def test_a_last_wave_in_parts_adds_up(case, stream_k, variant, tensor_memory):
    for seed in range(3):
        multiply(variant, **STREAM_K[case], stream_k=stream_k, tensor_memory=tensor_memory, seed=seed)


@pytest.mark.parametrize(("variant", "tensor_memory"), CUT_KINDS)
@settings(max_examples=12)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 33)),
    programs=st.integers(1, 7),
    stream_k=st.integers(1, 5),
    buffers=st.integers(2, 4),
    store=st.sampled_from([(4, 1), (4, 2), (8, 1)]),
    schedule=st.sampled_from(["grouped", "strided"]),
    seed=st.integers(0, 10**6),
)
def test_any_last_wave_in_parts_adds_up(
    variant, tensor_memory, sizes, programs, stream_k, buffers, store, schedule, seed
):
    multiply(
        variant,
        *sizes,
        programs=programs,
        buffers=buffers,
        store=store,
        schedule=schedule,
        tensor_memory=tensor_memory,
        stream_k=stream_k,
        seed=seed,
    )


@pytest.mark.parametrize("variant", ["cooperative", "pingpong"])
@settings(max_examples=10)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 50), st.integers(1, 23)), seed=st.integers(0, 10**6)
)
def test_a_tile_of_two_widths_is_cut_as_one(variant, sizes, seed):
    multiply(variant, *sizes, programs=5, extra_n=4, stream_k=2, seed=seed)


@pytest.mark.parametrize(("variant", "tensor_memory"), KINDS)
@pytest.mark.parametrize("schedule", ["grouped", "dynamic"])
def test_no_k_block_at_all_means_no_tile(variant, tensor_memory, schedule):
    multiply(variant, 9, 17, 0, schedule=schedule, tensor_memory=tensor_memory)


@pytest.mark.parametrize(("variant", "tensor_memory"), [kind for kind in KINDS if kind[0] != "pipelined"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_without_a_tile_end_as_well(variant, tensor_memory, schedule):
    multiply(variant, 4, 8, 5, programs=5, schedule=schedule, tensor_memory=tensor_memory)


# ---- that the model finds what it is there to find


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts something else into a module of the body."""
    return functools.partial(change, monkeypatch)


CUT = {"programs": 5, "stream_k": 1}  # two tiles of 12 are left for five programs
CUT_VARIANTS = pytest.mark.parametrize("variant", ["cooperative", "pingpong"])


@CUT_VARIANTS
def test_parts_that_share_a_slot_are_found(part, variant):
    part("body", "part_slot", lambda program, tile, k_blocks, share, programs: program)
    assert "not equal" in fails(variant=variant, **CUT).lower()


@CUT_VARIANTS
def test_a_segment_that_is_off_by_one_is_found(part, variant):
    module = importlib.import_module("kernels_in_the_model.gemm.body")
    segment_of = module.stream_k_segment

    def late(program, segment, tail, k_blocks, share):
        tile, first, blocks = segment_of(program, segment, tail, k_blocks, share)
        return tile, first + (segment == 1), blocks

    part("body", "stream_k_segment", late)
    assert "not equal" in fails(variant=variant, **CUT).lower()


@CUT_VARIANTS
def test_a_part_too_few_in_the_sum_is_found(part, variant):
    module = importlib.import_module("kernels_in_the_model.gemm.body")
    parts_of = module.stream_k_parts

    def fewer(tile, k_blocks, share):
        first, count = parts_of(tile, k_blocks, share)
        return first, count - 1

    part("body", "stream_k_parts", fewer)
    assert fails(variant=variant, **CUT)


@CUT_VARIANTS
def test_parts_that_are_counted_before_all_warps_have_written_them_are_found(part, variant):
    part("body", "partition_barrier", lambda: None)
    assert "before it is known to be there" in fails(variant=variant, **CUT)


@CUT_VARIANTS
@pytest.mark.parametrize("order", ["relaxed", "acquire", "release"])
def test_a_count_that_orders_nothing_is_found(part, order, variant):
    module = importlib.import_module("kernels_in_the_model.gemm.body")
    names = {name: getattr(module.gl, name) for name in dir(module.gl)}
    count = module.gl.atomic_add
    names["atomic_add"] = lambda pointer, value, *, sem, scope: count(pointer, value, sem=order, scope=scope)
    part("body", "gl", type("gl", (), {name: staticmethod(value) for name, value in names.items()}))
    assert "before it is known to be there" in fails(variant=variant, **CUT)


@CUT_VARIANTS
def test_a_count_that_is_not_put_back_is_found(part, variant):
    part("body", "StreamK.was_last", lambda self, tile: count_only(self, tile))
    module = importlib.import_module("kernels_in_the_model.gemm.body")

    def count_only(self, tile):
        _first, count = module.stream_k_parts(tile, self.k_blocks, self.share)
        module.partition_barrier()
        arrivals = self.arrivals_ptr + tile
        return module.gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == count - 1

    assert fails(variant=variant, **CUT)


def test_a_consumer_that_miscounts_the_steps_of_the_other_is_found(part):
    language = vars(importlib.import_module("kernels_in_the_model.gemm.roles").gl)
    # The number of the tile behind this one is taken for its own.
    part("roles", "gl", types.SimpleNamespace(**{**language, "num_programs": lambda axis: 0}))
    assert fails(variant="pingpong", **CUT)


VARIANTS = pytest.mark.parametrize("variant", ["persistent_pipelined", "cooperative", "pingpong"])


@VARIANTS
def test_a_slot_given_back_under_its_product_is_found(part, variant):
    def release_at_once(self, operands, step, k):
        main = sys_multiply(operands.a(step), operands.b(step), self.main, is_async=True)
        arrive(operands.empty_bar(step))
        return accumulator(main, main, self.BLOCK_N, self.EXTRA_N, False)

    module = importlib.import_module("kernels_in_the_model.gemm.mma")
    sys_multiply, accumulator = module.warpgroup_mma, module.WgmmaAccumulator
    arrive = module.mbarrier.arrive

    def end(self, operands, step):
        module.warpgroup_mma_wait(num_outstanding=0, deps=(self.main,))
        return self

    part("mma", "WgmmaAccumulator.multiply", release_at_once)
    part("mma", "WgmmaAccumulator.end", end)
    assert "not equal" in fails(variant=variant).lower()


@VARIANTS
def test_a_slot_that_is_never_given_back_is_a_deadlock(part, variant):
    part("mma", "WgmmaAccumulator.end", lambda self, operands, step: wait_only(self))
    module = importlib.import_module("kernels_in_the_model.gemm.mma")

    def wait_only(self):
        module.warpgroup_mma_wait(num_outstanding=0, deps=(self.main,))
        return self

    assert fails(variant=variant) == "deadlock"


@VARIANTS
def test_a_wrong_parity_is_found(part, variant):
    part("operands", "ring_phase", lambda step, size: 0)
    assert fails(variant=variant)


@VARIANTS
def test_an_epilogue_that_does_not_wait_for_its_stores_is_found(part, variant):
    module = importlib.import_module("kernels_in_the_model.gemm.epilogue")
    waits_at_the_end_only = type("tma", (), {"store_wait": staticmethod(lambda pendings: None)})
    finish = module.tma.store_wait
    part("epilogue", "tma", waits_at_the_end_only)
    part("epilogue", "OwnBuffers.finish", lambda self: finish(0))
    assert "not equal" in fails(variant=variant).lower()


def test_a_kernel_that_ends_under_its_stores_is_found(part):
    part("epilogue", "OwnBuffers.finish", lambda self: None)
    assert "ends with stores in flight" in fails(variant="cooperative")


def test_a_missing_proxy_fence_is_found(part):
    part("epilogue", "fence_async_shared", lambda: None)
    assert "proxy fence" in fails(variant="cooperative")


def test_rows_that_are_read_and_not_fenced_are_found(part):
    part("mma", "fence_async_shared", lambda: None)
    assert "a load needs a proxy fence first" in fails(variant="cooperative", extra_n=4, warps=8)


def test_a_half_that_is_given_back_before_its_products_is_found(part):
    module = importlib.import_module("kernels_in_the_model.gemm.mma")
    wait = module.warpgroup_mma_wait
    part("mma", "warpgroup_mma_wait", lambda num_outstanding, deps: wait(num_outstanding * 2, deps))
    assert "not equal" in fails(variant="cooperative", extra_n=4, warps=8, buffers=2).lower()


WIDE_TILE = {"variant": "cooperative", "m": 150, "n": 130, "k": 500, "buffers": 2} | JOINED
WIDE_TILE |= {"blocks": (128, 64, 64), "extra_n": 16, "warps": 8}


def changed_products(part: Any, change_text: Callable[[str], str]) -> None:
    module = importlib.import_module("kernels_in_the_model.gemm.any_width")
    products = module._products
    part("any_width", "_products", lambda *args: change_text(products(*args)))


def test_ptx_that_waits_for_too_few_products_is_found(part):
    changed_products(
        part, lambda text: text.replace("wait_group.sync.aligned 1", "wait_group.sync.aligned 2")
    )
    assert "not equal" in fails(**WIDE_TILE).lower()


def test_sums_of_any_width_that_nobody_waits_for_are_found(part):
    def end(self, operands, step):
        operands.give_back(step + operands.NUM_BUFFERS - 1)
        return self

    part("any_width", "AnyWidthAccumulator.end", end)
    assert "while products are in flight" in fails(**WIDE_TILE)


class GivesBack:
    """Operands whose slots are given back in another way."""

    def __init__(self, operands: Any, give_back: Callable[..., None]) -> None:
        self.operands, self.give_back = operands, give_back

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operands, name)


def test_a_slot_given_back_under_ptx_that_reads_it_is_found(part):
    any_width = importlib.import_module("kernels_in_the_model.gemm.any_width")
    start, end = any_width.AnyWidthAccumulator.start, any_width.AnyWidthAccumulator.end

    def at_once(self, operands, step, k, STEPS):
        return start(self, GivesBack(operands, lambda *_, pred: operands.give_back(step)), step, k, STEPS)

    def not_again(self, operands, step):
        return end(self, GivesBack(operands, lambda step: None), step)

    part("any_width", "AnyWidthAccumulator.start", at_once)
    part("any_width", "AnyWidthAccumulator.end", not_again)
    assert "not equal" in fails(**WIDE_TILE).lower()


@pytest.mark.parametrize(
    ("name", "value"), [("STEP_OFFSET", 4), ("WARPGROUP_ROWS", 0), ("WARPGROUP_ROWS", 256)], ids=str
)
def test_an_address_that_is_wrong_is_found(part, name, value):
    part("any_width", name, value)
    assert fails(**WIDE_TILE)


def test_products_that_the_last_k_block_lacks_are_found(part):
    part("problem", "STEPS_OF_A_BLOCK", 2)  # 32 of its 52 elements of K
    assert "not equal" in fails(**WIDE_TILE).lower()


@pytest.mark.parametrize(
    ("k", "steps"), [(8, {1}), (16, {1}), (24, {2}), (40, {4}), (128, {4}), (136, {4, 1})]
)
def test_of_zeros_behind_k_few_are_multiplied(part, k, steps):
    start = importlib.import_module("kernels_in_the_model.gemm.any_width").AnyWidthAccumulator.start
    seen = set()
    part("any_width", "AnyWidthAccumulator.start", lambda *args: (seen.add(int(args[-1])), start(*args))[1])
    multiply(**WIDE_TILE | {"k": k})
    assert seen == steps


@pytest.mark.parametrize("width", [72, 128])
def test_columns_that_ptx_leaves_out_or_finds_behind_the_tile_are_found(part, width):
    changed_products(part, lambda text: text.replace("m64n80k16", f"m64n{width}k16"))
    assert "of other columns" in fails(**WIDE_TILE)


def test_only_tiles_of_any_width_have_columns_of_c_as_rows():
    with pytest.raises(AssertionError, match="only tiles of any width have been exchanged"):
        multiply(**WIDE_TILE | {"joined": False, "swap_ab": True})


def test_swapped_tiles_at_the_wrong_place_are_found(part):
    part("epilogue", "piece_start", lambda i, store_n, width: 0)
    assert fails(**WIDE_TILE | {"swap_ab": True})


def test_stolen_slots_that_are_loaded_too_early_are_found(part):
    part("epilogue", "StolenBuffers.before_load", lambda self: None)
    assert fails(variant="persistent_pipelined", blocks=(2, 8, 2), store=(4, 0))


def test_consumers_that_miscount_their_turns_are_found(part):
    part("roles", "ring_phase", lambda step, size: 0)
    assert fails(variant="pingpong")  # "deadlock", or an arrival too many
