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
    contiguous_number,
    grouped_tile,
    on_host,
    reset_counter,
    rotated_chunk,
    scheduled_number,
    scheduled_tile,
    strided_number,
)

sizes = st.integers(1, 40)


def test_grouped_goes_down_a_group_before_the_next_column():
    visited = [on_host(grouped_tile)(tile, 3, 3, 2) for tile in range(9)]
    assert visited == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 0), (2, 1), (2, 2)]


@given(tiles_m=sizes, tiles_n=sizes, group_m=sizes)
def test_a_group_is_finished_before_the_next_begins(tiles_m, tiles_n, group_m):
    groups = [
        on_host(grouped_tile)(tile, tiles_m, tiles_n, group_m)[0] // group_m
        for tile in range(tiles_m * tiles_n)
    ]
    assert groups == sorted(groups)


@given(per_chunk=sizes, chunks=st.integers(1, 9), data=st.data())
def test_chunks_come_whole_from_the_first_on_and_wrap(per_chunk, chunks, data):
    first = data.draw(st.integers(0, chunks - 1))
    visited = [on_host(rotated_chunk)(tile, per_chunk, chunks, first) for tile in range(chunks * per_chunk)]
    order = [*range(first, chunks), *range(first)]
    assert visited == list(itertools.product(order, range(per_chunk)))


# ---- which numbers a program visits


def numbers_of(number_at, tiles):
    """Return the numbers that a program visits, from a function of the visit, until it has no more."""
    return list(itertools.takewhile(lambda number: number < tiles, map(number_at, itertools.count())))


SCHEDULES = ["contiguous", "strided", "grouped", "chiplet"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(
    tiles_m=sizes,
    tiles_n=sizes,
    programs=st.integers(1, 300),
    group_m=sizes,
    chiplets=st.integers(1, 9),
    data=st.data(),
)
def test_programs_visit_every_tile_once_whatever_divides_what(
    schedule, tiles_m, tiles_n, programs, group_m, chiplets, data
):
    tiles, chunk = tiles_m * tiles_n, data.draw(st.integers(1, 70))
    visited = []
    for program in range(programs):
        for number in numbers_of(
            lambda visit, program=program: on_host(scheduled_number)(
                visit, program, programs, tiles, schedule, chiplets, chunk
            ),
            tiles,
        ):
            visited.append(on_host(scheduled_tile)(number, tiles_m, tiles_n, schedule, group_m))
    assert sorted(visited) == list(itertools.product(range(tiles_m), range(tiles_n)))


@given(tiles=st.integers(0, 2000), programs=st.integers(1, 300))
def test_runs_are_contiguous_and_differ_by_one_tile_at_most(tiles, programs):
    number_at = on_host(contiguous_number)
    runs = [
        numbers_of(lambda visit, program=program: number_at(visit, program, programs, tiles), tiles)
        for program in range(programs)
    ]
    assert list(itertools.chain(*runs)) == list(range(tiles))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


def test_a_chiplet_has_whole_chunks_of_consecutive_tiles():
    """16 programs on 4 chiplets, chunks of 2: chiplet 0 has tiles 0, 1, then 8, 9, ..."""
    tiles, programs, chiplets, chunk = 32, 16, 4, 2
    of_chiplet = {chiplet: [] for chiplet in range(chiplets)}
    for visit, program in itertools.product(range(tiles // programs), range(programs)):
        number = on_host(chiplet_number)(visit, program, programs, tiles, chiplets, chunk)
        of_chiplet[program % chiplets].append(number)
    assert of_chiplet[0] == [0, 1, 8, 9, 16, 17, 24, 25]
    assert of_chiplet[3] == [6, 7, 14, 15, 22, 23, 30, 31]


def test_strided_programs_are_neighbours_in_number():
    assert [on_host(strided_number)(1, program, 5) for program in range(5)] == [5, 6, 7, 8, 9]


@triton.jit
def count_scheduled_visits(
    visits_ptr,
    counter_ptr,
    tiles_m,
    tiles_n,
    SCHEDULE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles = tiles_m * tiles_n
    visit = 0
    more = True
    while more:
        if SCHEDULE == "dynamic":
            number = claim_number(counter_ptr)
        else:
            number = scheduled_number(visit, tl.program_id(0), tl.num_programs(0), tiles, SCHEDULE, 2, CHUNK)
        more = number < tiles
        if more:
            pid_m, pid_n = scheduled_tile(number, tiles_m, tiles_n, SCHEDULE, GROUP_M)
            tl.atomic_add(visits_ptr + pid_m * tiles_n + pid_n, 1)
        visit += 1
    if SCHEDULE == "dynamic":
        reset_counter(counter_ptr, tl.num_programs(0))


@pytest.mark.parametrize("schedule", [*SCHEDULES, "dynamic"])
def test_a_kernel_visits_every_tile_once_and_leaves_its_counter_at_zero(schedule):
    visits, counter = torch.zeros(5, 7, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for _ in range(2):  # the second launch finds what the first has left
        count_scheduled_visits[(4,)](visits, counter, 5, 7, SCHEDULE=schedule, CHUNK=3, GROUP_M=2)
    assert torch.equal(visits, torch.full_like(visits, 2))
    assert torch.equal(counter, torch.zeros_like(counter))
