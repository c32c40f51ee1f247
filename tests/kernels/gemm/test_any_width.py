"""Which calls are offered which candidates: tiles of any width (`JOINED`), and what an estimate leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from gemm_runs import SHARED_BYTES, arguments

from dist_autotune.kernels.compat import HAS_INLINE_PTX
from dist_autotune.kernels.gemm import pruning
from dist_autotune.kernels.gemm.configs import (
    GLUON_CANDIDATES,
    blocks_of,
    in_boxes,
    operand_bytes,
    set_blocks,
)
from dist_autotune.kernels.gemm.pruning import (
    MOST_TRIALS,
    NEVER_BEST,
    estimated_clocks,
    fits,
    no_wider_than_need_be,
    prune,
    saves_tiles,
)
from dist_autotune.kernels.matrices import Block, Matrix, describe

NEEDS_39 = pytest.mark.skipif(not HAS_INLINE_PTX, reason="such candidates are there since Triton 3.9")


pytestmark = pytest.mark.usefixtures("h200")


def config_of(
    blocks: tuple[int, int, int], extra_n: int = 0, *, warps: int = 8, **changed: Any
) -> triton.Config:
    kwargs = {"VARIANT": "cooperative", "BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "BLOCK_K": blocks[2]}
    kwargs |= {"EXTRA_N": extra_n, "NUM_BUFFERS": 4, "STORE_N": 64, "STORE_BUFFERS": 1, "GROUP_M": 8}
    kwargs |= {"JOINED": False, "SWAP_AB": False}
    return triton.Config(kwargs | changed, num_warps=warps, num_stages=1)


SWAPPED = config_of((128, 128, 64), 48, warps=4, JOINED=True, VARIANT="pingpong", SWAP_AB=True)
JOINED = config_of((128, 128, 64), 48, JOINED=True)


def new_of(configs: list[triton.Config]) -> list[triton.Config]:
    return [config for config in configs if config.kwargs["JOINED"]]


# ---- which calls may use them


@pytest.mark.parametrize(
    ("m", "n", "tried"),
    [
        pytest.param(1056, 2048, True, id="16 x 6 instead of 9 x 12"),
        pytest.param(2048, 1056, False, id="16 x 6 as it is"),
        pytest.param(4096, 4096, False, id="the same either way"),
        pytest.param(128, 176, False, id="one tile instead of two"),
    ],
)
def test_tiles_are_swapped_where_they_are_fewer(m, n, tried):
    assert saves_tiles(SWAPPED.kwargs, arguments(M=m, N=n)) is tried
    assert saves_tiles({**SWAPPED.kwargs, "SWAP_AB": False}, arguments(M=m, N=n))
    other = config_of((128, 128, 64))
    assert (SWAPPED in prune([SWAPPED, other], arguments(M=m, N=n))) is tried


@pytest.mark.parametrize(
    ("changed", "joined"),
    [
        pytest.param({}, True, id="A by rows, a weight"),
        pytest.param({"TRANS_A": True}, False, id="A by columns"),
        pytest.param({"TRANS_B": False}, False, id="B by rows"),
        pytest.param({"programs": 1}, True, id="one program"),
        pytest.param({"TENSOR_MEMORY": True}, False, id="Blackwell"),
    ],
)
@NEEDS_39
def test_the_candidates_of_a_call(changed, joined, monkeypatch):
    monkeypatch.setattr(pruning, "MOST_TRIALS", len(GLUON_CANDIDATES))
    tried = prune(GLUON_CANDIDATES, arguments(**changed))
    assert any(config.kwargs["JOINED"] for config in tried) == joined
    assert len(tried) > len(new_of(tried))


@NEEDS_39
def test_every_candidate_fits_hopper_and_is_what_the_kernel_can_run():
    for config in new_of(GLUON_CANDIDATES):
        kwargs = config.kwargs
        assert fits(config, 2, SHARED_BYTES, tensor_memory=False)
        assert kwargs["BLOCK_M"] % (64 * consumers(config)) == 0
        assert kwargs["BLOCK_M"] >= 16 * config.num_warps
        if kwargs["JOINED"]:
            width = kwargs["BLOCK_N"] + kwargs["EXTRA_N"]
            assert width % 8 == 0
            assert kwargs["STORE_N"] <= width <= 256
            assert kwargs["BLOCK_K"] == 64
            assert kwargs["STORE_BUFFERS"] > 0


def consumers(config: triton.Config) -> int:
    return config.num_warps // 4


# ---- blocks


def test_of_fewer_rows_than_a_block_only_those_are_loaded():
    sizes = {"TRANS_A": False, "TRANS_B": True, "M": 16, "N": 4096}
    assert blocks_of({**config_of((256, 128, 64)).kwargs, **sizes})["a_desc"] == Block(16, 64)


@pytest.mark.parametrize("width", range(72, 257, 8))
def test_boxes_fill_a_slot_of_the_ring(width):
    block_n, extra_n = in_boxes(width)
    kwargs = config_of((128, block_n, 64), extra_n, JOINED=True).kwargs
    for columns in (4096, width - 8):  # however few there are: a slot is as wide as the instruction
        blocks = blocks_of({**kwargs, "TRANS_A": False, "TRANS_B": True, "M": 4096, "N": columns})
        box, further = blocks["b_desc"].rows, blocks["extra_desc"].rows
        assert block_n % box == extra_n % further == 0
        assert {box & (box - 1), further & (further - 1), box % 8, further % 8} == {0}  # the swizzle's period
    one_slot = operand_bytes({**kwargs, "NUM_BUFFERS": 1}) - 128 * 64 * 2
    assert one_slot == width * 64 * 2


def test_swapped_tiles_have_rows_of_b_and_are_stored_by_columns():
    sizes = {"TRANS_A": False, "TRANS_B": True, "M": 2040, "N": 4104}
    blocks = blocks_of({**SWAPPED.kwargs, **sizes})
    assert list(blocks) == ["a_desc", "b_desc", "extra_desc", "c_desc"]
    assert blocks == {
        "a_desc": Block(128, 64),
        "b_desc": Block(128, 64),
        "extra_desc": Block(16, 64),
        "c_desc": Block(64, 128),
    }


def test_the_further_columns_of_swapped_tiles_are_rows_of_a_and_of_the_next_config_columns_of_b_again():
    def matrix(address: int, rows: int, pitch: int) -> Matrix:
        return Matrix(address, rows, 1368, pitch, torch.bfloat16, transposed=False)

    a, b, c = matrix(1 << 20, 2040, 1376), matrix(1 << 30, 4104, 1384), matrix(1 << 40, 2040, 4104)
    names = ("a_desc", "b_desc", "extra_desc", "c_desc")
    args = dict(zip(names, (describe(m, Block(8, 64)) for m in (a, b, b, c)), strict=True))
    args |= {"TRANS_A": False, "TRANS_B": True, "M": 2040, "N": 4104}
    for config, further in ((JOINED, b), (SWAPPED, a), (SWAPPED, a), (JOINED, b)):
        set_blocks({**args, **config.kwargs})
        found = args["extra_desc"]
        assert (found.base, found.shape) == (further, [further.rows, 1368])
        assert found.strides == [further.pitch, 1]
        assert [args[name].base for name in ("a_desc", "b_desc", "c_desc")] == [a, b, c]
        blocks = blocks_of({**args, **config.kwargs})
        assert [args[name].block_shape for name in names] == [list(blocks[name][:2]) for name in names]


# ---- which widths are tried


def columns(configs: list[triton.Config]) -> list[int]:
    return [config.kwargs["BLOCK_N"] + config.kwargs["EXTRA_N"] for config in configs]


@pytest.mark.parametrize(
    ("n", "tried"),
    [
        pytest.param(80, [80], id="one tile"),
        pytest.param(152, [80, 152], id="two, or one"),
        pytest.param(300, [80, 104, 152], id="four, three, two"),
        pytest.param(320, [80, 112, 160], id="four, three, two: 120 are three as well"),
        pytest.param(5120, [80, 104, 112, 120, 152, 160, 208], id="each as many as no other"),
    ],
)
def test_of_as_many_tiles_the_narrowest_are_tried(n, tried):
    widths = (80, 104, 112, 120, 152, 160, 208)
    offered = [config_of((128, width - width % 64, 64), width % 64, JOINED=True) for width in widths]
    assert columns(no_wider_than_need_be(offered, arguments(N=n))) == tried
    assert columns(no_wider_than_need_be(offered[::-1], arguments(N=n))) == tried[::-1]


# ---- the estimate: what it leaves out of the trials has never won

RECORDS = Path(__file__).parents[3] / "docs" / "benchmarks"
ALIGNMENTS = ("a_alignment", "b_alignment")


def is_among(winner: str, configs: list[Any]) -> bool:
    """Return whether a config of a record is one of these, which may have more arguments.

    Without those that the body had then, and nobody uses any more.
    """
    for gone in (", STAGGER: False", ", SPREAD: False", ", TEAMS: 1", ", CTAS: 1", ", STREAM_K: 0"):
        winner = winner.replace(gone, "")
    return any(set(winner.split(", ")) <= set(str(config).split(", ")) for config in configs)


def recorded_winners() -> list[Any]:
    """Return (arguments, config) of every choice of `auto` in the records; not of those of a newer Triton."""
    found = {}
    for path in sorted(RECORDS.glob("persistent_gemm_*1xH200_*.json")):
        for case in json.loads(path.read_text())["cases"]:
            for context in case["tuned"]["contexts"]:
                if context["kernel"] == "gemm" and context["status"] != "partial":
                    m, n, k, *further = context["key"]
                    m, n, k = int(m), int(n), int(k)
                    if further[1] != "132":  # a record of when K could be split: by 1
                        splits, *further = further
                        further = further if splits == "1" else ["split"]
                    variant = context["config"].split(", ")[0].removeprefix("VARIANT: ")
                    known = variant not in NEVER_BEST and is_among(context["config"], GLUON_CANDIDATES)
                    if further[0] == "0" and known:
                        alignments = further[2:4]  # not in records before operands were copied
                        known = all(text.isdigit() for text in alignments)
                        changed = dict(zip(ALIGNMENTS, map(int, alignments), strict=True)) if known else {}
                        found[path.stem, case["case"], context["config"]] = arguments(m, n, k, **changed)
    return [pytest.param(args, config, id=f"{stem} {case}") for (stem, case, config), args in found.items()]


@pytest.mark.parametrize(("args", "winner"), recorded_winners())
def test_no_config_that_has_won_is_left_out(args, winner):
    assert is_among(winner, prune(GLUON_CANDIDATES, args))


@pytest.mark.parametrize("sizes", [(8192, 8192, 8192), (4100, 4104, 4104), (304, 5120, 5120), (64, 64, 64)])
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_no_call_tries_more_than_a_few_dozen_configs_and_the_most_promising_comes_first(sizes, out):
    args = arguments(*sizes, OUT=out)
    tried = prune(GLUON_CANDIDATES, args)
    clocks = [estimated_clocks(config.kwargs, args) for config in tried]
    assert 0 < len(tried) <= MOST_TRIALS
    assert clocks == sorted(clocks)
