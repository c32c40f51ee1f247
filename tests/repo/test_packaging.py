"""What the package promises whoever imports it: the names, the cost, and that nothing changes."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import dist_autotune

ROOT = Path(__file__).parents[2]

# Forks of a process that has imported torch and triton: one import of those, several figures. They are of the
# processor's time, because a busy machine may take any time it likes.
TIME_THE_IMPORT = """
import os, time
started = time.process_time()
import torch, torch.distributed, triton
print(1000 * (time.process_time() - started), flush=True)
for _ in range(4):
    if os.fork() == 0:
        started = time.process_time()
        from dist_autotune import StepTuner, contextual_autotune, tunable
        print(1000 * (time.process_time() - started), flush=True)
        os._exit(0)
    os.wait()
"""

WITHOUT = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
"""

IMPORT_AND_LOOK_AROUND = """
import triton
from triton import knobs
from triton.runtime.autotuner import Autotuner
before = [dict(vars(each)) for each in (Autotuner, knobs.autotuning, triton)]
from dist_autotune import *
assert [dict(vars(each)) for each in (Autotuner, knobs.autotuning, triton)] == before, "changed"
print(*sys.modules)
import dist_autotune.kernels, dist_autotune.kernels.symm  # conftest has left the tree: these are installed
"""


def run_python(*program: str) -> subprocess.CompletedProcess[str]:
    out = ("PYTHONDONTWRITEBYTECODE", "TRITON_INTERPRET")
    environ = {name: value for name, value in os.environ.items() if name not in out}
    command = [sys.executable, "-c", *program]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def test_exports_are_sorted_listed_once_and_there():
    names = dist_autotune.__all__
    assert list(names) == sorted(set(names))
    assert [name for name in names if not hasattr(dist_autotune, name)] == []


def test_the_import_changes_nothing_and_loads_nothing_that_only_some_need():
    done = run_python(WITHOUT + IMPORT_AND_LOOK_AROUND, "nvshmem,cuda,nvidia,hypothesis,pytest")
    assert done.stderr == ""  # it can be imported without a GPU and without those
    loaded = done.stdout.split()
    assert "dist_autotune" in loaded
    assert {"matplotlib", "typer", "dist_autotune.kernels"}.isdisjoint(loaded)
    # Nor what the first call of a tuned function needs: most of the package, and the lock of its files.
    assert {"dist_autotune.tuner.session", "dist_autotune.logs.records", "filelock"}.isdisjoint(loaded)


def test_the_import_costs_less_than_a_sixth_of_torch_and_triton():
    # A share, not milliseconds: a slow or busy machine stretches both.
    # The first of ours may compile the sources.
    torch_ms, first, *others = map(float, run_python(TIME_THE_IMPORT).stdout.split())
    assert min(others) < torch_ms / 6, (torch_ms, first, others)


def test_an_import_without_triton_says_what_is_missing():
    done = run_python(WITHOUT + "from dist_autotune import contextual_autotune", "triton")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'triton'"


def test_the_package_imports_neither_torch_nor_triton_before_they_are_needed():
    modules = ("cli.commands", "script.tuned_program", "reports.html", "reports.trace", "tuner.report")
    imports = ", ".join(f"dist_autotune.{module}" for module in modules)
    done = run_python(f"{WITHOUT}import {imports}", "torch,triton,matplotlib")
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_suite_is_run_on_the_oldest_supported_triton_and_on_the_newest():
    (needed,) = [
        text for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if text.startswith("triton")
    ]  # fmt: skip
    oldest = re.match(r"triton>=(\d+\.\d+);", needed).group(1)
    ci = (ROOT / ".ci" / "run").read_text()
    assert re.search(rf"^  environment oldest triton=={oldest}\.0 ", ci, re.MULTILINE)
    assert re.search(r"^  environment newest & ", ci, re.MULTILINE)
    assert 'in_environment newest pip install --quiet "$work"/dist/*.whl' in ci  # with the registry's newest
    for function in ("start_tests", "end_tests"):
        assert set(re.findall(rf"{function} (\w+)$", ci, re.MULTILINE)) == {"oldest", "newest"}
    assert re.search(r"== oldest .*\n    \./launch\.sh test$", ci, re.MULTILINE)  # all
    begin = ci.index("  else\n")
    of_newest = re.findall(r" (tests/\S+)", ci[begin : ci.index("return $status", begin)])
    script = f"shopt -s failglob; printf '%s\\n' {' '.join(of_newest)}"
    shell = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = shell.stdout.split()
    assert all((ROOT / path).exists() for path in paths)
    places = {tuple(path.split("/")[1:3]) for path in paths}
    assert {"session", "aot"} <= {folder for folder, _ in places}
    assert {("unit", "triton_api"), ("unit", "compilation")} <= places
    folders = {path.parent.name for path in (ROOT / "tests" / "kernels").glob("*/test_*.py")}
    without_kernels = {"composed", "tp"}
    assert {name for folder, name in places if folder == "kernels"} == folders - without_kernels


def test_every_package_directory_is_in_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for name, folder in {"dist_autotune": "dist_autotune", "dist_autotune.kernels": "kernels"}.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(found)
