"""That exchanges in virtual time take about what they have taken on four GPUs."""

import pytest

from benchmarks.simulation.exchanges import GATHERS, SCATTERS, each_chunk, pushed, work_of

EACH = [(each_chunk, shape) for shape in SCATTERS] + [(pushed, shape) for shape in GATHERS]


@pytest.mark.parametrize(("way", "shape"), EACH)
def test_on_four_ranks_the_ways_of_that_day_take_as_long_as_they_have_taken(way, shape):
    took = way(work_of(shape, 4, scatters=shape in SCATTERS))
    assert 0.85 < took / shape.ours_ms < 1.2
