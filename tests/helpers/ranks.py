"""Run a function as several ranks, each a process of its own, and report how every one of them ended.

    results = run_ranks(step, 2, x)         # step(rank, x) in two processes joined by gloo
    assert_all_ok(results)

Ranks are forked from this process, where torch is imported already: 0.1 s for two, against 2.5 s with
torchrun. What a rank returns, raises or prints to stderr travels in files, so a rank may die at any
moment and its peers' results stay readable.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import io
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from frame_room import with_room
from process_states import let_them_tell

Init = Literal["file", "tcp", "none"]

POLL_S = 0.002
ON_GPUS = os.environ.get("DIST_AUTOTUNE_TEST_GPU") == "1"
GPU_LIMIT_S = 130.0  # of ranks on GPUs: less than a test has there, which then tells where they stood
PR_SET_PDEATHSIG = 1  # prctl(2): the signal a process gets when its parent dies


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one rank ended."""

    rank: int
    value: Any = None  # what fn returned
    error: str | None = None  # "Type: message" of what fn raised
    traceback: str | None = None
    exitcode: int | None = None  # None: a signal ended the rank
    signal: signal.Signals | None = None
    timed_out: bool = False  # killed here, at the deadline; stderr shows where it stood, unless stopped
    elapsed_s: float = 0.0  # in fn; of a rank that reported nothing: from its start to its end
    stderr: str = ""

    @property
    def ok(self) -> bool:
        """True when fn returned in time and its value arrived."""
        return self.exitcode == 0 and self.error is None and not self.timed_out


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    backend: str = "gloo",
    init: Init = "file",
) -> list[Result]:
    """Return the Result of `fn(rank, *args)` for each rank, after `timeout_s` at the latest.

    `init` joins the ranks in a default process group through a file or, as torchrun does, through a TCP
    store in a process that outlives every rank; "none" leaves them apart. No process of a rank's group is
    left when this returns. To be called where this process has not started CUDA, which survives no fork.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group is open here, and its threads would be lost in forked ranks")
    if ON_GPUS:
        timeout_s = min(timeout_s, GPU_LIMIT_S)
    directory = Path(tempfile.mkdtemp(prefix="ranks-"))
    job = _Job(fn, args, world_size, timeout_s, backend, init, str(directory))
    try:
        with contextlib.ExitStack() as cleanup:
            if init == "tcp":
                job = replace(job, store_port=cleanup.enter_context(store_server(world_size)))
            return _run(job)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def assert_all_ok(results: list[Result]) -> list[Any]:
    """Return the ranks' values; where a rank did not return, fail with what each rank left behind.

    Where one rank is to end otherwise, pass the others: `assert_all_ok(survivors)`.
    """
    __tracebackhide__ = True
    failed = [result for result in results if not result.ok]
    if failed:
        raise AssertionError("\n\n".join(describe(result) for result in failed))
    return [result.value for result in results]


def assert_killed(result: Result, by: signal.Signals = signal.SIGKILL) -> None:
    """Fail with what the rank left behind unless that signal, which the test sent, ended it."""
    __tracebackhide__ = True
    if result.signal is not by or result.timed_out:
        raise AssertionError(f"not ended by {by.name} from the test:\n{describe(result)}")


def describe(result: Result) -> str:
    """Return how a rank ended, with its traceback and what it wrote to stderr."""
    if result.timed_out:
        end = f"killed after {result.elapsed_s:.1f} s without an end"
    elif result.signal is not None:
        end = f"ended by {result.signal.name}"
    elif result.ok:
        end = f"returned {result.value!r}"[:500]
    else:
        end = f"exit code {result.exitcode}"
    parts = [
        f"rank {result.rank}: {result.error or end}",
        result.traceback,
        result.stderr and f"stderr:\n{result.stderr}",
    ]
    return "\n".join(part.rstrip() for part in parts if part)


def meet(*ranks: int) -> None:
    """Return when `ranks` (none given: all) have come here as often as this rank; called on all of those.

    To be called between the last collective and the death, or early exit, of a rank: its peers may still
    be inside that collective, and lose it with the connection. Here nobody depends on a rank that has
    gone: it goes through the store of `run_ranks`, which outlives every rank. Also to be called where
    ranks must begin something together because one waits for the other for a short time only.
    """
    store = dist.distributed_c10d._get_default_store()
    names = {rank: f"met/{ranks}/{rank}" for rank in ranks or range(dist.get_world_size())}
    turn = store.add(names[dist.get_rank()], 1)
    while any(not store.check([name]) or int(store.get(name)) < turn for name in names.values()):
        time.sleep(POLL_S)


@dataclass(frozen=True)
class _Job:
    """What every rank of one call is told."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    timeout_s: float
    backend: str
    init: Init
    directory: str
    store_port: int = 0


# ---- in the parent


def _run(job: _Job) -> list[Result]:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: a rank that met them would hang
    started = time.monotonic()
    deadline = started + job.timeout_s
    pids: list[int] = []
    results: dict[int, Result] = {}
    try:
        for rank in range(job.world_size):
            _stderr_path(job, rank).touch()
            pids.append(_fork(lambda rank=rank: _become_rank(job, rank)))
        while len(results) < job.world_size:
            late = time.monotonic() > deadline
            left = {rank: pid for rank, pid in enumerate(pids) if rank not in results}
            running = {rank: pid for rank, pid in left.items() if not _has_ended(pid)}
            if late:
                let_them_tell({pid: _stderr_path(job, rank) for rank, pid in running.items()})
            for rank, pid in left.items():
                if late or rank not in running:
                    status = _end(pid)
                    wall_s = time.monotonic() - started
                    results[rank] = _result(job, rank, status, wall_s, late=rank in running)
            time.sleep(POLL_S)
    finally:
        for rank, pid in enumerate(pids):
            if rank not in results:  # an exception, Ctrl-C for one, is on its way out
                _end(pid)
    return [results[rank] for rank in range(job.world_size)]


def _fork(main: Callable[[], None]) -> int:
    """Return the pid of a child that runs `main` in a session of its own and never comes back here."""
    sys.stdout.flush()  # or the child would write our buffered text a second time
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to tell, see _become_rank
        os.setsid()  # one signal reaches the rank and all that it starts
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing spins on when pytest is killed
        main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)  # not sys.exit: pytest's own teardown must not run twice


def _has_ended(pid: int) -> bool:
    # WNOWAIT leaves the process unreaped, so that its pid still names its group when we kill the rest of it.
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(pid: int) -> int:
    """Kill whatever is left of the process and its group; return its wait status."""
    for kill in (os.killpg, os.kill):  # kill: a child that has not come to setsid yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _result(job: _Job, rank: int, status: int, wall_s: float, *, late: bool) -> Result:
    code = os.waitstatus_to_exitcode(status)
    result = Result(
        rank=rank,
        exitcode=code if code >= 0 else None,
        signal=signal.Signals(-code) if code < 0 else None,
        timed_out=late,
        elapsed_s=wall_s,
        stderr=_stderr_path(job, rank).read_text(errors="replace"),
    )
    if not _report_path(job, rank).exists():
        return result
    try:
        report = pickle.loads(_report_path(job, rank).read_bytes())
    except Exception as error:  # any class may fail to load, in its own way
        return replace(result, error=f"UnpicklingError: the value cannot be unpickled: {error!r}")
    return replace(result, **report)


@contextlib.contextmanager
def store_server(world_size: int) -> Iterator[int]:
    """Give the port of a TCP store that no rank's end takes away; torchrun's agent is such a process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            store = dist.TCPStore(
                "127.0.0.1",
                port,
                world_size,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.fileno(),
            )
            while store is not None:
                signal.pause()

        pid = _fork(serve)
    try:
        yield port
    finally:
        _end(pid)


# ---- in a rank


def _become_rank(job: _Job, rank: int) -> None:
    """Run fn, write the report and leave the process; nothing that the parent had set up is torn down."""
    stderr = os.open(_stderr_path(job, rank), os.O_WRONLY | os.O_APPEND)
    os.dup2(stderr, 2)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True, write_through=True)
    faulthandler.enable(sys.stderr)
    # At the deadline. Not `dump_traceback_later`: its thread can crash on the frames of one that is running.
    faulthandler.unregister(signal.SIGUSR1)  # a registration of the parent stays on paper: _fork ignores it
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    # What a shell starts in the background ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if ON_GPUS:
        warnings.resetwarnings()  # pytest makes errors of them, and the driver's stack has its own
    # The pool of the parent is lost, and two threads of autograd that make a new one at once abort.
    torch.set_num_threads(1)
    started = time.monotonic()
    exitcode, report = 0, dict[str, Any]()
    try:
        _join(job, rank)
        started = time.monotonic()
        value = with_room(job.fn, rank, *job.args)
        report = {"elapsed_s": time.monotonic() - started, "value": value}
    except BaseException as error:
        exitcode = _exitcode(error)
        report = {"elapsed_s": time.monotonic() - started, **_failure(error)}
    try:
        data = pickle.dumps(report)
    except Exception as error:  # whatever the value's own __reduce__ raises
        exitcode = 1
        data = pickle.dumps({"elapsed_s": report["elapsed_s"], **_failure(error)})
    path = _report_path(job, rank)
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").replace(path)
    sys.stdout.flush()
    os._exit(exitcode)


def _join(job: _Job, rank: int) -> None:
    # Longer than a rank is allowed: who hangs is to be killed where it stands, not to fail by itself first.
    timeout = datetime.timedelta(seconds=job.timeout_s + 60)
    if job.init == "none":
        return
    if "nccl" in job.backend:
        torch.cuda.set_device(rank)
    store = (
        dist.FileStore(f"{job.directory}/store", job.world_size)
        if job.init == "file"
        else dist.TCPStore("127.0.0.1", job.store_port, job.world_size, is_master=False, timeout=timeout)
    )
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.world_size, timeout=timeout)
    # A rank whose fn ends at once must not leave while gloo still connects others to it.
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{other}" for other in range(job.world_size)], timeout)


def _failure(error: BaseException) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def _exitcode(error: BaseException) -> int:
    """Return the code that an interpreter ended by this exception would leave."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _report_path(job: _Job, rank: int) -> Path:
    return Path(job.directory) / f"rank-{rank}.report"


def _stderr_path(job: _Job, rank: int) -> Path:
    return Path(job.directory) / f"rank-{rank}.stderr"
