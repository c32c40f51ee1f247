"""Which tuned key is the nearest, by the text of keys alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_autotune.search.expectation.keys import by_distance, distance, named

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


@given(integers, st.lists(integers, max_size=6), st.randoms())
def test_the_order_depends_on_the_keys_alone(one, others, random):
    texts = list(map(key, others))
    ordered = by_distance(key(one), texts)
    random.shuffle(texts)
    assert by_distance(key(one), texts) == ordered
    assert sorted(ordered) == sorted(set(texts))
    assert [distance(key(one), each) for each in ordered] == sorted(distance(key(one), t) for t in ordered)


def test_ties_go_to_the_smaller_key():
    assert by_distance("7", ["15", "3"]) == ["3", "15"]
    assert by_distance("7, 7", ["7, 3", "3, 7"]) == ["3, 7", "7, 3"]


@pytest.mark.parametrize(
    "other",
    [
        "4096, 'torch.float32'",
        "4096, 1, 'torch.float16'",
        "4096.5, 'torch.float16'",
        "None, 'torch.float16'",
        "(4096,), 'torch.float16'",
        "'4096', 'torch.float16'",
        "'torch.float16', 4096",
        "mod.kernel#4096, 'torch.float16'",
    ],
)
def test_keys_that_differ_in_anything_but_integers_cannot_be_compared(other):
    assert distance(f"4096, {F16}", other) == math.inf
    assert by_distance(f"4096, {F16}", [other, f"1, {F16}"]) == [f"1, {F16}"]


def test_text_in_quotes_holds_no_integers():
    assert distance(r"'a, 12 \' 5', 8", r"'a, 12 \' 6', 8") == math.inf
    assert distance('"it\'s 5", 8', '"it\'s 5", 8') == 0


def test_what_python_reads_as_no_integer_is_none():
    assert by_distance("1", ["9" * 5000, "4"]) == ["4"]


def test_a_key_is_named_as_another_one_is():
    text = "M2=4096, shape=(8, 9), a.dtype='torch.float16'"
    assert named(text, "5, (-6, 7), 'torch.float16'") == "M2=5, shape=(-6, 7), a.dtype='torch.float16'"
