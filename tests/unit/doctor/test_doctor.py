"""The doctor: what it says of this machine and of machines that are not here, and that nothing stops it."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from process_states import has_ended
from typer.testing import CliRunner, Result

from dist_autotune.cli.commands import app
from dist_autotune.doctor import examination
from dist_autotune.doctor.examination import REPORT, Examination, ProbeResult, run_probe
from dist_autotune.doctor.findings import is_healthy, judge

HANG = [sys.executable, "-c", "import signal; signal.pause()"]


def run() -> Result:
    return CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})


# ---- this machine


def test_a_machine_without_gpus_is_healthy_and_its_world_is_the_interpreter(tmp_path: Path) -> None:
    result = run()
    assert result.exit_code == 0, result.stdout
    assert "in Triton's interpreter: it shows behaviour, not speed (0 GPUs)" in result.stdout
    for name in ("python", "torch", "CUDA", "driver", "triton", "numpy", "filelock", "msgspec"):
        assert f"\n{name} " in result.stdout
    assert "shm: CPU processes of one host share files; 2 ranks wrote to each other" in result.stdout
    assert "Everything needed works." in result.stdout
    assert list(tmp_path.iterdir()) == []  # what was made to try it is gone


@pytest.mark.gpu(devices=2)
def test_between_gpus_symmetric_memory_works() -> None:
    result = run()
    assert result.exit_code == 0, result.stdout
    gpus = torch.cuda.device_count()
    assert f"on {gpus} GPUs (" in result.stdout
    assert f"{gpus} ranks wrote to each other" in result.stdout


# ---- probes


LIMIT_S = 120.0


def probe_of(monkeypatch: pytest.MonkeyPatch, program: str) -> ProbeResult:
    """Run a program in place of a probe's process."""
    monkeypatch.setattr(examination, "command", lambda *_: [sys.executable, "-c", program])
    return run_probe("any", 2, LIMIT_S, {})


def test_a_probe_that_hangs_is_killed_with_all_that_it_started(tmp_path, monkeypatch):
    pids = tmp_path / "pids"

    class Limited(subprocess.Popen):
        """A process whose limit is over once it hangs."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout != LIMIT_S:
                return super().wait(timeout)
            deadline = time.monotonic() + 60
            while not pids.exists():
                assert time.monotonic() < deadline
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Limited)
    program = (
        "import os, signal, subprocess\n"
        f"grandchild = subprocess.Popen({HANG!r})\n"
        f'print({REPORT!r} + \'{{"rank": 0, "stage": "a"}}\', flush=True)\n'
        f"open('{pids}.part', 'w').write(f'{{os.getpid()}} {{grandchild.pid}}')\n"
        f"os.rename('{pids}.part', '{pids}'); signal.pause()"
    )
    assert probe_of(monkeypatch, program).problem == "cut off after 120 s (in a)"
    deadline = time.monotonic() + 10
    for pid in map(int, pids.read_text().split()):
        while not has_ended(pid):
            assert time.monotonic() < deadline


def test_a_rank_that_dies_ends_the_probe_and_is_named(monkeypatch):
    program = (
        "import os, signal\nfrom dist_autotune.doctor import probes\n"
        "def stage(rank):\n"
        "    os.abort() if rank.rank == 1 else signal.pause()\n"
        "probes.PROBES['any'] = {'a stage': stage}\nprobes.main(['any', '2', '.', '30'])"
    )
    problem = probe_of(monkeypatch, program).problem
    assert problem.startswith("rank 1: ")
    assert "SIGABRT" in problem
    assert problem.endswith("(in a stage)")


def test_directories_that_cannot_be_written_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(examination, "run_probe", lambda *_: ProbeResult())
    (file := tmp_path / "file").touch()
    for name in ("CACHE", "LOG"):
        monkeypatch.setenv(f"DIST_AUTOTUNE_{name}_DIR", str(file / "results"))
    found = examination.examine().unwritable
    assert list(found) == ["cache", "logs"]
    assert {why.partition(": ")[2] for why in found.values()} == {f"Not a directory ({file})"}
    monkeypatch.setenv("DIST_AUTOTUNE_LOG_DIR", str(tmp_path / "to" / "make"))
    assert list(examination.examine().unwritable) == ["cache"]
    assert [*tmp_path.iterdir()] == [file]


# ---- machines that are not here


def machine(gpus: int = 0, **changes: Any) -> Examination:
    """Return the examination of a healthy machine with as many GPUs as given."""
    names = ["NVIDIA H200"] * gpus
    facts = {"names": names, "listed": names, "driver": "580.1"}
    wrote = f"nvshmem: every rank can use it; {gpus} ranks wrote to each other"
    healthy = Examination(
        versions={"CUDA": "13.0", "triton": "3.6.0", "numpy": "2.3.5"},
        variables={},
        setting_error="",
        unknown_variables="",
        unwritable={},
        is_interpreted=gpus == 0,
        host=ProbeResult(facts=facts),
        ranks=ProbeResult(facts={"memory": "shm: 2 ranks wrote to each other"}),
        memory=ProbeResult(facts={"memory": wrote}) if gpus > 1 else None,
    )
    return dataclasses.replace(healthy, **changes)


def with_versions(**versions: str) -> Examination:
    return machine(versions=machine().versions | versions)


def with_ranks(facts: dict[str, Any], *, stage: str = "", problem: str = "") -> Examination:
    return machine(ranks=ProbeResult(facts={**machine().ranks.facts, **facts}, stage=stage, problem=problem))


@pytest.mark.parametrize(
    ("seen", "level", "check", "step"),
    [
        (
            with_ranks({}, stage="gloo", problem="RuntimeError"),
            "problem",
            "two CPU ranks",
            "GLOO_SOCKET_IFNAME",
        ),
        (with_ranks({}, stage="shm", problem="OSError: no space"), "problem", "two CPU ranks", "--shm-size"),
        (machine(setting_error="DIST_AUTOTUNE_MODE='fast'"), "problem", "variables", "docs/environment.md"),
        (machine(unknown_variables="X"), "remark", "variables", "docs/environment.md"),
        (machine(unwritable={"cache": "X"}), "remark", "cache", "DIST_AUTOTUNE_CACHE_DIR"),
        (with_versions(numpy="2.4.0"), "problem", "numpy", "pip install 'numpy<2.4'"),
        (machine(gpus=1, is_interpreted=True), "remark", "kernels run", "Unset TRITON_INTERPRET"),
        (machine(is_interpreted=False), "remark", "kernels run", "Set TRITON_INTERPRET=1"),
        (machine(host=ProbeResult(stage="devices", problem="cut off")), "problem", "this host", "nvidia-smi"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_is_wrong_is_told_with_the_next_step(seen, level, check, step):
    (finding,) = [finding for finding in judge(seen) if finding.level != "ok"]
    assert (finding.level, finding.check) == (level, check)
    assert step in finding.next_step
    assert is_healthy([finding]) == (level == "remark")


@pytest.mark.parametrize(
    ("variables", "cuda", "level"),
    [({"CUDA_VISIBLE_DEVICES": ""}, "13.0", "remark"), ({}, None, "remark"), ({}, "13.0", "problem")],
    ids=["hidden", "CPU build", "driver"],
)
def test_gpus_that_torch_does_not_see_are_findings_of(variables, cuda, level) -> None:
    facts = {"names": [], "listed": ["GPU 0: NVIDIA H200"] * 8, "driver": ""}
    seen = machine(host=ProbeResult(facts=facts), variables=variables)
    seen.versions["CUDA"] = cuda
    (finding,) = [finding for finding in judge(seen) if finding.check == "GPUs"]
    assert (finding.level, finding.seen) == (level, "the driver lists 8 GPUs, torch sees none")
