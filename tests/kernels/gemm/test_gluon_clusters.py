"""The Gluon body's programs of two CTAs, run on the CPU: see `test_gluon_model`, and `clusters`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import gluon_model
import pytest
from gluon_machine import Program, now
from gluon_memory import Barrier
from gluon_products import change, fails, multiply
from hypothesis import given, settings
from hypothesis import strategies as st

OPERANDS = importlib.import_module("kernels_in_the_model.gemm.operands")
SCHEDULES = ("contiguous", "strided", "grouped", "chiplet")
SIZES = st.tuples(st.integers(1, 400), st.integers(1, 80), st.integers(1, 300))
VARIANTS = pytest.mark.parametrize("variant", ["cooperative", "pingpong"])

pytestmark = pytest.mark.usefixtures("one_core")  # its tasks are threads that take turns

OPTIONS = {"ctas": 2, "blocks": (128, 16, 64), "transposed": (False, True), "store": (8, 1), "joined": True}

pair = functools.partial(multiply, **OPTIONS)
pair_fails = functools.partial(fails, m=300, n=60, k=260, **OPTIONS)


@pytest.fixture(scope="module", autouse=True)
def narrow_tiles() -> Iterator[None]:
    with gluon_model.tma_begins_anywhere():
        yield


@VARIANTS
@settings(max_examples=20)
@given(
    sizes=st.tuples(st.integers(1, 400), st.integers(1, 300), st.integers(1, 500)),
    widths=st.sampled_from([(64, 0), (64, 8), (128, 24), (128, 16)]),
    rows_warps=st.sampled_from([(128, 4), (256, 4), (256, 8)]),
    programs=st.integers(1, 3),
    buffers=st.integers(2, 4),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 10**6),
)
def test_two_ctas_have_tiles_of_any_width(
    variant, sizes, widths, rows_warps, programs, buffers, schedule, seed
):
    (block_n, extra_n), (block_m, warps) = widths, rows_warps
    pair(
        variant,
        *sizes,
        programs=programs,
        blocks=(block_m, block_n, 64),
        extra_n=extra_n,
        buffers=buffers,
        warps=warps,
        store=(32, 2),
        schedule=schedule,
        seed=seed,
    )


EDGES = {
    "more programs than tiles": {"m": 128, "n": 16, "k": 150, "programs": 5},
    "one k block and a long ring": {"m": 300, "n": 60, "k": 20, "buffers": 5},
    "the ring is one k block longer": {"m": 300, "n": 60, "k": 180, "buffers": 4},
    "no rows for the second CTA": {"m": 50, "n": 20, "k": 200},
    "one element": {"m": 1, "n": 1, "k": 1, "programs": 1},
    "no k block": {"m": 300, "n": 40, "k": 0},
}


@VARIANTS
@pytest.mark.parametrize("case", EDGES)
def test_two_ctas_at_the_edges(case, variant):
    for seed in range(6):
        pair(variant, **EDGES[case], seed=seed)


@pytest.mark.parametrize("variant", ["pipelined", "persistent", "persistent_pipelined"])
@settings(max_examples=5)
@given(sizes=SIZES, buffers=st.integers(2, 4), seed=st.integers(0, 10**6))
def test_two_ctas_whose_partitions_load_for_themselves(variant, sizes, buffers, seed):
    pair(variant, *sizes, buffers=buffers, seed=seed)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"schedule": "dynamic"}, "one CTA would have to tell the other"),
        ({"joined": False}, "only tiles of any width"),
        ({"swap_ab": True}, "only tiles of any width"),
        ({"stream_k": 1}, "parts are written in pieces that fill the tile"),
    ],
    ids=str,
)
def test_what_two_ctas_cannot_do_is_refused(options, why):
    with pytest.raises(AssertionError, match=why):
        pair("cooperative", 200, 40, 100, **{**OPTIONS, **options})


# ---- that the model finds what it is there to find


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts something else into a module of the body."""
    return functools.partial(change, monkeypatch)


def is_of_both(bar: Barrier) -> bool:
    return bar.everywhere.count(bar) == 2


def mbarrier(**changed: Callable[..., None]) -> Any:
    """Return the stand-in for mbarriers with something else in place of some functions."""
    names = vars(OPERANDS.mbarrier) | changed
    return type(
        "mbarrier", (), {name: staticmethod(value) for name, value in names.items() if callable(value)}
    )


def unless(function: Callable[..., None], is_left_out: Callable[[Barrier], bool]) -> Callable[..., None]:
    return lambda bar, *args, **options: None if is_left_out(bar) else function(bar, *args, **options)


@VARIANTS
def test_columns_that_are_loaded_before_both_have_read_the_slot_are_found(part, variant):
    part("operands", "mbarrier", mbarrier(wait=unless(OPERANDS.mbarrier.wait, is_of_both)))
    assert pair_fails(variant=variant)


@VARIANTS
def test_an_mbarrier_of_both_that_each_has_for_itself_is_found(part, variant):
    allocate = OPERANDS.allocate_mbarriers
    part("operands", "allocate_mbarriers", lambda count, of_both=False: allocate(count))
    assert pair_fails(variant=variant)


@VARIANTS
def test_a_cta_that_loads_its_rows_before_it_has_read_the_slot_is_found(part, variant):
    # CTA 0 waits for both, which includes its own readers.
    left_out = unless(OPERANDS.mbarrier.wait, lambda bar: not is_of_both(bar) and "_load" in now().name)
    part("operands", "mbarrier", mbarrier(wait=left_out))
    assert pair_fails(variant=variant)


@VARIANTS
@pytest.mark.parametrize("rank", [0, 1])
def test_readers_that_arrive_only_for_their_own_cta_are_a_deadlock(part, variant, rank):
    left_out = unless(OPERANDS.mbarrier.arrive, lambda bar: is_of_both(bar) and now().cta.rank == rank)
    part("operands", "mbarrier", mbarrier(arrive=left_out))
    assert pair_fails(variant=variant) == "deadlock"


@VARIANTS
def test_columns_that_only_one_cta_receives_are_a_deadlock(part, variant):
    def load(desc, coord, bar, buf):
        if now().cta.rank == 0:
            OPERANDS.tma_load(desc, coord, bar, buf)

    part("operands", "load_for_both", load)
    assert pair_fails(variant=variant) == "deadlock"


@VARIANTS
def test_columns_that_arrive_twice_are_found(part, variant):
    load_for_both = OPERANDS.load_for_both

    def load(desc, coord, bar, buf):
        load_for_both(desc, coord, bar, buf)
        if now().cta.rank == 1:
            OPERANDS.tma_load(desc, coord, bar, buf)

    part("operands", "load_for_both", load)
    assert pair_fails(variant=variant)


@VARIANTS
def test_a_cta_that_expects_the_rows_of_both_is_a_deadlock(part, variant):
    expect = OPERANDS.mbarrier.expect
    half_of_a = 2 * (128 // 2 * 64)
    part("operands", "mbarrier", mbarrier(expect=lambda bar, nbytes: expect(bar, nbytes + half_of_a)))
    assert pair_fails(variant=variant) == "deadlock"


@VARIANTS
def test_a_wrong_parity_of_the_mbarrier_of_both_is_found(part, variant):
    wait = OPERANDS.mbarrier.wait
    part("operands", "mbarrier", mbarrier(wait=lambda bar, parity: wait(bar, parity ^ is_of_both(bar))))
    assert pair_fails(variant=variant)


def test_turns_that_both_ctas_take_together_are_found(part):
    part("roles", "allocate_mbarriers", lambda count: OPERANDS.allocate_mbarriers(count, True))
    assert pair_fails(variant="pingpong")


@VARIANTS
def test_ctas_that_work_at_different_tiles_are_found(part, variant):
    take = importlib.import_module("kernels_in_the_model.gemm.problem").StaticSchedule.take

    def own(self, visit):
        number = take(self, visit)
        return number if number >= self.tiles else (number + now().cta.rank) % self.tiles

    part("problem", "StaticSchedule.take", own)
    assert "not equal" in pair_fails(variant=variant).lower()


@VARIANTS
def test_an_accumulator_that_is_not_divided_is_found(part, variant):
    strip = importlib.import_module("kernels_in_the_model.gemm.any_width")._strip
    part("any_width", "_strip", lambda block_m, warps, ctas: strip(block_m, warps, 1))
    assert "a layout for more or for fewer CTAs" in pair_fails(variant=variant)


@VARIANTS
def test_mbarriers_whose_layout_says_nothing_of_ctas_are_found(part, variant):
    part("operands", "_layout", lambda ctas, of_both: OPERANDS.mbarrier.MBarrierLayout())
    assert "a layout for more or for fewer CTAs" in pair_fails(variant=variant)


@VARIANTS
def test_ctas_that_do_not_meet_first_are_found(monkeypatch, variant):
    monkeypatch.setattr(Program, "begin", lambda self: None)
    assert "before it is initialised" in pair_fails(variant=variant)


@VARIANTS
def test_a_cta_that_ends_before_the_other_is_found(monkeypatch, variant):
    monkeypatch.setattr(Program, "end", lambda self: None)
    assert "of a CTA is used that is gone" in pair_fails(variant=variant)
