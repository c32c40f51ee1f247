"""One child: how it ends is told, and nothing of it is left."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from dist_autotune.compilation import child as of_child
from dist_autotune.compilation.child import Child, Ending


def ending(work: Callable[[], Any], limit_s: float = 60.0, **options: Any) -> Ending:
    return Child([work], limit_s, **options).wait()


def raise_(error: BaseException) -> None:
    raise error


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "compiles": (lambda: None, ""),
    "an error that is the user's": (lambda: raise_(TypeError("the user's")), ""),
    "an interruption": (lambda: raise_(KeyboardInterrupt()), ""),
    "a config's error": (lambda: raise_(OutOfResources(2, 1, "threads")), "OutOfResources: out of resource"),
    "MLIR": (lambda: raise_(RuntimeError("PassManager::run failed")), "RuntimeError: PassManager"),
    "abort": (os.abort, "the compiler was ended by SIGABRT"),
    "segmentation fault": (lambda: ctypes.string_at(0), "the compiler was ended by SIGSEGV"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "the compiler was ended by SIGKILL"),
    "exit": (lambda: os._exit(3), "the compiler ended its process with exit code 3"),
    "exit 0": (lambda: os._exit(0), "the compiler ended its process with exit code 0"),
}


@pytest.mark.parametrize(("work", "reason"), ENDS.values(), ids=ENDS)
def test_each_end_is_told(work, reason):
    told = ending(work).reason
    assert told.startswith(reason)
    assert bool(told) == bool(reason)


def endings(child: Child) -> list[tuple[int, Ending]]:
    told = child.poll()
    while not child.is_over:
        time.sleep(1e-3)
        told += child.poll()
    return told


def test_one_child_works_through_several_pieces_and_the_one_that_ends_it_is_the_last():
    fails, crashes, why = ENDS["MLIR"][0], os.abort, "the compiler was ended by SIGABRT"
    told = endings(Child([list, fails, list, crashes, list], 60.0))
    assert [(place, ending.reason[: len(why)]) for place, ending in told] == [
        (0, ""),
        (1, "RuntimeError: PassManager::run fa"[: len(why)]),
        (2, ""),
        (3, why),
    ]


def test_the_limit_is_of_each_piece_of_work():
    def computes(seconds: float) -> Callable[[], None]:
        def work() -> None:
            until = time.process_time() + seconds
            while time.process_time() < until:
                pass

        return work

    told = endings(Child([computes(0.7), computes(0.7), computes(60.0), list], 1.0, yields=True))
    assert [(place, ending.reason) for place, ending in told] == [
        (0, ""),
        (1, ""),
        (2, "did not compile within 1 s"),
    ]


def test_a_child_that_waits_for_a_lock_stands_still_and_one_that_computes_does_not(monkeypatch):
    monkeypatch.setattr(of_child, "STILL_S", 0.3)
    lock = threading.Lock()
    lock.acquire()  # as another thread does at the fork
    computes = [lambda: [None for _ in iter(int, 1)]]
    waiting, computing = Child([lock.acquire], 60.0), Child(computes, 60.0)
    deadline = time.monotonic() + 30.0
    while not waiting.stands_still():
        assert time.monotonic() < deadline
        assert not computing.stands_still()
        time.sleep(5e-3)
    for child in (waiting, computing):
        child.kill()


def test_pauses_put_off_by_their_length_that_a_child_stands_still(monkeypatch):
    monkeypatch.setattr(of_child, "STILL_S", 0.5)
    child = Child([signal.pause], 60.0)
    deadline = time.monotonic() + 30.0
    while not child.stands_still():
        assert time.monotonic() < deadline
        child.pause()
        assert not child.stands_still()
        time.sleep(5e-3)
        child.pause(goes_on=True)
        time.sleep(50e-3)
    child.kill()


def test_a_child_that_is_paused_is_not_late():
    child = Child([signal.pause], 0.02, yields=True)
    child.pause()
    time.sleep(0.5)  # more than the limit and its tenfold
    assert (child.poll(), child.is_over) == ([], False)
    child.pause(goes_on=True)
    ((_, ending),) = endings(child)
    assert ending.reason == "did not compile within 0.02 s"


def test_no_garbage_is_collected_in_a_child_even_when_it_is_due(monkeypatch):
    class Owner:
        """What owns an event of a device, which only its own process may destroy."""

        def __init__(self) -> None:
            self.maker, self.cycle = os.getpid(), self

        def __del__(self) -> None:
            if os.getpid() != self.maker:
                os._exit(9)

    def fork_with_garbage() -> int:
        was_enabled = gc.isenabled()
        gc.disable()
        Owner()
        pid = fork()
        if was_enabled:
            gc.enable()
        return pid

    fork = os.fork
    monkeypatch.setattr(os, "fork", fork_with_garbage)
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(1, 1000, 1000)  # a collection is due with each object that is made
        assert ending(list) == Ending()
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)


def test_the_telling_line_of_what_the_compiler_said_is_the_reason(capfd):
    def work() -> None:
        os.write(2, b"a remark\nLLVM ERROR: Cannot select: intrinsic %llvm.x\nStack dump:\n")
        os.abort()

    assert ending(work).reason.endswith("SIGABRT: LLVM ERROR: Cannot select: intrinsic %llvm.x")
    assert "a remark" in capfd.readouterr().err


def test_signals_for_the_job_do_not_end_a_compilation():
    def work() -> None:
        for job_signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), job_signal)

    assert ending(work) == Ending()


def test_nothing_of_a_child_stays_open():
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    ending(lambda: None)
    ending(os.abort)
    Child([signal.pause], 60.0).kill()
    assert descriptors() == before


def test_one_that_is_cut_off_has_no_file_and_no_socket_but_its_report(tmp_path, capfd):
    def tried(act: Callable[[], Any]) -> bool:
        with contextlib.suppress(OSError):
            act()
            return True
        return False

    def work() -> str:
        acts = (
            lambda: os.write(file.fileno(), b"x"),
            lambda: ours.send(b"x"),
            lambda: os.open(tmp_path / "new", os.O_CREAT | os.O_WRONLY),
            lambda: os.open("/dev/null", os.O_RDONLY),
            socket.socket,
            lambda: subprocess.run(["true"]),
        )
        os.write(1, b"said")
        os.write(2, b"said")
        return str([tried(act) for act in acts])

    ours, theirs = socket.socketpair()
    with (tmp_path / "open").open("wb") as file, ours, theirs:
        assert ending(work, is_cut_off=True) == Ending(result=str([False] * 6))
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    assert [path.name for path in tmp_path.iterdir()] == ["open"]
    assert (tmp_path / "open").read_bytes() == b""
    assert capfd.readouterr() == ("", "")
