"""Random sessions with equal bits: a few; `tests/helpers/fuzz_bits.py` makes thousands."""

from __future__ import annotations

from collections import Counter

import pytest
from fuzz_bits import play_number

pytestmark = pytest.mark.usefixtures("one_core")  # virtual ranks are threads that take turns


def test_whatever_configs_do_no_bit_changes_and_what_is_racy_is_banned_on_all_ranks() -> None:
    counts: Counter[str] = Counter()
    for number in range(26):
        play_number(number, counts)
    assert counts["racy configs banned"] >= 20
    assert counts["changing configs banned"] >= 20
    assert counts["winners other than the first config"] >= 3
    assert counts["winners slower than the fastest config"] >= 3
