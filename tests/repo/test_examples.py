"""The examples, as a reader starts them: they end well, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--")


def output_of(directory: Path, *command: str | Path) -> str:
    """Return what the program prints; it has a cache of its own, and logs to `directory`."""
    result = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DIST_AUTOTUNE_CACHE_DIR": str(directory / "cache")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_matmul_tunes_two_contexts_and_takes_them_from_the_cache_at_the_second_start(tmp_path: Path) -> None:
    first, second = (output_of(tmp_path, EXAMPLES / "matmul.py", "--size", "32") for _ in range(2))
    assert re.search(r"^2 contexts in \d+ runs on 1 rank", first, re.M)
    assert re.search(r"^2 contexts in 1 run on 1 rank", second, re.M)
    for text in (first, second):
        assert float(text.rpartition("relative error against float32: ")[2]) < 1e-5


@pytest.mark.torchrun
@pytest.mark.slow
def test_ag_gemm_is_right_and_comes_from_the_cache_at_the_second_start(tmp_path: Path) -> None:
    first, second = (output_of(tmp_path, *TORCHRUN, EXAMPLES / "ag_gemm.py") for _ in range(2))
    assert "4 candidates" in first
    assert "everything came from the cache: 1 run, nothing tried" in second
    for text in (first, second):
        assert re.search(
            r"^equals all_gather \+ matmul: relative error \d\.\de[-+]\d\d on 2 ranks", text, re.M
        )


@pytest.mark.torchrun
@pytest.mark.slow
def test_overlap_tunes_the_same_kernel_three_ways(tmp_path: Path) -> None:
    text = output_of(tmp_path, *TORCHRUN, EXAMPLES / "overlap.py")
    rows = re.findall(r"^(.+?)  +\d+ x \d+ x \d+, \d programs +[\d.]+ ms +[\d.]+ ms$", text, re.M)
    assert rows == ["alone", "in the step, by its own time", "in the step, by run time"]
    logged = (tmp_path / ".autotune_logs" / "rank-1.log").read_text()
    for name in ("overlap: GEMM alone", "overlap: by kernel time", "overlap: by run time"):
        assert name in logged


@pytest.mark.torchrun
@pytest.mark.slow
def test_training_step_tunes_while_it_learns_and_keeps_the_ranks_alike(tmp_path: Path) -> None:
    for steps, runs in ((40, r"\d+ runs"), (5, "1 run")):
        text = output_of(tmp_path, *TORCHRUN, EXAMPLES / "training_step.py", "--steps", str(steps))
        assert re.search(rf"^6 contexts in {runs} on 2 ranks", text, re.M), text
        ends = rf"^{steps} steps, settled after step (\d+); loss ([\d.]+) at first, ([\d.]+) at"
        found = re.search(ends, text, re.M)
        assert found is not None, text
        assert float(found[3]) < float(found[2]) / 2
