"""What the package promises whoever imports it: the names, the cost, and that nothing changes."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WITHOUT = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
"""

# One import of torch and triton, and forks that import ours. Figures are of the processor's time, because a
# busy machine may take any time it likes.
IMPORTS = """
import os, time, traceback

def fork(name, program):
    if os.fork() == 0:
        for number, ending in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{ending}", os.O_WRONLY | os.O_CREAT), number)
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(0)
    os.wait()

started = time.process_time()
import torch, torch.distributed
fork("without triton", "import sys; sys.argv[1] = 'triton'; from dist_autotune import contextual_autotune")
import triton
torch_ms = 1000 * (time.process_time() - started)
for number in range(4):
    fork(f"import {number}", TIME_THE_IMPORT)
fork("look around", LOOK_AROUND)
print(torch_ms)
"""

TIME_THE_IMPORT = """
import time
started = time.process_time()
from dist_autotune import StepTuner, contextual_autotune, tunable
print(1000 * (time.process_time() - started))
"""

LOOK_AROUND = """
import sys, triton
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


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return what reads what a fork has printed, or its errors, by name and ending."""
    directory = tmp_path_factory.mktemp("imports")
    programs = f"{TIME_THE_IMPORT=}\n{LOOK_AROUND=}\nimport os; os.chdir({str(directory)!r})\n"
    done = run_python(WITHOUT + programs + IMPORTS, "nvshmem,cuda,nvidia,hypothesis,pytest")
    assert done.stderr == ""
    (directory / "torch.out").write_text(done.stdout)
    return lambda name: (directory / name).read_text()


def test_the_import_changes_nothing_and_loads_nothing_that_only_some_need(imported):
    assert imported("look around.err") == ""  # it can be imported without a GPU and without those
    loaded = imported("look around.out").split()
    assert "dist_autotune" in loaded
    assert {"typer", "dist_autotune.kernels"}.isdisjoint(loaded)
    # Nor what the first call of a tuned function needs: most of the package, and the lock of its files.
    assert {"dist_autotune.tuner.session", "dist_autotune.logs.records", "filelock"}.isdisjoint(loaded)


def test_the_import_costs_less_than_a_sixth_of_torch_and_triton(imported):
    # A share, not milliseconds: a slow or busy machine stretches both.
    # The first of ours may compile the sources.
    torch_ms, first, *others = map(
        float, map(imported, ["torch.out", *(f"import {n}.out" for n in range(4))])
    )
    assert min(others) < torch_ms / 6, (torch_ms, first, others)


def test_an_import_without_triton_says_what_is_missing(imported):
    error = "ModuleNotFoundError: No module named 'triton'"
    assert imported("without triton.err").splitlines()[-1] == error


def test_the_package_imports_neither_torch_nor_triton_before_they_are_needed():
    modules = ("cli.commands", "script.tuned_program", "reports.tables", "tuner.report")
    imports = ", ".join(f"dist_autotune.{module}" for module in modules)
    done = run_python(f"{WITHOUT}import {imports}", "torch,triton")
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_suite_is_run_on_the_oldest_supported_triton_and_on_the_newest():
    oldest = re.search(r'"triton>=(\d+\.\d+);', (ROOT / "pyproject.toml").read_text()).group(1)
    ci = (ROOT / ".ci" / "run").read_text()
    assert f"environment oldest triton=={oldest}.0 " in ci
    for function in ("start_tests", "end_tests"):
        assert set(re.findall(rf"{function} (\w+)$", ci, re.MULTILINE)) == {"oldest", "newest"}


def test_every_package_directory_is_in_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
        for name, folder in {"dist_autotune": "dist_autotune", "dist_autotune.kernels": "kernels"}.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(found)
