"""That GemmReduceScatter's plain kernel orders its signals as the proof asks."""

from __future__ import annotations

import re

import pytest
from plain_kernels import SCATTER

pytestmark = pytest.mark.aot

CANDIDATES = SCATTER.candidates


def of_tiles(ttgir):
    """Return in program order what the signals must be ordered against, and the signals."""
    patterns = {
        "multiply": r"warp_group_dot ",
        "poll": r"atomic_rmw add, acquire, sys",
        "load": r"tt\.load .*tensor<",
        "store": r"tt\.store .*tensor<",
        "barrier": r"gpu\.barrier|ttg\.barrier",
        "count": r"atomic_rmw add, acq_rel, gpu",
        "signal": r"atomic_rmw exch, release, sys, .*%c1_i32",
    }
    lines = ttgir[ttgir.index("scf.while") :].splitlines()
    return [name for line in lines for name, pattern in patterns.items() if re.search(pattern, line)]


@pytest.mark.parametrize("config", CANDIDATES[:1] + CANDIDATES[6:7], ids=["halves", "whole tiles"])
def test_sums_are_loaded_behind_the_poll_and_handed_over_behind_the_stores(config):
    compiled = SCATTER.compile(config)
    order = of_tiles(compiled.asm["ttgir"])
    halves = 2 if config.kwargs["EPILOGUE_SUBTILE"] else 1
    polls = ["poll"] * 2  # one in front of its loop, one in it
    own_rows = [*polls, *polls, *["load", "store"] * halves]  # for the first row, then for those of the tile
    handed_over = [*["store"] * halves, "barrier", "count", "barrier", "signal"]
    assert order[: order.index("signal") + 1] == ["multiply", *own_rows, *handed_over]
    # Of a TMA store the program does not know when it is done.
    assert "async_tma_copy_local_to_global" not in compiled.asm["ttgir"]


def test_signals_have_the_scope_of_those_who_read_them():
    ptx = SCATTER.compile(CANDIDATES[0]).asm["ptx"]
    assert "ld.global.sys.acquire" in ptx
    assert "atom.global.gpu.acq_rel.add" in ptx
    assert "atom.global.sys.release.exch" in ptx
    assert not re.search(r"atom\.global\.sys\.\S*add", ptx)  # a poll is a load
