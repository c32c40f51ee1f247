"""What other keys tell of a new one: which of them are near, the model, how many candidates are tried."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_autotune.search.expectation.keys import by_distance, distance
from dist_autotune.search.expectation.model import Expectation
from dist_autotune.search.expectation.order import TrialOrder

F16 = "'torch.float16'"
integers = st.lists(st.integers(), min_size=3, max_size=3)


def key(values: list[int]) -> str:
    return ", ".join([*map(str, values), F16])


@given(integers, integers)
def test_the_distance_is_the_same_both_ways_and_zero_only_of_equal_keys(one, other):
    there = distance(key(one), key(other))
    assert there == distance(key(other), key(one)) >= 0
    assert distance(key(one), key(one)) == 0
    if max(map(abs, one + other)) < 2**40:  # of larger ones, neighbours are equal as floats
        assert (there == 0) == (one == other)


@pytest.mark.parametrize(
    "other",
    [
        "4096, 'torch.float32'",
        "4096, 1, 'torch.float16'",
        "4096.5, 'torch.float16'",
        "None, 'torch.float16'",
        "'4096', 'torch.float16'",
        "'torch.float16', 4096",
        "mod.kernel#4096, 'torch.float16'",
    ],
)
def test_keys_that_differ_in_anything_but_integers_cannot_be_compared(other):
    assert distance(f"4096, {F16}", other) == math.inf
    assert by_distance(f"4096, {F16}", [other, f"1, {F16}"]) == [f"1, {F16}"]


def test_integers_of_any_number_of_digits_are_compared_by_their_doublings():
    assert distance(f"{2**600 - 1}, {F16}", f"{2**1200 - 1}, {F16}") == 600
    assert distance(f"{-(2**1200) + 1}, {F16}", f"1, {F16}") == 1201


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


def test_what_configs_add_at_all_keys_orders_them_and_more_keys_are_surer():
    best_first = sorted(range(len(TEXTS)), key=lambda index: ms_of(index, 256))
    deviations = []
    for sizes in ((64, 128, 512, 1024), (64, 128, 192, 320, 384, 448, 512, 1024)):
        expectation = Expectation.of_key("256, 'fp16'", TEXTS, told(*sizes))
        expectation.observe(0, ms_of(0, 256))
        ordered = sorted(range(len(TEXTS)), key=expectation.means.__getitem__)
        assert [ms_of(i, 256) for i in ordered[:6]] == [ms_of(i, 256) for i in best_first[:6]]
        deviations.append(statistics.fmean(map(math.sqrt, expectation.variances)))
    assert deviations[1] < 0.8 * deviations[0]


def test_candidates_that_nobody_has_told_of_are_the_least_sure():
    tried = [text for text in TEXTS if "BLOCK: 64, SPLIT: 2" not in text]
    expectation = Expectation.of_key("256, 'fp16'", TEXTS, told(64, 128, 512, 1024, texts=tried))
    expectation.observe(0, ms_of(0, 256))
    new = TEXTS.index("BLOCK: 64, SPLIT: 2, num_warps: 4, num_ctas: 1")
    assert new not in expectation.told
    assert expectation.variances[new] > max(expectation.variances[i] for i in expectation.told)


@pytest.mark.parametrize(
    ("candidates", "keys", "most"),
    [
        (20, 1, 16),
        (72, 1, 16),
        (110, 3, 16),
        (192, 1, 28),
        (300, 1, 45),
        (14, 4, 3),
        (20, 4, 5),
        (72, 4, 16),
        (300, 4, 21),
    ],
)
def test_15_percent_or_sixteen_are_tried_where_keys_were_told_and_7_percent_of_hundreds_where_four_were(
    candidates, keys, most
):
    texts = [f"A: {2 ** (index % 10)}, B: {index // 10}" for index in range(candidates)]
    told = {f"{64 * size}, 'fp16'": dict.fromkeys(texts, 1.0) for size in range(1, keys + 1)}
    assert TrialOrder("1000, 'fp16'", texts, told).most == most
