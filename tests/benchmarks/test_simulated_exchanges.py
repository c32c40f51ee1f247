"""That exchanges in virtual time take about what they have taken on four GPUs."""

from __future__ import annotations

import pytest

from benchmarks.simulation.exchanges import (
    GATHERS,
    SCATTERS,
    each_chunk,
    one_launch,
    pushed,
    scatter_by_stores,
    work_of,
)

EACH = [(each_chunk, shape) for shape in SCATTERS] + [(pushed, shape) for shape in GATHERS]


@pytest.mark.parametrize(("way", "shape"), EACH)
def test_on_four_ranks_the_ways_of_that_day_take_as_long_as_they_have_taken(way, shape):
    took = way(work_of(shape, 4, scatters=shape in SCATTERS))
    assert 0.85 < took / shape.ours_ms < 1.2


@pytest.mark.parametrize("shape", SCATTERS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_no_way_of_a_scatter_ends_before_its_product_and_its_link(world, shape):
    work = work_of(shape, world, scatters=True)
    least = max(world * work.tiles * work.tile_ms / 132, (world - 1) * work.chunk_ms)
    assert min(way(work) for way in (each_chunk, one_launch, scatter_by_stores)) >= 0.999 * least
