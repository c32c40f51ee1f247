"""Which calls are offered which candidates: tiles of any width (`JOINED`), and what an estimate leaves."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from gemm_runs import arguments

from dist_autotune.kernels.gemm.configs import GLUON_CANDIDATES, blocks_of, set_blocks
from dist_autotune.kernels.gemm.pruning import MOST_TRIALS, NEVER_BEST, estimated_clocks, prune
from dist_autotune.kernels.matrices import Block, Matrix, describe

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


# ---- blocks


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
    assert prune([each for each in GLUON_CANDIDATES if each.kwargs["VARIANT"] == "pipelined"], args)
    assert clocks == sorted(clocks)
