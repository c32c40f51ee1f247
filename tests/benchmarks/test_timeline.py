"""The timeline of a call: which tiles waited, how long, and a picture of it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.operations.timeline import read, table

KERNEL_BEGAN_NS = 900_000  # by the clock of the stamps, 4 us after the origin of the events


def of_rank(rank: int = 0) -> dict[str, Any]:
    """Return what a rank records whose two SMs have two tiles each; the peer's chunk is here at 30 us."""
    stamps_us = [(0.0, 0.1, 20.0, 7), (0.0, 0.1, 21.0, 3), (12.0, 30.0, 50.0, 7), (13.0, 13.2, 44.0, 3)]
    stamps = [[KERNEL_BEGAN_NS + round(us * 1e3) for us in row[:3]] + [row[3]] for row in stamps_us]
    return {
        "rank": rank,
        "stamps": [*stamps, [-1, -1, -1, -1]],
        "origin_ns": KERNEL_BEGAN_NS - 4_000,
        "copies_us": [["4096 bytes", 2.0, 33.0]],
        "call_us": 60.0,
    }


def test_tiles_and_copies_are_told_from_the_first_stamp() -> None:
    timeline = read(of_rank(), world_size=2)
    assert [tile.chunk for tile in timeline.tiles] == [0, 0, 1, 1]
    assert [tile.waited_us for tile in timeline.tiles] == pytest.approx([0.1, 0.1, 18.0, 0.2])
    assert [tile.sm for tile in timeline.tiles] == [7, 3, 7, 3]
    (copy,) = timeline.copies
    assert (copy.begin_us, copy.end_us, timeline.call_us) == pytest.approx((-2.0, 29.0, 60.0))


def test_the_table_counts_the_tiles_that_waited_and_what_an_sm_lost() -> None:
    found = table([read(of_rank(), world_size=2)])
    (row,) = found["rows"]
    assert dict(zip(found["columns"], row, strict=True)) == {
        "rank": "0",
        "call us": "60.0",
        "copies from": "-2.0",
        "to us": "29.0",
        "tiles": "4",
        "waited": "1",
        "longest us": "18.0",
        "mean of an SM us": "9.2",
        "% of the call": "15.3",
    }
