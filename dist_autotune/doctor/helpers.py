"""Helper processes that may crash or hang, each with a time limit; what they report survives them.

A helper is a new interpreter that runs one probe of `dist_autotune.doctor.probes`. It appends a line to a
file of its own when a stage begins and when it ends, so what came before a crash or a hang is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..settings import environment_of_helpers

POLL_S = 0.01
PEERS_GRACE_S = 3.0  # for the helpers beside one that has failed: to report what they see of it
REAP_S = 5.0  # a killed process that the kernel holds on to is left behind after this
STARTUP = "the start"  # the stage before the first
_CUT_OFF = "cut off after"


@dataclass(frozen=True, kw_only=True)
class Helper:
    """What one helper reported, and how it ended."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each stage that ended well
    stage: str = ""  # in which it ended early
    problem: str = ""  # why; empty: it ran to its end

    @property
    def ending(self) -> str:
        """Return how it ended early, and where."""
        return f"{self.problem} (in {self.stage})"


def run_helpers(
    probe: str, count: int, limit_s: float, environment: Mapping[str, str | None], **arguments: Any
) -> list[Helper]:
    """Run `probe` in `count` processes and return how each ended, after `limit_s` or a little more.

    `environment`: variables that differ from this process's; None takes one out. No process is left
    that can be killed.
    """
    with tempfile.TemporaryDirectory(prefix="dist-autotune-", ignore_cleanup_errors=True) as directory:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                place = {"rank": rank, "world_size": count, "directory": directory, "limit_s": limit_s}
                with Path(directory, f"rank-{rank}.out").open("wb") as output:
                    process = subprocess.Popen(
                        command(probe, {**place, **arguments}),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment_of_helpers(environment),
                        start_new_session=True,  # one signal ends it and its children; Ctrl-C reaches only us
                    )
                processes.append(process)
            ends = _wait(processes, limit_s)
        finally:
            for process in processes:
                _kill(process)
        return [_read(Path(directory), rank, ends[rank]) for rank in range(count)]


def first_problem(helpers: Sequence[Helper]) -> Helper | None:
    """Return the helper whose end explains the others', if any ended early: not one that was cut off."""
    early = [helper for helper in helpers if helper.problem]
    return min(early, key=lambda helper: helper.problem.startswith(_CUT_OFF), default=None)


def command(probe: str, arguments: dict[str, Any]) -> list[str]:
    """Return the command of one helper. It imports from where this process imports, installed or not."""
    program = "import json, sys; sys.path[:], probe, arguments = json.loads(sys.argv[1]); "
    program += "from dist_autotune.doctor import probes; probes.main(probe, arguments)"
    return [sys.executable, "-c", program, json.dumps([sys.path, probe, arguments])]


def report_path(directory: str | Path, rank: int) -> Path:
    """Return the file in which the helper `rank` reports, one JSON object a line."""
    return Path(directory) / f"rank-{rank}.jsonl"


def _wait(processes: list[subprocess.Popen[bytes]], limit_s: float) -> dict[int, str]:
    """Return how each process ended, as text that is empty where it ended well."""
    began = time.monotonic()
    deadline = began + limit_s
    ends: dict[int, str] = {}
    while len(ends) < len(processes):
        late = time.monotonic() > deadline
        for rank, process in enumerate(processes):
            code = process.poll()
            if rank in ends or (code is None and not late):
                continue
            if code is None:
                ends[rank] = f"{_CUT_OFF} {time.monotonic() - began:.0f} s"
            elif code < 0:
                ends[rank] = f"ended by {signal.Signals(-code).name}"
            else:
                ends[rank] = f"ended with exit code {code}" if code else ""
            if ends[rank]:
                deadline = min(deadline, time.monotonic() + PEERS_GRACE_S)
        time.sleep(POLL_S)
    return ends


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)


def _read(directory: Path, rank: int, end: str) -> Helper:
    """Return what a helper that ended so has reported."""
    facts: dict[str, dict[str, Any]] = {}
    stage, error = STARTUP, ""
    path = report_path(directory, rank)
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # the line that a killed process was writing
            record = json.loads(line)
            stage, error = record.get("stage", stage), record.get("error", "")
            if "facts" in record:
                facts[stage] = record["facts"]
    if not end:
        return Helper(facts=facts)
    if error and not end.startswith(_CUT_OFF):
        return Helper(facts=facts, stage=stage, problem=error)
    output = (directory / f"rank-{rank}.out").read_text(errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return Helper(
        facts=facts, stage=stage, problem=f"{end}; its last words: {lines[-1][:300]}" if lines else end
    )
