"""A pytest session on GPUs: many tests at once, each with a time limit, all within nine minutes.

The process that has collected the tests has imported torch, and never starts CUDA. It forks a process for
each test, whose ranks are forks of it: a kernel that hangs costs its test alone, and nothing is imported
twice. Triton's cache is one for all. Tests marked `alone` come last and have their devices for themselves.

A test that fails beside others runs once more, alone; the second end counts. What has not run at the end of
the session is named, and makes it fail.
"""

import collections
import contextlib
import ctypes
import faulthandler
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
from process_states import TELL_S, let_them_tell, status_of

LIMIT_S = 540.0  # of the session
TEST_LIMIT_S = 150.0  # of a test; `run_ranks` ends ranks sooner, and tells where they stood
SECONDS = 6.0  # what a test is reckoned to take of which nothing is known
MOST_ON_DEVICE = 14  # tests that share a device: nearly all of their time is that of a core
MOST_SPANNING = (
    0.5  # of those may span devices: a kernel that waits for a peer needs its turn on both at once
)
MOST_RESERVED = 0.25  # of the session, for tests that run alone
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


@dataclass(eq=False)
class Test:
    """A test, the process that runs it, and how it has ended."""

    item: pytest.Item
    devices: int
    is_alone: bool
    expected_s: float
    limit_s: float
    on: list[int] = field(default_factory=list)  # the devices that it has
    pid: int = 0
    began: float = 0.0
    seconds: float = 0.0
    reports: list[pytest.TestReport] = field(default_factory=list)  # empty: it has not ended
    before: str = ""  # why it failed beside others

    @property
    def failed(self) -> bool:
        return any(report.failed for report in self.reports)

    @property
    def outcome(self) -> str:
        is_skipped = any(report.skipped for report in self.reports)
        return "failed" if self.failed else "skipped" if is_skipped else "passed"


class GpuSession:
    """The plugin: it takes the place of pytest's loop over tests."""

    def __init__(self, config: pytest.Config, devices: int) -> None:
        self.config, self.devices = config, devices
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.names = visible.split(",") if visible else [str(index) for index in range(devices)]
        self.limit_s, self.started = config.option.limit_s, time.monotonic()
        per_device = 7 * len(os.sched_getaffinity(0)) // (8 * devices)
        self.at_once = config.option.at_once or max(1, min(MOST_ON_DEVICE, per_device))
        self.tests: list[Test] = []
        self.waiting: list[Test] = []
        self.running: list[Test] = []
        self.stuck: list[int] = []  # processes that no signal ends
        self.directory = Path(tempfile.mkdtemp(prefix="gpu-session-"))

    # ---- pytest's hooks

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if part := self.config.option.part:
            try:
                index, parts = map(int, part.split("/"))
            except ValueError:
                index, parts = 0, 0
            if not 1 <= index <= parts:
                raise pytest.UsageError(f"part {part!r}: expected i/n with i of 1 to n, such as 1/2")
            items[:] = items[index - 1 :: parts]  # so that the parts take about as long

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly:
            return None
        self.tests = list(map(self._test_of, session.items))
        self.waiting = sorted(self.tests, key=lambda test: (-test.devices, -test.expected_s))
        with contextlib.suppress(AttributeError):
            self.config._tmp_path_factory.getbasetemp()  # one for all processes
        with self._output_of_its_own():
            self._run(session)
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.left() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        say, ended, left = terminalreporter.write_line, [t for t in self.tests if t.reports], self.left()
        if not self.tests:
            return
        terminalreporter.section("GPU session")
        say(f"slowest {min(SLOWEST, len(ended))}:")
        for test in sorted(ended, key=lambda test: -test.seconds)[:SLOWEST]:
            say(f"  {test.seconds:6.1f} s  {test.item.nodeid}")
        for title, tests in {
            "failed beside others, passed alone": [t for t in ended if t.before and not t.failed],
            "failed": [t for t in ended if t.failed],
        }.items():
            say(f"{title}: {len(tests)}")
            for test in tests:
                say(f"  {test.item.nodeid}: {_reason(test.reports) or test.before}")
        if left:
            say(f"not run in {self.limit_s:g} s: {len(left)}; --part runs some of them")
            for name in left:
                say(f"  {name}")
        if self.stuck:
            say(f"processes that no signal ends: {', '.join(map(str, self.stuck))}")
        counts = sorted(collections.Counter(test.outcome for test in ended).items())
        text = ", ".join(f"{count} {outcome}" for outcome, count in counts) or "nothing ran"
        took_s = time.monotonic() - self.started
        say(f"{text}; {len(left)} not run; {self.devices} devices, {took_s:.0f} s")

    def left(self) -> list[str]:
        """Return the names of tests that have no result."""
        return [test.item.nodeid for test in self.tests if not test.reports]

    # ---- which test begins when, and on which devices

    def _test_of(self, item: pytest.Item) -> Test:
        mark = mark_of(item)
        seconds, limit_s = mark.get("seconds", SECONDS), mark.get("limit_s", self.config.option.test_limit_s)
        return Test(item, devices_needed(item), mark.get("alone", False), float(seconds), float(limit_s))

    def _next(self) -> Test | None:
        """Return a test that can begin, with its devices; None: nothing can before something ends."""
        shared, alone = ([t for t in self.waiting if t.is_alone is is_alone] for is_alone in (False, True))
        alone_s = sum(test.expected_s * test.devices / self.devices for test in alone)
        reserved_s = min(alone_s, MOST_RESERVED * self.limit_s)
        if alone and time.monotonic() - self.started > self.limit_s - reserved_s:
            shared = []
        for test in (*shared, *alone):
            free = self._free(test, bool(shared))
            if len(free) >= test.devices:
                test.on = sorted(free[: test.devices])
                return test
        return None

    def _free(self, test: Test, others_wait: bool) -> list[int]:
        """Return the devices that have room for the test, the emptiest first."""
        on = [[each for each in self.running if device in each.on] for device in range(self.devices)]
        spanning = sum(each.devices > 1 for each in self.running)
        if test.devices > 1 and spanning >= max(1, MOST_SPANNING * self.at_once):
            return []

        def has_room(tests: list[Test]) -> bool:
            if test.is_alone:
                return not tests and not others_wait
            return len(tests) < self.at_once and not any(each.is_alone for each in tests)

        free = [device for device, tests in enumerate(on) if has_room(tests)]
        return sorted(free, key=lambda device: len(on[device]))

    # ---- the loop

    def _run(self, session: pytest.Session) -> None:
        try:
            while (self.waiting or self.running) and not (session.shouldfail or session.shouldstop):
                if time.monotonic() - self.started > self.limit_s:
                    break
                while test := self._next():
                    self.waiting.remove(test)
                    self._start(test)
                for test in list(self.running):
                    self._look_after(test)
                time.sleep(POLL_S)
        finally:
            for test in self.running:
                self._kill(test)
            for test in self.tests:
                if test.before and not test.reports:
                    test.reports = [self._failure(test, test.before)]  # there was no time for it alone
                    self._tell(test)

    def _path(self, test: Test, end: str) -> Path:
        return self.directory / f"{self.tests.index(test)}{'-again' if test.before else ''}.{end}"

    def _start(self, test: Test) -> None:
        self._path(test, "log").touch()
        sys.stdout.flush()
        sys.stderr.flush()
        test.began, test.pid = time.monotonic(), os.fork()
        if test.pid == 0:
            try:
                self._become(test)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)
        self.running.append(test)

    def _look_after(self, test: Test) -> None:
        """Take the reports of a process that has ended; end it at its test's limit."""
        pid, status = os.waitpid(test.pid, os.WNOHANG)
        test.seconds = time.monotonic() - test.began
        if not pid and test.seconds <= test.limit_s:
            return
        why = f"took longer than {test.limit_s:g} s; its process was killed"
        if pid:
            code = os.waitstatus_to_exitcode(status)
            name = signal.Signals(-code).name if code < 0 else ""
            why = f"its process was ended by {name}" if name else f"exit code {code}"
        else:
            let_them_tell({test.pid: self._path(test, "log")})
            if not self._kill(test):
                self.stuck.append(test.pid)
        self.running.remove(test)
        if (path := self._path(test, "json")).exists():
            load = self.config.hook.pytest_report_from_serializable
            test.reports = [load(config=self.config, data=data) for data in json.loads(path.read_text())]
        else:
            log = self._path(test, "log").read_text(errors="replace")[-6000:]
            test.reports = [self._failure(test, f"{why}\n{log}".rstrip())]
        if test.failed and not (test.is_alone or test.before or self.at_once == 1):
            test.before, test.reports, test.is_alone = _reason(test.reports), [], True
            self.waiting.append(test)
        else:
            self._tell(test)

    def _tell(self, test: Test) -> None:
        for report in test.reports:
            self.config.hook.pytest_runtest_logreport(report=report)

    def _failure(self, test: Test, text: str) -> pytest.TestReport:
        item, outcome = test.item, {"outcome": "failed", "when": "call", "duration": test.seconds}
        return pytest.TestReport(item.nodeid, item.location, {}, longrepr=text, **outcome)

    def _kill(self, test: Test) -> bool:
        """End the test's process with all that it has started; return whether it has ended."""
        for pid in [test.pid, *_descendants(test.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + TELL_S
        while time.monotonic() < until:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(test.pid, os.WNOHANG)[0] == 0:
                    time.sleep(POLL_S)
                    continue
            return True
        return False

    # ---- in the process of a test

    def _become(self, test: Test) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        output = os.open(self._path(test, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1, file=output)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.names[device] for device in test.on)
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
        self.config.hook.pytest_runtest_protocol(item=test.item, nextitem=None)
        save = self.config.hook.pytest_report_to_serializable
        data = [save(config=self.config, report=report) for report in reports.kept]
        path = self._path(test, "part")
        path.write_text(json.dumps(data, default=str))
        path.replace(self._path(test, "json"))
        os._exit(0)

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
