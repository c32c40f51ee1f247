"""That every tile is visited exactly once, in the order that the schedules promise."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from dist_autotune.kernels.tiles import (
    chiplet_number,
    claim_number,
    grouped_tile,
    on_host,
    reset_counter,
    rotated_chunk,
)

sizes = st.integers(1, 40)


def numbers_of(number_at, tiles):
    """Return the numbers that a program visits, from a function of the visit, until it has no more."""
    return list(itertools.takewhile(lambda number: number < tiles, map(number_at, itertools.count())))


@given(
    tiles_m=sizes,
    tiles_n=sizes,
    programs=st.integers(1, 300),
    group_m=sizes,
    chiplets=st.integers(1, 9),
    data=st.data(),
)
def test_programs_visit_every_tile_once_whatever_divides_what(
    tiles_m, tiles_n, programs, group_m, chiplets, data
):
    tiles, chunk = tiles_m * tiles_n, data.draw(st.integers(1, 70))
    visited = []
    for program in range(programs):
        for number in numbers_of(
            lambda visit, program=program: on_host(chiplet_number)(
                visit, program, programs, tiles, chiplets, chunk
            ),
            tiles,
        ):
            visited.append(on_host(grouped_tile)(number, tiles_m, tiles_n, group_m))
    assert sorted(visited) == list(itertools.product(range(tiles_m), range(tiles_n)))


def visits(function, programs, *args):
    """Return the numbers of two visits of each program."""
    return [
        [on_host(function)(visit, program, programs, *args) for visit in (0, 1)]
        for program in range(programs)
    ]


ORDERS = {
    "chiplet: of four programs on two, in twos": (
        visits(chiplet_number, 4, 8, 2, 2),
        [[0, 4], [2, 6], [1, 5], [3, 7]],
    ),
    "grouped: down a group before the next column": (
        [on_host(grouped_tile)(tile, 3, 3, 2) for tile in range(9)],
        [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0), (2, 1), (2, 2)],
    ),
    "rotated: chunks whole, from the first one on": (
        [on_host(rotated_chunk)(tile, 2, 3, 1) for tile in range(6)],
        [(1, 0), (1, 1), (2, 0), (2, 1), (0, 0), (0, 1)],
    ),
}


@pytest.mark.parametrize(("found", "drawn"), ORDERS.values(), ids=ORDERS)
def test_tiles_come_in_the_order_that_is_drawn(found, drawn):
    assert found == drawn


@triton.jit
def count_visits(visits_ptr, counter_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    number = claim_number(counter_ptr)
    while number < tiles_m * tiles_n:
        pid_m, pid_n = grouped_tile(number, tiles_m, tiles_n, GROUP_M)
        tl.atomic_add(visits_ptr + pid_m * tiles_n + pid_n, 1)
        number = claim_number(counter_ptr)
    reset_counter(counter_ptr, tl.num_programs(0))


def test_programs_that_claim_tiles_visit_each_once_and_leave_the_counter_at_zero():
    visits, counter = torch.zeros(5, 7, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for _ in range(2):  # the second launch finds what the first has left
        count_visits[(4,)](visits, counter, 5, 7, GROUP_M=2)
    assert torch.equal(visits, torch.full_like(visits, 2))
    assert torch.equal(counter, torch.zeros_like(counter))
