"""One child: how it ends is told, and nothing of it is left."""

import ctypes
import gc
import os
import signal
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


def test_the_limit_is_of_each_piece_of_work():
    def computes(seconds: float) -> Callable[[], None]:
        def work() -> None:
            until = time.process_time() + seconds
            while time.process_time() < until:
                pass

        return work

    told = endings(Child([*[computes(0.1)] * 12, computes(60.0), list], 1.0, yields=True))
    assert [ending.reason for _, ending in told] == [*[""] * 12, "did not compile within 1 s"]


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
