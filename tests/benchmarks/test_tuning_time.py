"""The benchmarks of how long tuning takes: from the start of the processes, and in steps of a loop."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from benchmarks.common import render
from benchmarks.tuner import tuning_time
from benchmarks.tuner.tuning_time import ARMS, Start

PROGRAM = "benchmarks.tuner.tuning_time"


def start(settled_s: float, runs: int = 20) -> Start:
    return Start(settled_s, 4.0, 0.5, 0.25, settled_s - 4.75, 1.0, 2.0, 0.125, runs)


def start_forked(
    arguments: list[str], ranks: int, directory: Path, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """Stand for `start_ranks`: ranks that have imported torch already."""
    environment = environment | {tuning_time.STARTED: repr(time.time())}
    run_program(PROGRAM, "--one-rank", *arguments, ranks=ranks, environment=environment)
    return [json.loads(Path(f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def test_a_warm_start_tries_nothing_and_the_parts_explain_the_whole(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(tuning_time, "start_ranks", start_forked)
    monkeypatch.setattr(tuning_time.subprocess, "run", lambda *args, **kwargs: None)  # warms the disk
    command = [PROGRAM, "--rounds", "1", "--json", "record.json", "--commit", "0ff1ce"]
    monkeypatch.setattr(sys, "argv", command)
    tuning_time.main()
    record = json.loads((tmp_path / "record.json").read_text())
    (found,) = record["rounds"]
    assert list(found) == list(ARMS)
    for values in found.values():
        begun = values["imports_s"] + values["group_s"] + values["opening_s"]
        assert values["settled_s"] == pytest.approx(begun + values["session_s"], abs=0.01)
        spent = values["compiling_s"] + values["runs_s"] + values["exchanges_s"]
        assert 0 < spent <= values["session_s"]
    assert found["cold"]["runs"] > found["all warm"]["runs"] == 1
    assert record["command"] == "python -m benchmarks.tuner.tuning_time --ranks=2 --dtype=bf16 --rounds=1"
    page = render.page(record)
    assert "| cold |" in page
    assert "commit 0ff1ce" in page
    assert "all warm" in capsys.readouterr().out
