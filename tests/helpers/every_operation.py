"""All operations over symmetric memory, for tests that hold for each of them."""

from __future__ import annotations

import pytest
from ag_gemm_runs import GATHERING_ROWS
from ag_moe_runs import GATHERING
from gemm_ar_runs import REDUCING
from gemm_rs_runs import SCATTERING_SUMS
from moe_rs_runs import SCATTERING

DENSE = {
    "AllGatherGemm": GATHERING_ROWS,
    "GemmReduceScatter": SCATTERING_SUMS,
    "GemmAllReduce": REDUCING[None],
}
EXPERTS = {"AllGatherMoE": GATHERING, "MoEReduceScatter": SCATTERING}
EVERY = DENSE | EXPERTS
OF_ONE_WAY = {f"GemmAllReduce, {way}": runs for way, runs in REDUCING.items() if way is not None}
WITH_COLLECTIVES = {name: runs for name, runs in EVERY.items() if name != "GemmAllReduce"}


def each(table):
    """Return a mark: the test is given each of these operations as `runs`."""
    return pytest.mark.parametrize("runs", table.values(), ids=table)
