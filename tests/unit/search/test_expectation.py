"""What other keys tell of a new one: which of them are near, the model, how many candidates are tried."""

import math

import pytest

from dist_autotune.search.expectation.keys import by_distance, distance
from dist_autotune.search.expectation.order import TrialOrder

F16 = "'torch.float16'"


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
