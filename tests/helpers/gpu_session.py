"""A pytest session on GPUs: many tests at once, each with a time limit, all within nine minutes.

The process that has collected the tests has imported torch, and never starts CUDA. It forks a process for
each test, or for a few of one function, with the devices that `gpu_schedule` gives it; its ranks are forks of
it. So a kernel that hangs costs its test alone, and nothing is imported twice. Triton's cache is one for all.

A test that fails beside others runs once more, alone; the second end counts. What has not run at the end of
the session is named, and makes it fail.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gpu_schedule import SECONDS, Placed, Schedule, jobs_at_once, jobs_of, part_of
from process_states import TELL_S, let_them_tell, status_of

LIMIT_S = 540.0  # of the session
TEST_LIMIT_S = 150.0  # of a test; `run_ranks` ends ranks sooner, and tells where they stood
POLL_S = 0.01
PR_SET_PDEATHSIG = 1  # prctl(2): the signal a process gets when its parent dies
SLOWEST = 10


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "tests on GPUs, with DIST_AUTOTUNE_TEST_GPU=1")
    group.addoption("--part", metavar="I/N", help="run part I of N only")
    group.addoption("--limit-s", type=float, default=LIMIT_S, help="of the session (%(default)g)")
    group.addoption("--test-limit-s", type=float, default=TEST_LIMIT_S, help="of a test (%(default)g)")
    group.addoption("--at-once", type=int, metavar="N", help="tests that share a device; 1: one by one")
    group.addoption("--all-candidates", action="store_true", help="instead of some that have every value")


def mark_of(item: pytest.Item) -> dict[str, Any]:
    """Return what the test's mark `gpu` says; empty: it has none."""
    marker = item.get_closest_marker("gpu")
    return {} if marker is None else {"devices": marker.args[0] if marker.args else 1, **marker.kwargs}


def devices_needed(item: pytest.Item) -> int:
    """Return how many devices the test asks for; 0: it has no mark `gpu`."""
    return int(mark_of(item).get("devices", 0))


@dataclass
class Running:
    """A process that runs the tests of a job, and what it has told so far."""

    placed: Placed[int]  # of indices of items
    pid: int
    told: Path  # lines of JSON
    log: Path  # stdout, stderr and where it stood at its limit
    began: float
    read: int = 0  # bytes of `told`
    current: int | None = None  # the item that runs
    current_began: float = 0.0
    done: list[int] = field(default_factory=list)


@dataclass
class Ended:
    """How a test ended."""

    reports: list[pytest.TestReport]
    seconds: float

    @property
    def failed(self) -> bool:
        return any(report.failed for report in self.reports)

    @property
    def outcome(self) -> str:
        if self.failed:
            return "failed"
        return "skipped" if any(report.skipped for report in self.reports) else "passed"


class GpuSession:
    """The plugin: it takes the place of pytest's loop over tests."""

    def __init__(self, config: pytest.Config, devices: int) -> None:
        self.config, self.devices = config, devices
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.names = visible.split(",") if visible else [str(index) for index in range(devices)]
        self.limit_s, self.test_limit_s = config.option.limit_s, config.option.test_limit_s
        self.started = time.monotonic()
        self.results: dict[int, Ended] = {}
        self.before: dict[int, Ended] = {}  # tests that failed beside others and run once more
        self.stuck: list[int] = []  # processes that no signal ends
        self.items: list[pytest.Item] = []
        self.directory = Path(tempfile.mkdtemp(prefix="gpu-session-"))

    # ---- pytest's hooks

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.config.option.part:
            try:
                items[:] = part_of(items, self.config.option.part)
            except ValueError as error:
                raise pytest.UsageError(str(error)) from None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly:
            return None
        self.items = session.items
        with self._output_of_its_own():
            self._run(session)
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.left() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        say = terminalreporter.write_line
        ended = sorted(self.results, key=lambda index: -self.results[index].seconds)
        if not ended and not self.left():
            return
        terminalreporter.section("GPU session")
        say(f"slowest {min(SLOWEST, len(ended))}:")
        for index in ended[:SLOWEST]:
            say(f"  {self.results[index].seconds:6.1f} s  {self._name(index)}")
        if passed := [index for index in self.before if not self.results[index].failed]:
            say(f"failed beside others, passed alone: {len(passed)}")
            for index in passed:
                say(f"  {self._name(index)}: {_reason(self.before[index].reports)}")
        if failed := [index for index in self.results if self.results[index].failed]:
            say(f"failed: {len(failed)}")
            for index in failed:
                say(f"  {self._name(index)}: {_reason(self.results[index].reports)}")
        if left := self.left():
            say(f"not run in {self.limit_s:g} s: {len(left)}; --part runs some of them")
            for name, count in collections.Counter(self._name(index) for index in left).items():
                say(f"  {name}" + (f" ({count})" if count > 1 else ""))
        if self.stuck:
            say(f"processes that no signal ends: {', '.join(map(str, self.stuck))}")
        outcomes = collections.Counter(each.outcome for each in self.results.values())
        total = time.monotonic() - self.started
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        say(f"{counts or 'nothing ran'}; {len(left)} not run; {self.devices} devices, {total:.0f} s")

    def left(self) -> list[int]:
        """Return the tests that have no result."""
        return [index for index in range(len(self.items)) if index not in self.results]

    # ---- the loop

    def _run(self, session: pytest.Session) -> None:
        tests = [
            (
                index,
                getattr(item, "function", item),
                devices_needed(item),
                mark_of(item).get("alone", False),
                float(mark_of(item).get("seconds", SECONDS)),
            )
            for index, item in enumerate(self.items)
        ]
        cores = len(os.sched_getaffinity(0))
        at_once = self.config.option.at_once or jobs_at_once(cores, self.devices)
        self.schedule = Schedule(jobs_of(tests), self.devices, at_once, self.limit_s)
        self.running: list[Running] = []
        with contextlib.suppress(AttributeError):
            self.config._tmp_path_factory.getbasetemp()  # one for all processes
        try:
            while (self.schedule.jobs or self.running) and not (session.shouldfail or session.shouldstop):
                now = time.monotonic()
                if now - self.started > self.limit_s:
                    break
                while placed := self.schedule.begin(now - self.started):
                    self._start(placed)
                for each in list(self.running):
                    self._look_after(each)
                time.sleep(POLL_S)
        finally:
            for each in self.running:
                self._read(each)
                self._kill(each)
            for index, ended in self.before.items():
                if index not in self.results:  # there was no time for it alone
                    self._count(index, ended)

    def _start(self, placed: Placed[int]) -> None:
        number = placed.job.tests[0]
        told, log = (self.directory / f"{number}-{time.monotonic_ns()}.{end}" for end in ("jsonl", "log"))
        told.touch()
        log.touch()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(placed, told, log)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)
        self.running.append(Running(placed, pid, told, log, time.monotonic()))

    def _look_after(self, process: Running) -> None:
        """Take what a process has told; end it at its test's limit; when it has ended, let its devices go."""
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        self._read(process)
        began = process.current_began or process.began
        if not pid:
            if time.monotonic() - began <= self._limit_s(process.current):
                return
            let_them_tell({process.pid: process.log})
            self._read(process)
            if not self._kill(process):
                self.stuck.append(process.pid)
        left = [index for index in process.placed.job.tests if index not in process.done]
        if left:  # or it was killed between its last test and its end
            process.current = left.pop(0)
            self._lost(process, os.waitstatus_to_exitcode(status) if pid else None)
        self.running.remove(process)
        self.schedule.end(process.placed, left)

    def _limit_s(self, index: int | None) -> float:
        mark = {} if index is None else mark_of(self.items[index])
        return float(mark.get("limit_s", self.test_limit_s))

    def _read(self, process: Running) -> None:
        with process.told.open("rb") as file:
            file.seek(process.read)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        process.read += len(lines)
        for line in lines.splitlines():
            told = json.loads(line)
            if told["what"] == "begins":
                process.current, process.current_began = told["test"], time.monotonic()
            else:
                reports = [
                    self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
                    for data in told["reports"]
                ]
                self._ended(process, told["test"], reports, told["seconds"])

    def _lost(self, process: Running, code: int | None) -> None:
        """Report the test that its process has not ended."""
        index, item = process.current, self.items[process.current]
        seconds = time.monotonic() - (process.current_began or process.began)
        if code is None:
            why = f"took longer than {self._limit_s(index):g} s; its process was killed"
        else:
            why = (
                f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            )
        log = process.log.read_text(errors="replace")[-6000:]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"{why}\n{log}".rstrip(),
            when="call",
            duration=seconds,
        )
        self._ended(process, index, [report], seconds)

    def _ended(self, process: Running, index: int, reports: list[pytest.TestReport], seconds: float) -> None:
        process.current, process.current_began = None, time.monotonic()
        process.done.append(index)
        placed = process.placed
        ended = Ended(reports, seconds)
        was_alone = placed.job.is_alone or self.schedule.at_once == 1
        if ended.failed and not was_alone and index not in self.before:
            self.before[index] = ended
            self.schedule.again(index, placed.job.devices, seconds)
        else:
            self._count(index, ended)

    def _count(self, index: int, ended: Ended) -> None:
        self.results[index] = ended
        for report in ended.reports:
            self.config.hook.pytest_runtest_logreport(report=report)

    def _kill(self, process: Running) -> bool:
        """End the process with all that it has started; return whether it has ended."""
        for pid in [process.pid, *_descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + TELL_S
        while time.monotonic() < until:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(process.pid, os.WNOHANG)[0] == 0:
                    time.sleep(POLL_S)
                    continue
            return True
        return False

    # ---- in the process of a job

    def _become(self, placed: Placed[int], told: Path, log: Path) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, file=output)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.names[device] for device in placed.devices)
        plugins, capture = self.config.pluginmanager, self.config.pluginmanager.getplugin("capturemanager")
        for name in ("terminalreporter", "logxml"):
            if plugins.has_plugin(name):
                plugins.unregister(name=name)
        if capture is not None:
            capture.stop_global_capturing()
            os.dup2(output, 1)
            os.dup2(output, 2)
            capture._method = "fd"
            capture.start_global_capturing()
        reports = Reports()
        plugins.register(reports)
        with told.open("a", buffering=1) as file:
            for index in placed.job.tests:
                self._run_one(index, reports, file)
        os._exit(0)

    def _run_one(self, index: int, reports: Reports, file: Any) -> None:
        item = self.items[index]
        reports.kept.clear()
        file.write(json.dumps({"what": "begins", "test": index}) + "\n")
        began = time.monotonic()
        self.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        data = [
            self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
            for report in reports.kept
        ]
        seconds = time.monotonic() - began
        file.write(
            json.dumps({"what": "ended", "test": index, "seconds": seconds, "reports": data}, default=str)
            + "\n"
        )
        gc.collect()  # what holds device memory

    # ---- output

    @contextlib.contextmanager
    def _output_of_its_own(self) -> Iterator[None]:
        """Stop pytest's capture, whose files the forks would share."""
        capture = self.config.pluginmanager.getplugin("capturemanager")
        if capture is None:
            yield
            return
        capture.suspend_global_capture(in_=True)
        capture.read_global_capture()
        try:
            yield
        finally:
            capture.resume_global_capture()

    def _name(self, index: int) -> str:
        return self.items[index].nodeid


class Reports:
    """Keeps the reports of a test."""

    def __init__(self) -> None:
        self.kept: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.kept.append(report)


def _reason(reports: list[pytest.TestReport]) -> str:
    """Return why a test failed, in a line; empty: it has not."""
    for report in reports:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash is not None else report.longreprtext
            return " ".join(text.split())[:300]
    return ""


def _descendants(pid: int) -> list[int]:
    """Return all processes that the process has started, and those that they have."""
    children = collections.defaultdict(list)
    for each in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        if parent := status_of(each)[1:2]:
            children[int(parent[0])].append(each)
    found = list(children[pid])
    for each in found:
        found += children[each]
    return found
