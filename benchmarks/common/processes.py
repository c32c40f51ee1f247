"""Processes that a benchmark starts: with a time limit, and ended together with their children. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 45.0  # for torchrun to end its ranks: it gives them 30
OF_TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_", "MASTER_", "TORCHELASTIC_")  # beginnings
OF_TORCHRUN += ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")


def with_benchmarks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which `python -m benchmarks...` finds its module from any directory."""
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def environment_without_torchrun() -> dict[str, str]:
    """Return this process's environment as one that torchrun has not started, and that lets all be tuned."""
    left_out = *OF_TORCHRUN, "DIST_AUTOTUNE_MODE"
    kept = {name: text for name, text in os.environ.items() if not name.startswith(left_out)}
    kept.setdefault("OMP_NUM_THREADS", "1")
    return kept


def run_limited(
    command: Sequence[str], environment: dict[str, str], limit_s: float | None, output: Any = None
) -> str:
    """Run a command to its end, or its limit; return what went wrong, empty: nothing.

    Whatever ends this process's wait ends the command too.
    """
    return wait_limited(start(command, environment, output), limit_s)


def start(command: Sequence[str], environment: dict[str, str], output: Any = None) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own."""
    return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def wait_limited(process: subprocess.Popen[bytes], limit_s: float | None) -> str:
    """Wait for a process to end, or end it at its limit; return what went wrong, empty: nothing."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:g} s"
    finally:
        end(process)
    return f"ended with {code}" if code else ""


def end(process: subprocess.Popen[bytes]) -> None:
    """Let the command end its own children, then end what is left of it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
