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
import time
import warnings
from collections.abc import Mapping, Sequence
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
PEERS_GRACE_S = 3.0  # for the peers of a failed helper to report it
REAP_S = 5.0  # a killed process that the kernel holds on to is left behind after this
POLL_S = 0.01
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
COMPILED = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": "1"}
CUT_OFF = "cut off after"
STARTUP = "the start"  # the stage before the first
REPORT = "dist_autotune doctor: "  # begins a line of JSON: the report so far
PACKAGES = re.compile(
    r"(numpy|filelock|msgspec|nvshmem4py|nvidia-nvshmem|cuda-bindings|cuda-core|nvidia-nccl)(-cu\d+)?", re.I
)


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a helper reported, and how it ended."""

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
    host = run_helpers("this host", 1, GPU_LIMIT_S, COMPILED)
    count = len(host.facts.get("names", []))
    return Examination(
        versions=versions() | {"driver": host.facts.get("driver") or None},
        variables=settings.variables(),
        setting_error=_setting_error(),
        unknown_variables=settings.unknown_variables(),
        is_interpreted=interception.is_interpreted(),
        host=host,
        ranks=run_helpers("two CPU ranks", 2, RANKS_LIMIT_S, CPU_ONLY),
        memory=run_helpers("symmetric memory", count, GPU_LIMIT_S, COMPILED) if count > 1 else None,
    )


def _setting_error() -> str:
    """Return why a setting cannot be used; empty: all can."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of unknown names, which are findings of their own
            settings.check_variables()
    except InvalidOption as error:
        return str(error)
    return "" if settings.cache_directory() is not None else settings.NO_HOME


def versions() -> dict[str, str | None]:
    """Return the versions of what is imported here, then of other packages that are installed."""
    imported = {
        "python": platform.python_version(),
        "dist_autotune": __version__,
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "triton": triton.__version__,
    }
    installed = importlib.metadata.distributions()
    return imported | {each.name: each.version for each in installed if PACKAGES.fullmatch(each.name or "")}


def run_helpers(probe: str, count: int, limit_s: float, environment: Mapping[str, str | None]) -> ProbeResult:
    """Run `probe` in `count` processes and return the result that explains the others': a failure, if any.

    `environment`: variables that differ from this process's; None takes one out.
    """
    with tempfile.TemporaryDirectory(prefix="dist-autotune-", ignore_cleanup_errors=True) as directory:
        outputs = [Path(directory, f"rank-{rank}") for rank in range(count)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, path in enumerate(outputs):
                helper = {"rank": rank, "world_size": count, "directory": directory, "limit_s": limit_s}
                with path.open("wb") as output:
                    process = subprocess.Popen(
                        command(probe, helper),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=settings.environment_of_helpers(environment),
                        start_new_session=True,  # one signal ends it with its children
                    )
                processes.append(process)
            endings = _wait(processes, limit_s)
        finally:
            for process in processes:
                _kill(process)
        texts = [path.read_text(errors="replace") for path in outputs]
    results = map(_read, texts, endings)
    return min(results, key=lambda result: (not result.problem, result.problem.startswith(CUT_OFF)))


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> list[str]:
    """Return how each process ended, as text that is empty where it ended well."""
    began = time.monotonic()
    deadline, has_failed = began + limit_s, False
    while None in [process.poll() for process in processes] and time.monotonic() < deadline:
        if not has_failed and any(process.returncode for process in processes):
            deadline, has_failed = min(deadline, time.monotonic() + PEERS_GRACE_S), True
        time.sleep(POLL_S)
    return [_ending(process.poll(), time.monotonic() - began) for process in processes]


def _ending(code: int | None, after_s: float) -> str:
    if code is None:
        return f"{CUT_OFF} {after_s:.0f} s"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(REAP_S)


def command(probe: str, helper: dict[str, Any]) -> list[str]:
    """Return the command of one helper. It imports from where this process imports, installed or not."""
    program = "import json, sys; sys.path[:], probe, helper = json.loads(sys.argv[1]); "
    program += "from dist_autotune.doctor import probes; probes.main(probe, helper)"
    return [sys.executable, "-c", program, json.dumps([sys.path, probe, helper])]


def _read(output: str, ending: str) -> ProbeResult:
    """Return the last report in a helper's output, with how the helper ended."""
    report, last_output = dict[str, Any](), ""
    for line in filter(str.strip, output.splitlines()):
        if line.startswith(REPORT):
            with contextlib.suppress(ValueError):  # a killed process was writing it
                report = json.loads(line.removeprefix(REPORT))
        else:
            last_output = f"; last output: {line.strip()[:300]}"
    problem = f"{ending}{last_output} (in {report.get('stage', STARTUP)})" if ending else ""
    return ProbeResult(**report, problem=problem)
