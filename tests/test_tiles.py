"""That every tile is visited exactly once, in the order that the schedules promise."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from dist_autotune.kernels.tiles import grouped_tile, on_host, rotated_chunk, row_major_tile

# Triton 3.6 turns one-element arrays into loop bounds the way NumPy 1.25 deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

sizes = st.integers(1, 40)


@given(tiles_m=sizes, tiles_n=sizes)
def test_row_major_visits_every_tile_once_row_after_row(tiles_m, tiles_n):
    visited = [on_host(row_major_tile)(tile, tiles_n) for tile in range(tiles_m * tiles_n)]
    assert visited == list(itertools.product(range(tiles_m), range(tiles_n)))


@given(tiles_m=sizes, tiles_n=sizes, group_m=sizes)
def test_grouped_visits_every_tile_once(tiles_m, tiles_n, group_m):
    visited = [on_host(grouped_tile)(tile, tiles_m, tiles_n, group_m) for tile in range(tiles_m * tiles_n)]
    assert sorted(visited) == list(itertools.product(range(tiles_m), range(tiles_n)))


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


@triton.jit
def count_visits(visits_ptr, tiles_m, tiles_n, rank, WORLD: tl.constexpr, GROUP_M: tl.constexpr):
    for tile in tl.range(tl.program_id(0), WORLD * tiles_m * tiles_n, tl.num_programs(0)):
        chunk, inner = rotated_chunk(tile, tiles_m * tiles_n, WORLD, rank)
        pid_m, pid_n = grouped_tile(inner, tiles_m, tiles_n, GROUP_M)
        tl.atomic_add(visits_ptr + (chunk * tiles_m + pid_m) * tiles_n + pid_n, 1)


@pytest.mark.parametrize(
    ("tiles_m", "tiles_n", "world", "rank", "group_m", "programs"),
    [
        pytest.param(1, 1, 1, 0, 1, 1, id="one tile"),
        pytest.param(5, 3, 2, 1, 2, 4, id="last group lower"),
        pytest.param(2, 7, 3, 2, 8, 5, id="group higher than a chunk"),
        pytest.param(3, 2, 4, 1, 1, 64, id="more programs than tiles"),
    ],
)
def test_programs_of_a_kernel_share_out_all_tiles(tiles_m, tiles_n, world, rank, group_m, programs):
    visits = torch.zeros(world * tiles_m, tiles_n, dtype=torch.int32)
    count_visits[(programs,)](visits, tiles_m, tiles_n, rank, WORLD=world, GROUP_M=group_m)
    assert torch.equal(visits, torch.ones_like(visits))
