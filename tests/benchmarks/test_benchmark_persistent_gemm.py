"""The benchmarks of persistent_matmul and elementwise_add: shapes, records without a GPU, runs on one."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import torchrun

PROGRAM, ADD = (f"benchmarks.{name}" for name in ("persistent_gemm", "operations.elementwise_add"))


def arms_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    record = json.loads(path.read_text())
    (case,) = record["cases"]
    return record, {arm["name"]: arm for arm in case["arms"]}


@pytest.mark.gpu
def test_on_a_gpu_every_arm_is_right_and_timed(tmp_path):
    sizes = ("--m", "1024", "--n", "1000", "--k", "512")
    result = torchrun(
        PROGRAM, *sizes, "--json", str(tmp_path / "record.json"), "--iterations", "5", "--parts"
    )
    assert result.returncode == 0, result.stderr
    _, arms = arms_of(tmp_path / "record.json")
    timed = {name: arm for name, arm in arms.items() if "unavailable" not in arm}
    assert set(arms) == set(timed)
    assert all(0 < arm["ms"] < 50 for arm in timed.values())


@pytest.mark.gpu
def test_on_a_gpu_all_sums_are_right_and_timed(tmp_path):
    sizes = ("--rows", "2048", "--columns", "2048", "--iterations", "5")
    result = torchrun(ADD, *sizes, "--json", str(tmp_path / "record.json"))
    assert result.returncode == 0, result.stderr
    _, arms = arms_of(tmp_path / "record.json")
    assert not [arm for arm in arms.values() if "unavailable" in arm]
