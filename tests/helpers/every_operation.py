"""All operations over symmetric memory, for tests that hold for each of them."""

import pytest
from dense_runs import (
    GATHERING_BY_MAIL,
    GATHERING_BY_STORES,
    GATHERING_ROWS,
    REDUCING,
    SCATTERING_SUMS,
    STORING_SUMS,
)
from expert_runs import GATHERING, SCATTERING, STORING_CHOSEN

DENSE = {
    "AllGatherGemm": GATHERING_ROWS,
    "GemmReduceScatter": SCATTERING_SUMS,
    "GemmAllReduce": REDUCING[None],
}
EXPERTS = {"AllGatherMoE": GATHERING, "MoEReduceScatter": SCATTERING}
EVERY = DENSE | EXPERTS
OF_ONE_WAY = {f"GemmAllReduce, {way}": runs for way, runs in REDUCING.items() if way is not None}
OF_ONE_WAY["AllGatherGemm, low-latency"] = GATHERING_BY_MAIL
OF_ONE_WAY["GemmReduceScatter, by stores"] = STORING_SUMS
OF_ONE_WAY["AllGatherGemm, by stores"] = GATHERING_BY_STORES
OF_ONE_WAY["MoEReduceScatter, by stores"] = STORING_CHOSEN
WITH_COLLECTIVES = {name: runs for name, runs in EVERY.items() if name != "GemmAllReduce"}
WAYS = {name: (runs, {}) for name, runs in (EVERY | OF_ONE_WAY).items()}  # to open each, with what options
WAYS |= {f"{name}, by collectives": (runs, {"collective": True}) for name, runs in WITH_COLLECTIVES.items()}


def each(table):
    """Return a mark: the test is given each of these operations as `runs`."""
    return pytest.mark.parametrize("runs", table.values(), ids=table)
