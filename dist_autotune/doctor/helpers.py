"""Helper processes that may crash or hang, each with a time limit; what they report survives them.

A helper is a new interpreter that runs one probe of `dist_autotune.doctor.probes`. It writes its report when
a stage begins and when it ends, so what came before a crash or a hang is known.
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
REPORT = "dist_autotune doctor: "  # begins a line of JSON: the report so far
_CUT_OFF = "cut off after"


@dataclass(frozen=True, kw_only=True)
class Helper:
    """What one helper reported, and how it ended."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each stage that ended well
    stage: str = STARTUP  # the latest
    problem: str = ""  # why it ended early; empty: it ran to its end

    @property
    def ending(self) -> str:
        """Return how it ended early, and where."""
        return f"{self.problem} (in {self.stage})"

    def of(self, stage: str) -> dict[str, Any]:
        """Return the facts of one stage."""
        return self.facts.get(stage, {})


def run_helpers(
    probe: str, count: int, limit_s: float, environment: Mapping[str, str | None], **arguments: Any
) -> tuple[Helper, ...]:
    """Run `probe` in `count` processes and return how each ended, after `limit_s` or a little more.

    `environment`: variables that differ from this process's; None takes one out.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="dist-autotune-", ignore_cleanup_errors=True) as directory:
        outputs = [Path(directory, f"rank-{rank}") for rank in range(count)]
        try:
            for rank, path in enumerate(outputs):
                place = {"rank": rank, "world_size": count, "directory": directory, "limit_s": limit_s}
                with path.open("wb") as output:
                    process = subprocess.Popen(
                        command(probe, {**place, **arguments}),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment_of_helpers(environment),
                        start_new_session=True,  # one signal ends it and its children; Ctrl-C reaches only us
                    )
                processes.append(process)
            endings = _wait(processes, limit_s)
        finally:
            for process in processes:
                _kill(process)
        texts = [path.read_text(errors="replace") for path in outputs]
    return tuple(map(_read, texts, endings))


def first_problem(helpers: Sequence[Helper]) -> Helper | None:
    """Return the helper whose end explains the others', if any ended early: not one that was cut off."""
    early = [helper for helper in helpers if helper.problem]
    return min(early, key=lambda helper: helper.problem.startswith(_CUT_OFF), default=None)


def command(probe: str, arguments: dict[str, Any]) -> list[str]:
    """Return the command of one helper. It imports from where this process imports, installed or not."""
    program = "import json, sys; sys.path[:], probe, arguments = json.loads(sys.argv[1]); "
    program += "from dist_autotune.doctor import probes; probes.main(probe, arguments)"
    return [sys.executable, "-c", program, json.dumps([sys.path, probe, arguments])]


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
        return f"{_CUT_OFF} {after_s:.0f} s"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)


def _read(output: str, ending: str) -> Helper:
    """Return what a helper that ended so has reported, among other things that it wrote."""
    report, last_output = dict[str, Any](), ""
    for line in filter(str.strip, output.splitlines()):
        if line.startswith(REPORT):
            with contextlib.suppress(ValueError):  # a killed process was writing it
                report = json.loads(line.removeprefix(REPORT))
        else:
            last_output = f"; last output: {line.strip()[:300]}"
    error = report.pop("error", "")
    return Helper(**report, problem=error or (ending and ending + last_output))
