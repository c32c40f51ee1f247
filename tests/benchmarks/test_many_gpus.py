"""benchmarks/many_gpus.sh: what it refuses, and a part of it on CPU ranks."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120


def run(*arguments: str, scripts: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script where no GPU is seen; `scripts` come first on the path."""
    path = [str(directory) for directory in (scripts, Path(sys.executable).parent) if directory]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*path, os.environ["PATH"]]),
        "VIRTUAL_ENV": sys.prefix,
    }
    command = [str(ROOT / "benchmarks/many_gpus.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture
def no_gpu(tmp_path: Path) -> Path:
    """Return a directory whose nvidia-smi sees nothing."""
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    return tool.parent


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["speed"], "no part or option speed"),
        (["--fast"], "no part or option --fast"),
        (["--out"], "--out needs a directory"),
        (["check"], "2 or more ranks are needed, here is 0 GPU"),
        (["--nproc", "2", "--out", "/dev/null/x", "check"], "cannot make the directory /dev/null/x"),
    ],
    ids=["part", "option", "value", "GPUs", "directory"],
)
def test_bad_arguments_end_it_with_the_reason(arguments: list[str], reason: str, no_gpu: Path) -> None:
    ended = run(*arguments, scripts=no_gpu)

    assert ended.returncode != 0
    assert reason in ended.stderr


def test_a_part_leaves_its_output_and_what_no_longer_fits_is_named(tmp_path: Path, no_gpu: Path) -> None:
    out = tmp_path / "out"
    ended = run("--nproc", "2", "--out", str(out), "--limit-s", "90", "check", "soak", "step", scripts=no_gpu)

    assert ended.stdout.splitlines()[-1] == "== failed: none; to be run: soak step"
    assert ended.returncode == 3
    assert "calls=20 wrong=0 hung=0" in (out / "check.log").read_text()
    assert not (out / "soak.log").exists()


def test_the_modules_that_it_starts_exist() -> None:
    text = (ROOT / "benchmarks/many_gpus.sh").read_text()
    modules = {*re.findall(r"-m (benchmarks[.\w]+)", text)}
    modules |= {f"benchmarks.{name}" for name in re.findall(r"[{=]\w* record (\w+)", text)}
    assert len(modules) >= 10
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
