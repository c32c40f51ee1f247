"""The benchmarks of reproducible bits, in small sizes."""

from __future__ import annotations

import json
from pathlib import Path

from programs import run_program


def test_classes_of_a_kernel_and_sessions_without_a_change_of_bits() -> None:
    arguments = ("--subjects", "add", "split", "--sessions", "2", "--json", "b.json")
    printed = run_program("benchmarks.tuner.bit_classes", *arguments)
    assert "add: 0 changes of bits in 2 sessions" in printed
    assert "split: 0 changes of bits in 2 sessions" in printed
    table = json.loads(Path("b.json").read_text())["table"]
    add, split = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    columns = ("kernel", "configs", "classes", "unsteady")
    assert [add[name] for name in columns] == ["pipelined_add", "2", "1", "0"]
    assert add["same bits ms"] == add["best ms"]
    assert [split[name] for name in ("kernel", "configs", "unsteady")] == ["split_matmul", "8", "0"]


def test_the_cost_of_hashing_is_printed() -> None:
    printed = run_program("benchmarks.tuner.output_hash", "--mib", "1", "--rounds", "1", ranks=1)
    (row,) = (line for line in printed.splitlines() if line.startswith("| 1 |"))
    assert all(float(cell) > 0 for cell in row.strip("| ").split("|"))
