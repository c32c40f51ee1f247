"""Collects the facts for `dist-autotune doctor`. Probes that could crash or hang run in helper processes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from .. import settings
from ..errors import InvalidOption
from ..triton_api import interception
from ..version import __version__

RANKS_LIMIT_S = 60.0  # of which starting and importing torch may take most
GPU_LIMIT_S = 120.0
REAP_S = 5.0  # a killed process that the kernel holds on to is left behind after this
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
COMPILED = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": "1"}
STARTUP = "the start"  # the stage before the first
REPORT = "dist_autotune doctor: "  # begins a line of JSON: the report so far
PACKAGES = re.compile(
    r"(numpy|filelock|msgspec|nvshmem4py|nvidia-nvshmem|cuda-bindings|cuda-core|nvidia-nccl)(-cu\d+)?", re.I
)


@dataclass(frozen=True)
class ProbeResult:
    """The report of a probe, and how it ended."""

    facts: dict[str, Any] = field(default_factory=dict)  # of the stages that ended well
    stage: str = STARTUP  # the latest
    problem: str = ""  # why it ended early, and where; empty: it ran to its end


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The facts, as they were found."""

    versions: dict[str, str | None]  # None: not known without a GPU
    variables: dict[str, str]
    setting_error: str
    unknown_variables: str
    unwritable: dict[str, str]  # why nothing can be written there: "cache" | "logs"
    is_interpreted: bool  # TRITON_INTERPRET was set when Triton was imported
    host: ProbeResult
    ranks: ProbeResult
    memory: ProbeResult | None  # a rank for each GPU, with the backend that "auto" takes; None: not two GPUs

    @property
    def gpus(self) -> list[str]:
        return list(self.host.facts.get("names", []))

    @property
    def world(self) -> str:
        """Return where kernels run: "gpu" or "interpreter"."""
        return "gpu" if self.gpus and not self.is_interpreted else "interpreter"


def examine() -> Examination:
    """Look at everything; takes some seconds, and minutes only where something hangs."""
    host = run_probe("this host", 1, GPU_LIMIT_S, COMPILED)
    count = len(host.facts.get("names", []))
    return Examination(
        versions=versions() | {"driver": host.facts.get("driver") or None},
        variables=settings.variables(),
        setting_error=_setting_error(),
        unknown_variables=settings.unknown_variables(),
        unwritable=_unwritable(),
        is_interpreted=interception.is_interpreted(),
        host=host,
        ranks=run_probe("two CPU ranks", 2, RANKS_LIMIT_S, CPU_ONLY),
        memory=run_probe("symmetric memory", count, GPU_LIMIT_S, COMPILED) if count > 1 else None,
    )


def _setting_error() -> str:
    """Return why a setting cannot be used; empty: all can."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of unknown names, which are findings of their own
            settings.check_variables()
    except InvalidOption as error:
        return str(error)
    return "" if settings.cache_directory() is not None else settings.NO_HOME


def _unwritable() -> dict[str, str]:
    """Return of each directory of results, or of where it would be made, why nothing can be written there."""
    found = {}
    for name, directory in (("cache", settings.cache_directory()), ("logs", Path(settings.log_directory()))):
        if directory is not None:
            place = directory.absolute()
            nearest = next(each for each in (place, *place.parents) if os.path.lexists(each))
            try:
                tempfile.TemporaryFile(dir=nearest).close()
            except OSError as error:
                found[name] = f"nothing can be written in {place}: {error.strerror} ({nearest})"
    return found


def versions() -> dict[str, str | None]:
    """Return the versions of imported packages, then of other installed ones."""
    imported = {
        "python": platform.python_version(),
        "dist_autotune": __version__,
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "triton": triton.__version__,
    }
    installed = importlib.metadata.distributions()
    return imported | {each.name: each.version for each in installed if PACKAGES.fullmatch(each.name or "")}


def run_probe(probe: str, count: int, limit_s: float, environment: Mapping[str, str | None]) -> ProbeResult:
    """Run a probe on `count` ranks; return the report of the rank that failed, else of the last one.

    `environment`: variables that differ from this process's; None takes one out.
    """
    with tempfile.TemporaryDirectory(prefix="dist-autotune-", ignore_cleanup_errors=True) as directory:
        path, problem = Path(directory, "output"), ""
        with path.open("wb") as output:
            process = subprocess.Popen(
                command(probe, count, directory, limit_s),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=settings.environment_of_helpers({"PYTHONPATH": os.pathsep.join(sys.path), **environment}),
                start_new_session=True,  # one signal ends it with its ranks, and with what they started
            )
        try:
            if code := process.wait(limit_s):
                problem = f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            problem = f"cut off after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(REAP_S)
        return _read(path.read_text(errors="replace"), problem)


def command(probe: str, count: int, directory: str, limit_s: float) -> list[str]:
    """Return the command of a probe. It imports from where this process imports, installed or not."""
    return [sys.executable, "-m", "dist_autotune.doctor.probes", probe, str(count), directory, str(limit_s)]


def _read(output: str, problem: str) -> ProbeResult:
    """Return the last report of the rank that failed, or of any, and why the probe ended early."""
    reports, last_output = [dict[str, Any]()], ""
    for line in filter(str.strip, output.splitlines()):
        if line.startswith(REPORT):
            with contextlib.suppress(ValueError):  # a killed process was writing it
                reports.append(json.loads(line.removeprefix(REPORT)))
        else:
            last_output = f"; last output: {line.strip()[:300]}"
    *before, last = reports
    if told := last.get("problem"):
        problem = f"rank {last['rank']}: {told}"
        last = next((each for each in reversed(before) if each.get("rank") == last["rank"]), {})
    elif problem:
        problem += last_output
    stage = last.get("stage", STARTUP)
    return ProbeResult(last.get("facts", {}), stage, f"{problem} (in {stage})" if problem else "")
