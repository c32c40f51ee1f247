"""Which candidates of a kernel the run judges: the front of time and share, whatever the unit of time."""

from __future__ import annotations

import pytest

from dist_autotune.search.plans.space import MOST_CANDIDATES, levels_of

# The fastest of each share, one that is slower than another of its share, one beyond three times the fastest.
MS = {0: 1.0, 1: 1.3, 2: 1.18, 3: 2.9, 4: 3.1, 5: 1.2}
SHARE = {0: 1.0, 1: 0.76, 2: 0.76, 3: 0.5, 4: 0.25, 5: 1.0}


@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e3])
def test_a_kernel_keeps_the_fastest_of_each_share_up_to_three_times_the_fastest(unit):
    ms = {index: unit * each for index, each in MS.items()}
    levels = levels_of("k", "family", ms, SHARE, incumbent=0)
    assert list(levels.ms) == [0, 2, 3]
    assert levels.leaves_room
    assert levels.within(0.8) == 2
    assert levels.within(0.6) == 3
    assert levels.within(0.1) == 3  # none is as small


@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e3])
def test_a_short_front_is_filled_with_the_next_fastest_within_fifteen_percent(unit):
    ms = {index: unit * each for index, each in {0: 1.14, 1: 1.0, 2: 1.16, 3: 1.05}.items()}
    levels = levels_of("k", "family", ms, dict.fromkeys(ms, 1.0), incumbent=0)
    assert list(levels.ms) == [0, 1, 3]
    assert not levels.leaves_room


@pytest.mark.parametrize("unit", [1.0, 1e-3])
def test_without_shares_the_fastest_are_kept(unit):
    ms = {index: unit * (1 + index / 10) for index in range(25)}
    levels = levels_of("k", "family", ms, {0: 1.0}, incumbent=3)
    assert list(levels.ms) == [3, 0, 1, 2, *range(4, MOST_CANDIDATES)]
    assert not levels.share
