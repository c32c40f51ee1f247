"""The benchmarks of persistent_matmul and elementwise_add: shapes, records without a GPU, runs on one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program, torchrun

from benchmarks import persistent_gemm as benchmark
from benchmarks.common import render
from benchmarks.common.cases import geometric_means
from benchmarks.common.ranks import ON_GPU
from benchmarks.common.records import INTERPRETER_NOTE

PROGRAM, ADD = (f"benchmarks.{name}" for name in ("persistent_gemm", "elementwise_add"))


def arms_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    record = json.loads(path.read_text())
    (case,) = record["cases"]
    return record, {arm["name"]: arm for arm in case["arms"]}


def test_without_a_gpu_it_ends_with_a_table_and_a_record_that_becomes_a_page(tmp_path):
    printed = run_program(PROGRAM, "--json", "record.json", "--commit", "0ff1ce", "--parts", ranks=1)
    assert INTERPRETER_NOTE in printed
    assert "cuBLAS / ours" in printed
    record, arms = arms_of(tmp_path / "record.json")
    timed = {name for name, arm in arms.items() if "unavailable" not in arm}
    schedulers = ("contiguous", "strided", "grouped", "chiplet", "dynamic")
    assert timed == {"cuBLAS", "ours", *(f"ours, {name}" for name in schedulers)}
    assert max(arms[name]["error"] for name in timed) < 8e-3  # one bfloat16 rounding
    assert arms["ours, graph"]["unavailable"] == "CUDA graphs need a GPU"
    contexts = record["cases"][0]["tuned"]["contexts"]
    assert {context["status"] for context in contexts} <= {"tuned", "cached"}
    page = render.page(record)
    assert "# Persistent GEMM, 1 x CPU" in page
    assert f"**{INTERPRETER_NOTE}**" in page


def test_without_a_gpu_the_sums_are_compared_bit_by_bit_and_timed(tmp_path):
    run_program(ADD, "--json", "record.json", "--commit", "0ff1ce", ranks=1)
    record, arms = arms_of(tmp_path / "record.json")
    errors = {name: arm.get("error") for name, arm in arms.items()}
    assert errors == {"copy": 0.0, "torch.add": 0.0, "ours": 0.0}
    assert "# Elementwise add, 1 x CPU" in render.page(record)


def test_it_tells_how_to_use_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["persistent_gemm.py", "--help"])
    with pytest.raises(SystemExit) as caught:
        benchmark.parse()
    assert caught.value.code == 0
    assert "--shapes {table,tests,ragged,all}" in capsys.readouterr().out


def test_a_list_of_shapes_is_refused_without_a_gpu(monkeypatch, capsys):
    if ON_GPU:
        return
    monkeypatch.setattr(sys, "argv", ["persistent_gemm.py", "--shapes", "all"])
    with pytest.raises(SystemExit):
        benchmark.parse()
    assert "--shapes all needs a GPU" in capsys.readouterr().err


def test_the_shapes_are_many_and_different():
    assert len(benchmark.RAGGED) >= 20
    assert len(set(benchmark.LISTS["all"])) == len(benchmark.LISTS["all"])


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


def test_a_page_names_what_was_copied():
    context = {"kernel": "gemm", "config": "BLOCK_M: 64", "timed": 3, "status": "tuned", "copied": ["a", "b"]}
    case = {"case": "1 x 2 x 3", "clocks": {}, "tuned": {"contexts": [context], "runs": 4}}
    page = render._tuned({"case_title": "M x N x K", "cases": [case]})
    assert "| BLOCK_M: 64; copied: a, b | 3 | 4 | tuned |" in page


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
