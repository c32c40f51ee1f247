"""The session of tests on GPUs: what runs beside what, and that no test takes another's result along."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import ROOT
from gpu_cases import covering, covering_indices
from gpu_schedule import Job, Placed, Schedule

from dist_autotune.kernels.gemm.configs import GLUON_CANDIDATES

HELPERS = ROOT / "tests/helpers"

# ---- the schedule


def begun(schedule: Schedule[str], now_s: float = 0.0) -> list[Placed[str]]:
    placed = []
    while each := schedule.begin(now_s):
        placed.append(each)
    return placed


def texts(placed: list[Placed[str]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(" ".join(each.job.tests), each.devices) for each in placed]


def test_what_runs_alone_waits_for_all_others_and_has_its_device_for_itself():
    alone = [Job((f"alone {index}",), is_alone=True) for index in range(3)]
    schedule = Schedule([*alone, Job(("a",)), Job(("b",))], devices=2, at_once=4)
    first, second = begun(schedule)
    assert texts([first, second]) == [("a", (0,)), ("b", (1,))]
    schedule.end(first)
    assert texts(begun(schedule)) == [("alone 0", (0,))]
    schedule.end(second)
    assert texts(begun(schedule)) == [("alone 1", (1,))]


def test_some_candidates_have_every_value_of_every_field():
    some = covering(GLUON_CANDIDATES)
    assert len(some) < len(GLUON_CANDIDATES) / 2
    assert values_of(some) == values_of(GLUON_CANDIDATES)
    assert [GLUON_CANDIDATES[index] for index in covering_indices(GLUON_CANDIDATES)] == some


def values_of(candidates) -> set[tuple[str, str]]:
    return {(name, repr(value)) for each in candidates for name, value in each.all_kwargs().items()}


# ---- whole sessions, on devices that need not be there

CONFTEST = """
import gpu_session

def pytest_addoption(parser):
    gpu_session.add_options(parser)

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: on devices")
    config.pluginmanager.register(gpu_session.GpuSession(config, 2), "gpu_session")
"""
TESTS = """
import os, signal, subprocess, time
from pathlib import Path
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(2))
def test_passes(number):
    assert os.environ["CUDA_VISIBLE_DEVICES"] in ("0", "1")

@pytest.mark.gpu
def test_fails():
    print("printed before")
    assert 1 + 1 == 3, "the sum"

@pytest.mark.parametrize(
    "number", [pytest.param(0, marks=pytest.mark.gpu), pytest.param(1, marks=pytest.mark.gpu(limit_s=2))]
)
def test_hangs_once(number):
    if number == 1:
        Path("hangs.pid").write_text(str(os.getpid()))
        subprocess.run(["sleep", "600"], start_new_session=True)

@pytest.mark.gpu
def test_is_killed():
    os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.gpu(devices=2)
def test_has_both():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"

@pytest.mark.gpu
def test_fails_beside_others():
    assert (marker := Path("ran before")).exists() or marker.touch(), "disturbed"

@pytest.mark.gpu(alone=True)
def test_alone():
    pass
"""


def session(directory: Path, tests: str, *arguments: str, conftest: str = CONFTEST) -> tuple[int, str]:
    """Return exit code and output of a session with these tests."""
    (directory / "conftest.py").write_text(conftest)
    (directory / "test_toys.py").write_text(tests)
    (directory / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "PYTHONPATH": str(HELPERS), "COLUMNS": "200"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *arguments]
    ended = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_a_test_that_hangs_or_dies_costs_no_other_its_result(tmp_path):
    code, printed = session(tmp_path, TESTS, "--at-once", "4")
    assert code == 1
    assert "3 failed, 6 passed; 0 not run; 2 devices" in printed
    failed = re.findall(r"^FAILED test_toys.py::(\S+)", printed, re.MULTILINE)
    assert {*failed} - {"test_fails_beside_others"} == {"test_fails", "test_hangs_once[1]", "test_is_killed"}
    for text in (
        "test_fails: AssertionError: the sum",
        "test_hangs_once[1]: took longer than 2 s",
        "test_is_killed: its process was ended by SIGSEGV",
        "in test_hangs_once",  # where it stood
        "printed before",
        "failed beside others, passed alone: 1",
        "test_fails_beside_others: AssertionError: disturbed",
    ):
        assert text in printed, printed


def test_what_has_not_run_at_the_end_is_named_and_the_session_fails(tmp_path):
    tests = """
import time, pytest
from pathlib import Path

@pytest.mark.gpu(devices=2, alone=True)
@pytest.mark.parametrize("number", range(3))
def test_sleeps(number):
    if number:
        Path("began").touch()
        time.sleep(600)
"""
    ends_then = """
from pathlib import Path

class Session(gpu_session.GpuSession):
    limit_s = property(lambda self: 0.0 if Path("began").exists() else 600.0, lambda self, given: None)
"""
    conftest = CONFTEST.replace("gpu_session.GpuSession(", "Session(") + ends_then
    code, printed = session(tmp_path, tests, conftest=conftest)
    assert code == 1
    assert "not run in 0 s: 2" in printed
    named = re.findall(r"test_sleeps\[(\d)\]", printed.partition("not run in")[2].partition("1 passed")[0])
    assert named == ["1", "2"]
    assert "1 passed; 2 not run" in printed


@pytest.mark.parametrize(("in_gpu_world", "outcome"), [(True, "failed"), (False, "skipped")])
def test_a_skip_is_a_failure_in_the_gpu_world_alone(request, monkeypatch, in_gpu_world, outcome):
    plugins = request.config.pluginmanager.get_plugins()
    path = str(Path(__file__).parents[1] / "conftest.py")
    (conftest,) = (plugin for plugin in plugins if getattr(plugin, "__file__", None) == path)
    monkeypatch.setattr(conftest, "IN_GPU_WORLD", in_gpu_world)
    report = SimpleNamespace(outcome="skipped", skipped=True, longrepr=("file", 1, "Skipped: no NVSHMEM"))
    conftest._refuse_skip(report)
    assert report.outcome == outcome
