"""That the k blocks of the last wave are multiplied exactly once, and the parts found where they were put."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_autotune.kernels.tiles import (
    on_host,
    part_slot,
    stream_k_parts,
    stream_k_segment,
    stream_k_segments,
    stream_k_share,
)

share_of, segment_of, segments_of, parts_of, slot_of = map(
    on_host, (stream_k_share, stream_k_segment, stream_k_segments, stream_k_parts, part_slot)
)


@st.composite
def tails(draw):
    """Return tiles of the tail, k blocks of each, programs, the share of each program."""
    programs = draw(st.integers(1, 300))
    tail, k_blocks = draw(st.integers(0, programs - 1)), draw(st.integers(1, 300))
    return tail, k_blocks, programs, share_of(tail, k_blocks, programs, draw(st.integers(1, 40)))


def segments(tail, k_blocks, programs, share):
    """Return (program, tile, first k block, number of k blocks) of all segments."""
    return [
        (program, *segment_of(program, segment, tail, k_blocks, share))
        for program in range(programs)
        for segment in range(segments_of(program, tail, k_blocks, share))
    ]


@given(tails())
def test_every_k_block_of_every_tile_is_multiplied_once(case):
    tail, k_blocks, _programs, _share = case
    blocks = [
        (tile, k) for _program, tile, first, count in segments(*case) for k in range(first, first + count)
    ]
    assert sorted(blocks) == list(itertools.product(range(tail), range(k_blocks)))


@given(tails())
def test_a_program_has_two_segments_at_most_all_with_k_blocks_and_none_behind_them(case):
    tail, k_blocks, programs, share = case
    for program in range(programs):
        segments_here = segments_of(program, tail, k_blocks, share)
        counts = [segment_of(program, segment, tail, k_blocks, share)[2] for segment in range(4)]
        assert segments_here <= 2
        assert min(counts[:segments_here], default=1) > 0
        assert not any(counts[segments_here:])


@given(tails())
def test_no_program_has_more_than_its_share_and_the_share_is_even_or_the_least_that_pays(case):
    tail, k_blocks, programs, share = case
    taken = Counter()
    for program, _tile, _first, count in segments(*case):
        taken[program] += count
    assert max(taken.values(), default=0) <= share <= k_blocks
    assert share * programs >= tail * k_blocks


@given(
    tail=st.integers(1, 200),
    k_blocks=st.integers(1, 300),
    more=st.integers(1, 99),
    shortest=st.integers(1, 40),
)
def test_the_share_is_the_even_one_or_ends_with_its_tile_unless_that_is_too_short(
    tail, k_blocks, more, shortest
):
    programs = tail + more
    even, aligned = -(-tail * k_blocks // programs), -(-k_blocks // (programs // tail))
    wanted = aligned if 8 * aligned <= 9 * even else even
    assert share_of(tail, k_blocks, programs, shortest) == max(wanted, min(shortest, k_blocks))


@pytest.mark.parametrize(
    ("tail", "k_blocks", "parts"),
    [
        pytest.param(32, 224, 4, id="four programs for a tile, four are idle"),
        pytest.param(64, 128, 2, id="two, four are idle"),
        pytest.param(16, 64, 8, id="eight, four are idle"),
    ],
)
def test_parts_end_with_their_tile_where_few_programs_are_idle_for_it(tail, k_blocks, parts):
    share = share_of(tail, k_blocks, 132, 8)
    assert [parts_of(tile, k_blocks, share) for tile in range(tail)] == [
        (parts * tile, parts) for tile in range(tail)
    ]


def test_where_many_would_be_idle_for_it_parts_are_dealt_out_evenly():
    assert share_of(68, 128, 132, 8) == -(-68 * 128 // 132)


@given(tails())
def test_a_tile_s_sum_reads_each_part_of_it_in_the_order_of_k_from_where_it_was_written(case):
    tail, k_blocks, programs, share = case
    written = {}  # slot: (tile, first k block)
    for program, tile, first, _count in segments(*case):
        slot = slot_of(program, tile, k_blocks, share, programs)
        assert slot not in written
        assert 0 <= slot < 2 * programs
        written[slot] = (tile, first)
    for tile in range(tail):
        first, count = parts_of(tile, k_blocks, share)
        read = [
            written.pop(slot_of(program, tile, k_blocks, share, programs))
            for program in range(first, first + count)
        ]
        assert {found for found, _ in read} == {tile}
        assert [k for _, k in read] == sorted({k for _, k in read})
    assert not written


@given(tails())
def test_a_tile_of_one_program_has_all_its_k_blocks_there(case):
    _tail, k_blocks, _programs, share = case
    for _program, tile, _first, count in segments(*case):
        assert (parts_of(tile, k_blocks, share)[1] == 1) == (count == k_blocks)


def test_three_tiles_of_sixteen_k_blocks_for_five_programs():
    assert share_of(3, 16, 5, 1) == 10
    assert segments(3, 16, 5, 10) == [
        (0, 0, 0, 10),
        (1, 0, 10, 6),
        (1, 1, 0, 4),
        (2, 1, 4, 10),
        (3, 1, 14, 2),
        (3, 2, 0, 8),
        (4, 2, 8, 8),
    ]
