"""The benchmarks of persistent_matmul and elementwise_add: shapes, records without a GPU, runs on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import torchrun

from benchmarks import persistent_gemm as benchmark
from benchmarks.common.cases import geometric_means

PROGRAM, ADD = (f"benchmarks.{name}" for name in ("persistent_gemm", "elementwise_add"))


def arms_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    record = json.loads(path.read_text())
    (case,) = record["cases"]
    return record, {arm["name"]: arm for arm in case["arms"]}


def test_means_are_of_cases_in_which_both_ran():
    cases = [
        {"arms": [{"name": "cuBLAS", "ms": 2.0}, {"name": "ours", "ms": 1.0}]},
        {"arms": [{"name": "cuBLAS", "ms": 1.0}, {"name": "ours", "ms": 2.0}]},
        {"arms": [{"name": "cuBLAS", "ms": 1.0}, {"name": "ours", "unavailable": "no"}]},
    ]
    record = {"cases": cases, "ratios": [{"name": "cuBLAS / ours", "of": "cuBLAS", "to": "ours"}]}
    assert geometric_means(record) == {"cuBLAS / ours": {"mean": 1.0, "least": 0.5, "cases": 2}}


def test_a_record_says_which_operands_were_copied():
    values = dict.fromkeys(benchmark.tuned_gemm.keys, 0) | {"a_alignment": 128, "b_alignment": 16}
    problem = benchmark.Problem(
        benchmark.Shape(64, 72, 520), torch.bfloat16, torch.device("cpu"), b_rows=False
    )

    def copied(**changed: int) -> list[str]:
        key = (*(values | changed).values(), "torch.int32", "torch.float32")
        return benchmark.what_was_copied("gemm", key, problem)

    assert copied() == ["a"]
    assert copied(a_alignment=16) == []
    assert copied(b_alignment=128) == ["a", "b"]
    assert benchmark.what_was_copied("plain_gemm", (64, 72, 520), problem) == []
    problem.out = problem.out[:, 1:]
    assert copied() == ["a", "out"]


@pytest.mark.gpu
def test_on_a_gpu_every_arm_is_right_and_timed(tmp_path):
    sizes = ("--m", "1024", "--n", "1000", "--k", "512")
    result = torchrun(
        PROGRAM, *sizes, "--json", str(tmp_path / "record.json"), "--iterations", "5", "--parts"
    )
    assert result.returncode == 0, result.stderr
    _, arms = arms_of(tmp_path / "record.json")
    timed = {name: arm for name, arm in arms.items() if "unavailable" not in arm}
    assert {name for name in arms if not name.startswith("QuACK")} <= set(timed)  # QuACK need not be there
    assert all(0 < arm["ms"] < 50 for arm in timed.values())


@pytest.mark.gpu
def test_on_a_gpu_all_sums_are_right_and_timed(tmp_path):
    sizes = ("--rows", "2048", "--columns", "2048", "--iterations", "5")
    result = torchrun(ADD, *sizes, "--json", str(tmp_path / "record.json"))
    assert result.returncode == 0, result.stderr
    _, arms = arms_of(tmp_path / "record.json")
    assert not [arm for arm in arms.values() if "unavailable" in arm]
