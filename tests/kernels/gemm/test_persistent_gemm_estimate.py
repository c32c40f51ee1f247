"""What the estimate says of configs, and that what it leaves out of the trials has never won."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gemm_runs import arguments

from dist_autotune.kernels.gemm.configs import GLUON_CANDIDATES
from dist_autotune.kernels.gemm.pruning import (
    MOST_TRIALS,
    estimated_clocks,
    prune,
)

RECORDS = Path(__file__).parents[3] / "docs" / "benchmarks"
ALIGNMENTS = ("a_alignment", "b_alignment")


pytestmark = pytest.mark.usefixtures("h200")


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
                    if further[0] == "0" and is_among(context["config"], GLUON_CANDIDATES):
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
