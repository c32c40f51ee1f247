"""What other keys tell of a new one: the arithmetic, the model and the order."""

from __future__ import annotations

import math
import random
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_autotune.search.expectation.arithmetic import decay, log, normal_below
from dist_autotune.search.expectation.model import Expectation
from dist_autotune.search.expectation.order import (
    AT_LEAST,
    Order,
    best_start,
    most_tried,
)

TEXTS = [
    f"BLOCK: {block}, SPLIT: {split}, num_warps: {warps}, num_ctas: 1"
    for block in (16, 32, 64, 128)
    for split in (1, 2, 4)
    for warps in (2, 4, 8)
]


def ms_of(index: int, size: int) -> float:
    """Return a time that is a product of an effect of each field, and the size."""
    block, split, warps = index // 9, index // 3 % 3, index % 3
    return size * 1e-4 * (1 + 0.3 * abs(block - 2)) * (1 + 0.1 * split) * (1.2 if warps == 0 else 1.0)


def told(*sizes: int, texts: list[str] = TEXTS) -> dict[str, dict[str, float]]:
    return {f"{size}, 'fp16'": {text: ms_of(TEXTS.index(text), size) for text in texts} for size in sizes}


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_the_logarithm_is_that_of_the_c_library(value):
    assert log(value) == pytest.approx(math.log(value), rel=1e-13, abs=1e-14)


@given(st.floats(min_value=-8, max_value=8))
def test_the_normal_tail_is_that_of_the_c_library(z):
    assert normal_below(z) == pytest.approx(statistics.NormalDist().cdf(z), abs=2e-7)


@given(st.floats(min_value=0, max_value=3))
def test_a_decay_is_nearly_exponential(value):
    assert decay(value) == pytest.approx(math.exp(-value), rel=5e-3)


def test_what_configs_add_at_all_keys_orders_them_and_more_keys_are_surer():
    best_first = sorted(range(len(TEXTS)), key=lambda index: ms_of(index, 256))
    deviations = []
    for sizes in ((64, 128, 512, 1024), (64, 128, 192, 320, 384, 448, 512, 1024)):
        expectation = Expectation("256, 'fp16'", TEXTS, told(*sizes))
        expectation.observe(0, ms_of(0, 256))
        means = [round(mean, 9) for mean in expectation.means]
        assert sorted(range(len(TEXTS)), key=lambda i: (means[i], ms_of(i, 256)))[:6] == best_first[:6]
        deviations.append(statistics.fmean(map(math.sqrt, expectation.variances)))
    assert deviations[1] < 0.8 * deviations[0]


def test_candidates_that_nobody_has_told_of_are_the_least_sure():
    tried = [text for text in TEXTS if "BLOCK: 64, SPLIT: 2" not in text]
    expectation = Expectation("256, 'fp16'", TEXTS, told(64, 128, 512, 1024, texts=tried))
    expectation.observe(0, ms_of(0, 256))
    new = TEXTS.index("BLOCK: 64, SPLIT: 2, num_warps: 4, num_ctas: 1")
    assert new not in expectation.told
    assert expectation.variances[new] > max(expectation.variances[i] for i in expectation.told)


@pytest.mark.parametrize("texts", [["a"], ["a", "b"], TEXTS])
def test_without_anything_told_nothing_is_expected(texts):
    expectation = Expectation("256, 'fp16'", texts, {})
    assert expectation.means == [0.0] * len(texts)
    expectation.observe(0, 2.0)
    assert expectation.means[0] == pytest.approx(math.log(2), abs=1e-3)
    assert all(math.isfinite(each) for each in expectation.variances)


@pytest.mark.parametrize(
    ("candidates", "most"), [(2, 2), (3, 3), (12, 3), (20, 5), (99, 24), (100, 7), (300, 21), (5000, 350)]
)
def test_a_quarter_is_tried_at_most_and_of_hundreds_7_percent(candidates, most):
    assert most_tried(candidates) == most


def tried(order: Order, size: int, banned: frozenset[int] = frozenset()) -> list[int]:
    while (index := order.next()) is not None:
        order.tell(index, math.inf if index in banned else ms_of(index, size))
    return order.tried


def test_the_incumbent_and_two_more_are_tried_and_then_what_may_pay():
    order = Order(Expectation("256, 'fp16'", TEXTS, told(64, 128, 512, 1024)), first=35)
    found = tried(order, 256)
    assert found[0] == 35
    assert AT_LEAST <= len(found) == len(set(found)) <= most_tried(len(TEXTS))
    best = min(range(len(TEXTS)), key=lambda index: ms_of(index, 256))
    assert ms_of(best, 256) == min(ms_of(index, 256) for index in found)


def test_what_was_not_tried_is_told():
    order = Order(Expectation("256, 'fp16'", TEXTS, told(64, 128, 512, 1024)), first=0)
    assert order.untried_text() == ""
    tried(order, 256)
    text = order.untried_text()
    rest = [ms_of(i, 256) for i in range(len(TEXTS)) if i not in order.tried]
    slower = min(rest) / min(ms_of(i, 256) for i in order.tried) - 1
    percent = int(re.search(r"at least (\d+) % slower", text)[1])
    assert text.startswith(f"tried {len(order.tried)} of 36; the rest was expected")
    assert percent == pytest.approx(100 * slower, abs=2)


def test_a_new_key_starts_where_several_keys_say():
    rng = random.Random(0)
    shuffled = rng.sample(TEXTS, len(TEXTS))
    start = best_start("256, 'fp16'", shuffled, told(64, 128, 512, 1024))
    assert start == best_start("256, 'fp16'", TEXTS, told(64, 128, 512, 1024))
    assert ms_of(TEXTS.index(start), 256) == min(ms_of(index, 256) for index in range(len(TEXTS)))
