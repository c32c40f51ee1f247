"""One child and its workers: how each piece of work ends is told, and nothing of them is left."""

import ctypes
import gc
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from dist_autotune.compilation import workers
from dist_autotune.compilation.child import NO_FORK, STOOD_STILL, Child, Ending
from dist_autotune.compilation.workers import Work


def child(*pieces: Callable[[], Any], limit_s: float = 60.0, **options: Any) -> Child:
    return Child(Work(pieces=pieces, limit_s=limit_s, **options))


def ending(piece: Callable[[], Any]) -> Ending:
    return child(piece).wait()


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


def endings(of: Child) -> list[tuple[int, Ending]]:
    told = of.poll()
    while not of.is_over:
        time.sleep(1e-3)
        told += of.poll()
    return told


def computes(seconds: float) -> Callable[[], None]:
    def work() -> None:
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

    return work


def test_the_limit_is_of_each_piece_of_work_and_the_rest_goes_to_another_worker():
    told = dict(
        endings(child(*[computes(0.1)] * 12, computes(60.0), os.abort, list, limit_s=1.0, yields=True))
    )
    reasons = [told[place].reason for place in range(15)]
    assert reasons == [*[""] * 12, "did not compile within 1 s", "the compiler was ended by SIGABRT", ""]


def test_workers_take_the_next_piece_as_long_as_another_one_lasts():
    forks = child(signal.pause, *[os.getpid] * 5, workers=lambda own: 2)
    told: list[tuple[int, Ending]] = []
    while len(told) < 5:
        told += forks.poll()
    assert [place for place, _ in told] == [1, 2, 3, 4, 5]
    forks.kill()


@pytest.mark.parametrize("moves", [[0], []])
def test_what_waits_for_a_lock_of_the_fork_ends_all_for_another_fork_or_has_its_time(monkeypatch, moves):
    monkeypatch.setattr(workers, "STILL_S", 0.3)
    lock = threading.Lock()
    lock.acquire()  # as another thread does at the fork
    waiting = child(lock.acquire, computes(60.0), limit_s=2.0, moves=moves, workers=lambda own: 2)
    told = [ending.reason for _, ending in endings(waiting)]
    assert (told, waiting.why_left) == (
        ([], STOOD_STILL) if moves else (["did not compile within 2 s"] * 2, "")
    )


def test_late_pieces_do_not_go_on_without_their_helpers():
    late = child(*[lambda: subprocess.run(["sleep", "60"])] * 8, limit_s=0.1, workers=lambda own: 8)
    assert {ending.reason for _, ending in endings(late)} == {"did not compile within 0.1 s"}


@pytest.mark.parametrize("standard", [1, 2])
def test_a_standard_file_may_be_closed(standard):
    kept = os.dup(standard)
    os.close(standard)
    try:
        reasons = ending(list).reason, ending(os.abort).reason
    finally:
        os.dup2(kept, standard)
        os.close(kept)
    assert reasons == ("", "the compiler was ended by SIGABRT")


@pytest.mark.parametrize(("refused", "told"), [([1], 3), (range(9), 0)], ids=["the second", "each"])
def test_where_workers_are_refused_fewer_compile_and_none_is_banned(monkeypatch, refused, told):
    rank, forks, fork = os.getpid(), itertools.count(), os.fork

    def refusing() -> int:
        if os.getpid() != rank and next(forks) in refused:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", refusing)
    few = child(*[list] * 3, workers=lambda own: 2)
    assert sorted(endings(few)) == [(place, Ending()) for place in range(told)]
    assert few.why_left == ("" if told else NO_FORK)


def test_what_ends_a_worker_that_has_told_is_no_ending(monkeypatch):
    def tells_and_dies(foreman: Any, *ending: Any) -> None:
        tell(foreman, *ending)
        if os.getppid() != rank:
            os.kill(os.getpid(), signal.SIGKILL)

    rank, tell = os.getpid(), workers.Foreman._tell
    monkeypatch.setattr(workers.Foreman, "_tell", tells_and_dies)
    assert endings(child(list, list)) == [(0, Ending()), (1, Ending())]


def test_a_child_that_is_paused_is_not_late():
    paused = child(signal.pause, limit_s=0.02, yields=True)
    paused.pause()
    time.sleep(0.5)  # more than the limit and its tenfold
    assert (paused.poll(), paused.is_over) == ([], False)
    paused.pause(goes_on=True)
    ((_, ending),) = endings(paused)
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
    child(signal.pause).kill()
    assert descriptors() == before
