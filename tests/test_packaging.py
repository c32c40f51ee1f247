"""What the package promises whoever imports it: the names, the cost, and that nothing changes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dist_autotune

ROOT = Path(__file__).parents[1]

# Forks of a process that has imported torch and triton: one import of those, several figures.
TIME_THE_IMPORT = """
import os, time
import torch, torch.distributed, triton
for _ in range(4):
    if os.fork() == 0:
        started = time.perf_counter()
        import dist_autotune
        print(1000 * (time.perf_counter() - started), flush=True)
        os._exit(0)
    os.wait()
"""

IMPORT_AND_LOOK_AROUND = """
import sys
from triton.runtime.autotuner import Autotuner
before = dict(vars(Autotuner))
import dist_autotune
assert dict(vars(Autotuner)) == before, "the import changes Triton's Autotuner"
print(*sys.modules, sep="\\n")
"""


def run_python(program: str) -> list[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_exports_are_sorted_listed_once_and_there():
    names = dist_autotune.__all__
    assert list(names) == sorted(set(names))
    assert [name for name in names if not hasattr(dist_autotune, name)] == []


def test_the_import_changes_nothing_and_loads_nothing_that_only_some_need():
    loaded = run_python(IMPORT_AND_LOOK_AROUND)
    assert "dist_autotune" in loaded
    assert {"nvshmem", "matplotlib", "typer", "dist_autotune.kernels"}.isdisjoint(loaded)


def test_the_import_costs_less_than_50_ms_beside_torch_and_triton():
    first, *others = map(float, run_python(TIME_THE_IMPORT))  # the first may have to compile the sources
    assert statistics.median(others) < 50, (first, others)


def test_every_package_directory_is_in_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for name, folder in {"dist_autotune": "dist_autotune", "dist_autotune.kernels": "kernels"}.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(found)


@pytest.mark.parametrize("module", ["dist_autotune.kernels", "dist_autotune.kernels.symm"])
def test_the_workloads_are_importable_from_anywhere(module):
    run_python(f"import {module}")  # the conftest has left the tree: nothing is found by working directory
