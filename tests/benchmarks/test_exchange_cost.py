"""The benchmark of exchanges ends with its table and its record."""

from __future__ import annotations

import json

from programs import run_program

PROGRAM = "benchmarks.tuner.exchange_cost"


def test_the_program_ends_with_a_table_and_a_record(tmp_path):
    printed = run_program(PROGRAM, "--ranks", "2", "--calls", "20", "--json", "record.json", ranks=1)
    (found,) = json.loads((tmp_path / "record.json").read_text())["real"]
    assert all(cost["median"] > 0 for cost in found["ms"].values())
    assert {"1 contexts", "10 contexts", "settled call with vote", "settled call without"} == found[
        "ms"
    ].keys()
    assert f"| 2 | {found['round_trip_ms']['median']:.4f}" in printed
