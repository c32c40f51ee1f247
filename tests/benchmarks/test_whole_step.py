"""What the benchmark of a whole step says of its times: the best family, what was found, what bounds it."""

from __future__ import annotations

import pytest

from benchmarks.operations.step_bounds import Busy, busy_of
from benchmarks.tuner.whole_step import explained_by


def measured(**ms):
    arms = [{"name": name, "ms": each} for name, each in ms.items()]
    return {"arms": [*arms, {"name": "broken", "unavailable": "no device"}]}


TIMES = {"launches": 10.0, "run": 6.4, "all: 100": 6.0, "all: 132": 10.0}


def test_the_gain_that_was_found_is_a_part_of_the_best_familys():
    facts = explained_by(measured(**TIMES, **{"products alone": 5.0, "all-reduces alone": 4.0}), 1.0)
    assert (facts["best_family_plan"], facts["gain_found_percent"]) == ("all: 100", 90.0)


@pytest.mark.parametrize(
    ("products", "links", "host", "expected"), [(5, 4, 1, "device"), (4, 5, 1, "links"), (4, 5, 6, "host")]
)
def test_the_longest_part_bounds_the_step(products, links, host, expected):
    parts = {"products alone": products, "all-reduces alone": links}
    assert explained_by(measured(**TIMES, **parts), host)["bound_by"] == expected


def test_where_no_family_plan_is_faster_nothing_was_to_be_found():
    times = {"launches": 5.0, "run": 5.0, "all: 132": 5.0, "products alone": 4.0, "all-reduces alone": 1.0}
    assert explained_by(measured(**times), 1.0)["gain_found_percent"] is None


def test_a_profile_tells_kernels_from_collectives_and_counts_what_overlaps_once():
    ran = [
        ("spin_kernel(long)", 0.0, 10.0),
        ("matmul", 10.0, 14.0),
        ("norm", 13.0, 15.0),
        ("ncclDevKernel_AllGather", 14.0, 18.0),
        ("FSDP::all_gather", 12.0, 19.0),
    ]
    assert busy_of(ran) == Busy(span_ms=8.0, kernels_ms=5.0, links_ms=4.0, both_ms=1.0)
    assert busy_of(ran[:1]) is None
