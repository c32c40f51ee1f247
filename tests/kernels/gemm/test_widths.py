"""That the columns of C are divided among tiles of two widths, and that no more than need be are wide."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_autotune.kernels.persistent_gemm import candidates, pruning
from dist_autotune.kernels.persistent_gemm.candidates import GLUON_CANDIDATES
from dist_autotune.kernels.persistent_gemm.estimate import estimated_clocks
from dist_autotune.kernels.persistent_gemm.pruning import prune, saves_tiles
from dist_autotune.kernels.persistent_gemm.widths import column_of, tiles_side_by_side, width_of_last
from dist_autotune.kernels.tiles import on_host

WIDTHS = [(256, 32), (128, 16), (128, 32), (128, 64), (64, 64), (8, 4)]


def kwargs_of(block_n: int, extra_n: int, *, spread: bool = True) -> dict[str, Any]:
    return {"BLOCK_N": block_n, "EXTRA_N": extra_n, "SPREAD": spread}


@given(n=st.integers(1, 70_000), widths=st.sampled_from(WIDTHS), spread=st.booleans())
def test_tiles_of_both_widths_cover_all_columns_one_behind_the_other(n, widths, spread):
    block_n, extra_n = widths
    tiles_n, wide = tiles_side_by_side(kwargs_of(*widths, spread=spread), n)
    starts = [on_host(column_of)(tile, wide, *widths) for tile in range(tiles_n + 1)]
    assert starts[0] == 0
    for tile, (start, end) in enumerate(itertools.pairwise(starts)):
        assert end - start == block_n + (extra_n if tile < wide else 0)
    assert starts[-2] < n <= starts[-1]
    assert starts[-1] - starts[-2] == on_host(width_of_last)(tiles_n, wide, *widths)


@given(n=st.integers(1, 70_000), widths=st.sampled_from(WIDTHS))
def test_no_more_tiles_are_wide_than_need_be_and_there_are_as_many_as_whole_blocks_if_those_can_hold_all(
    n, widths
):
    block_n, extra_n = widths
    tiles_n, wide = tiles_side_by_side(kwargs_of(*widths), n)
    assert 0 <= wide <= tiles_n
    assert wide == 0 or tiles_n * block_n + (wide - 1) * extra_n < n
    whole = n // block_n
    if whole * (block_n + extra_n) >= n:
        assert tiles_n == whole
    else:  # as few as possible, all of them wide but perhaps the last ones
        assert tiles_n == -(-n // (block_n + extra_n))


@pytest.mark.parametrize(
    ("n", "widths", "expected"),
    [
        (4104, (256, 32), (16, 1)),
        (1032, (256, 32), (4, 1)),
        (4096, (256, 32), (16, 0)),
        (72, (64, 64), (1, 1)),
    ],
)
def test_a_few_columns_more_than_whole_tiles_are_a_wider_tile(n, widths, expected):
    assert tiles_side_by_side(kwargs_of(*widths), n) == expected


def test_without_further_columns_or_where_all_are_wide_there_is_one_width():
    assert tiles_side_by_side(kwargs_of(128, 0, spread=False), 300) == (3, 3)
    assert tiles_side_by_side(kwargs_of(128, 64, spread=False), 300) == (2, 2)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(pruning, "shared_memory_bytes", lambda: 232448)
    args = {"splits": 1, "programs": 132, "wanted": candidates.NAMES.index("auto"), "SCHEDULE": "grouped"}
    args |= {"OUT": "bf16", "TENSOR_MEMORY": False, "a_alignment": 128, "b_alignment": 128}
    args |= {"TRANS_A": False, "TRANS_B": True}
    return lambda m, n, k: {"M": m, "N": n, "K": k, **args}


def test_a_spread_config_is_tried_where_it_saves_a_column_of_tiles_and_only_there(call):
    for n in (4096, 4104, 4352, 4384):
        for config in prune(GLUON_CANDIDATES, call(4096, n, 4096)):
            kwargs = config.kwargs
            assert saves_tiles(kwargs, call(4096, n, 4096))
            if kwargs["SPREAD"]:
                assert tiles_side_by_side(kwargs, n)[0] < -(-n // kwargs["BLOCK_N"])
    of_tensors = [config for config in GLUON_CANDIDATES if not config.kwargs["JOINED"]]
    first = prune([config for config in of_tensors if config.num_ctas == 1], call(4100, 4104, 4104))[0].kwargs
    assert (first["BLOCK_M"], first["BLOCK_N"], first["EXTRA_N"], first["SPREAD"]) == (128, 256, 32, True)


def test_a_config_that_saves_nothing_still_runs_if_there_is_no_other(call):
    (spread, *_) = [config for config in GLUON_CANDIDATES if config.kwargs["SPREAD"]]
    assert prune([spread], call(4096, 4096, 4096)) == [spread]


def test_an_estimate_of_several_waves_has_the_mean_of_both_widths_and_one_wave_takes_as_long_as_the_wider(
    call,
):
    spread = next(config.kwargs for config in GLUON_CANDIDATES if config.kwargs["SPREAD"])
    narrow = {**spread, "EXTRA_N": 0, "SPREAD": False}
    wide = {**spread, "SPREAD": False}
    several, one = call(128 * 132, 4104, 8192), call(128, 4104, 8192)
    more = estimated_clocks(spread, several) - estimated_clocks(narrow, {**several, "N": 4096})
    assert 0 < more < 0.05 * estimated_clocks(narrow, {**several, "N": 4096})
    assert estimated_clocks(spread, one) == pytest.approx(estimated_clocks(wide, one), rel=0.01)
