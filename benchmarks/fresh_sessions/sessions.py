"""Sessions: processes that tune and leave their picks, and what is known of how they ended.

Nothing here imports torch: the process that starts the sessions holds no GPU.

    DIRECTORY/arguments.json       what all sessions tune
    DIRECTORY/triton/              Triton's binaries, which sessions share
    DIRECTORY/session-3/           cache/ (winners), logs/, output.txt; picks.json, by shape; ended.json
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.processes import environment_without_torchrun, start, wait_limited, with_benchmarks

POLL_INTERVAL_S = 0.05


@dataclass(frozen=True)
class Found:
    """One context as the session ended with it."""

    kernel: str  # or the name of a `tunable`
    key: str
    choice: str  # the text of the config, or the option as JSON
    status: str
    ms: float | None = None
    timings: dict[str, float] = field(default_factory=dict)  # candidate's text -> agreed ms, where finite

    @property
    def name(self) -> str:
        return f"{self.kernel}[{self.key}]"


@dataclass(frozen=True)
class Pick:
    """What a session ended with for one shape: all that it tuned, and what a settled call then launches."""

    found: tuple[Found, ...]
    launched: tuple[tuple[str, str], ...]  # kernel, config
    runs: int
    seconds: float

    @classmethod
    def read(cls, data: dict[str, Any]) -> Pick:
        found = tuple(Found(**each) for each in data["found"])
        launched = tuple((kernel, config) for kernel, config in data["launched"])
        return cls(found, launched, data["runs"], data["seconds"])


@dataclass(frozen=True)
class Ended:
    """How a session ended; `trouble` is empty if all was well."""

    session: int
    seconds: float
    trouble: str = ""


class Sessions:
    """The directory of all sessions."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def of(self, session: int) -> Path:
        return self.directory / f"session-{session}"

    def cache(self, session: int) -> Path:
        """Return the directory of the session's winners."""
        return self.of(session) / "cache"

    def environment(self, session: int) -> dict[str, str]:
        """Return the variables of a session's processes: nothing that was tuned before is in their caches."""
        return {
            **with_benchmarks(environment_without_torchrun()),
            "DIST_AUTOTUNE_CACHE_DIR": str(self.cache(session)),
            "DIST_AUTOTUNE_LOG_DIR": str(self.of(session) / "logs"),
            "TRITON_CACHE_DIR": str(self.directory / "triton"),
        }

    def write_picks(self, session: int, picks: dict[str, Pick]) -> None:
        data = {name: asdict(pick) for name, pick in picks.items()}
        _write(self.of(session) / "picks.json", data)

    def picks(self, name: str, sessions: int) -> dict[int, Pick]:
        """Return the picks of that name of the first so many sessions."""
        found = {}
        for path in self.directory.glob("session-*/picks.json"):
            number, data = int(path.parent.name.removeprefix("session-")), json.loads(path.read_text())
            if name in data and number <= sessions:
                found[number] = Pick.read(data[name])
        return dict(sorted(found.items()))

    def ended(self) -> list[Ended]:
        """Return how the sessions ended that were started, in order."""
        paths = self.directory.glob("session-*/ended.json")
        return sorted((Ended(**json.loads(path.read_text())) for path in paths), key=lambda e: e.session)

    def adopt(self, arguments: dict[str, Any]) -> None:
        """Take the directory for sessions of these arguments. Raises ValueError if it is of others."""
        path = self.directory / "arguments.json"
        if path.exists() and json.loads(path.read_text()) != arguments:
            raise ValueError(
                f"{self.directory} holds sessions of {path.read_text().strip()}; give another one"
            )
        _write(path, arguments)

    def has(self, session: int) -> bool:
        """Return whether a session ended well before: it is not run again."""
        path = self.of(session) / "ended.json"
        return path.exists() and not json.loads(path.read_text())["trouble"]

    def start(self, session: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a session's processes, which import what they need and wait for `run`."""
        if self.of(session).exists():  # of a session that failed: this one begins with nothing
            shutil.rmtree(self.of(session))
        self.of(session).mkdir(parents=True)
        with (self.of(session) / "output.txt").open("w") as file:
            return start(command, self.environment(session), file)

    def run(
        self,
        session: int,
        process: subprocess.Popen[bytes],
        *,
        limit_s: float,
        say: Callable[[str], object],
    ) -> Ended:
        """Let a session that was started begin, wait for its end and note how it ended."""
        began = time.monotonic()
        (self.of(session) / "begin").touch()
        trouble = wait_limited(process, limit_s)
        ended = Ended(session, round(time.monotonic() - began, 1), trouble)
        _write(self.of(session) / "ended.json", asdict(ended))
        failure = f", {trouble}; {_last_line(self.of(session) / 'output.txt')}" if trouble else ""
        say(f"session {session}: {ended.seconds:.1f} s{failure}")
        return ended

    def await_turn(self, session: int, limit_s: float) -> None:
        """Wait, in a process of the session, until it may use the devices. Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while not (self.of(session) / "begin").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"session {session} was not let in within {limit_s:g} s")
            time.sleep(POLL_INTERVAL_S)


def torchrun(ranks: int, *arguments: str, module: str = "benchmarks.regret") -> list[str]:
    """Return the command that runs a benchmark on so many ranks of one host."""
    options = ["--standalone", "--nproc-per-node", str(ranks), "-m", "--", module]
    return [sys.executable, "-m", "torch.distributed.run", *options, *arguments]


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if ("Error" in line or "Timeout (" in line) and "ChildFailed" not in line]
    return (told or lines or ["it printed nothing"])[-1].strip()[:300]


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    temporary.replace(path)
