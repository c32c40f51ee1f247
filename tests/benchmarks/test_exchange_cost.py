"""The benchmark of exchanges: its fit, its simulated ranks, and that it ends with its tables."""

from __future__ import annotations

import json

import pytest
from programs import run_program

from benchmarks.tuner import exchange_cost
from dist_autotune.search.messages import RunReport

PROGRAM = "benchmarks.tuner.exchange_cost"


def test_a_fit_finds_the_coefficients_and_tells_what_it_cannot_explain():
    rows = [[float(contexts), float(bans)] for contexts in (1, 2, 5) for bans in (0, 1, 4)]
    values = [100 + 40 * contexts + 7 * bans for contexts, bans in rows]
    assert exchange_cost.fit(rows, values) == {"coefficients": [100.0, 40.0, 7.0], "largest_error": 0.0}
    assert exchange_cost.fit(rows, [values[0] + 50, *values[1:]])["largest_error"] > 10


@pytest.mark.parametrize("size", [2, 33, 40])
def test_simulated_ranks_exchange_what_real_ones_do(size):
    payload = RunReport(facts={"the tuned function": {"f": 0}}).encode()
    cost = exchange_cost.simulate(size, payload)
    assert cost["messages"] == 2 * size  # to the hub and back
    assert size * len(payload) < cost["bytes"] < 10 * size * (len(payload) + 60)
    assert cost["hub_ms"] > 0
    assert cost["merge_ms"] > 0


def test_the_program_ends_with_tables_and_a_record(tmp_path):
    options = ("--ranks", "2", "--simulated", "34", "--contexts", "1", "2", "--calls", "20")
    printed = run_program(PROGRAM, *options, "--json", "record.json", ranks=1)
    found = json.loads((tmp_path / "record.json").read_text())
    assert {"opening", "fits"} == found["bytes"].keys()
    fitted = found["bytes"]["fits"]["a run, payload: a, per context, per ban"]
    assert all(coefficient > 20 for coefficient in fitted["coefficients"])
    assert found["real"][0]["ms"]["settled call with vote"]["median"] > 0
    assert f"| 2 | {found['real'][0]['round_trip_ms']['median']:.4f}" in printed
    assert "| 34 | 10 |" in printed
