"""Random sessions with equal bits: a few; `tests/helpers/fuzz.py bits` plays thousands."""

from __future__ import annotations

from collections import Counter

import pytest
from fuzz import play_sessions

pytestmark = pytest.mark.usefixtures("one_core")  # virtual ranks are threads that take turns


def test_whatever_configs_do_no_bit_changes_and_what_is_racy_is_banned_on_all_ranks() -> None:
    counts: Counter[str] = Counter()
    play_sessions("bits", 0, 39, counts)
    assert counts["racy configs banned"] >= 10
    assert counts["changing configs banned"] >= 10
    assert counts["winners other than the first config"] >= 1
    assert counts["winners slower than the fastest config"] >= 1
