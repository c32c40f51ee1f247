"""Regret of tuning: how much slower a fresh session's pick is than the best there is.

    python -m benchmarks.regret --op OP [--nproc N] [--sessions N] [--shapes public] [--json FILE]
    ./launch.sh --nproc N benchmarks/regret.py --op OP ...     # the same; rank 0 starts all processes

OP is ag_gemm, gemm_rs, ag_moe or moe_rs.

Protocol: each session is a process group of its own with an empty result cache, which tunes all shapes as a
user's program would; sessions begin at different shapes, so that each comes first in some. What a session
ends with, the option of each `tunable` and the config of each kernel, is its pick. Then one process group has
every pick as a tuned function that reads the session's cache and tries nothing, and the alternatives:

    ag_gemm           consumer and pieces fixed by the operation's arguments, with --alternatives all programs
                      too; each is tuned alone, in this process. And cuBLAS with a collective
    gemm_rs           as the others, and cuBLAS with a collective
    ag_moe, moe_rs    as the others, and a collective with our grouped GEMM
    others            what tuning finds in this process, and the configs that the sessions timed best

It checks that a pick loads as the session left it, checks all results against a reference and times all arms
interleaved (`common/arms.py`). A session's regret is its pick's time over the least of all arms, alternatives
and picks. What an arm launches is seen before and after the timing: one that launches other configs has
no time.

Traps: a pick whose context is provisional is not on disk and cannot be timed, which is told. Equal plans are
one arm: of many near ties, the least time is below that of any. One pick is timed as two arms, whose
difference says how much that may be.

Sessions share Triton's binaries, which the first one makes. With --directory sessions are kept, and those
that ended well are not run again. Without GPUs a tiny shape runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common.options import NOT_MEASURED, add_record_options, kept_arguments, new_parser
from benchmarks.common.processes import end, environment_without_torchrun, run_limited, with_benchmarks
from benchmarks.fresh_sessions.sessions import Sessions, torchrun

OPERATIONS = ("ag_gemm", "gemm_rs", "ag_moe", "moe_rs")
OF_THE_PARENT = (
    "directory",
    "session",
    "timing",
    "nproc",
    "sessions_budget_s",
    "ran_as",
)  # not of its children


def parse() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--op", choices=OPERATIONS, required=True, help="what is tuned")
    parser.add_argument("--nproc", type=int, default=2, help="ranks of each session")
    parser.add_argument("--sessions", type=int, default=10, help="fresh ones")
    parser.add_argument(
        "--shapes", default="default", help="default, public, or such as 2048x3584x8192,512x3584x8192"
    )
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"], help="of the operands")
    parser.add_argument(
        "--backend", default="auto", help="symmetric memory of ours: auto, torch, nvshmem, shm"
    )
    parser.add_argument("--alternatives", choices=["quick", "all"], default="quick", help="of ag_gemm")
    parser.add_argument("--configs", type=int, default=5, help="best configs of the sessions that are timed")
    parser.add_argument("--directory", type=Path, help="where sessions are kept; they are not run again")
    parser.add_argument(
        "--session-limit-s", type=float, default=150.0, help="for one session, start included"
    )
    parser.add_argument("--sessions-budget-s", type=float, help="no session begins after so many seconds")
    parser.add_argument("--shape-limit-s", type=float, default=300.0, help="for the timing of one shape")
    parser.add_argument("--warm-ups", type=int, help="launches of all arms")
    parser.add_argument("--iterations", type=int, help="timed calls of each arm")
    add_record_options(parser)
    for name in ("--session", "--timing", "--ran-as"):  # what the program passes to itself
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.nproc < 1 or options.sessions < 1:
        parser.error("--nproc and --sessions are at least 1")
    return options


def main() -> None:
    options = parse()
    if options.session is None and options.timing is None:
        sys.exit(start_all(options))
    from benchmarks.fresh_sessions import ranks  # it imports torch and Triton

    if options.session is None:
        ranks.run_timing(options)
    else:
        Sessions(options.directory).await_turn(options.session, 2 * options.session_limit_s)
        ranks.run_session(options)


# ---- the process that starts all others


def start_all(options: argparse.Namespace) -> int:
    """Run the sessions, then the timing; return the exit code."""
    if "RANK" in os.environ:  # under torchrun, as launch.sh runs files
        if os.environ["RANK"] != "0":
            return 0
        options.nproc = int(os.environ["WORLD_SIZE"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, too
    with contextlib.ExitStack() as stack:
        if options.directory is None:
            options.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="regret-")))
        options.directory = options.directory.absolute()
        sessions = Sessions(options.directory)
        try:
            sessions.adopt({name: getattr(options, name) for name in ("op", "shapes", "dtype", "nproc")})
        except ValueError as error:
            print(f"--directory: {error}", file=sys.stderr)
            return 2
        run_sessions(options, sessions)
        trouble = run_limited(
            torchrun(options.nproc, *arguments_of(options), "--timing", "yes", "--ran-as", _command(options)),
            {**with_benchmarks(environment_without_torchrun()), **_caches_of_timing(options)},
            limit_s=None,
        )
    if trouble:
        print(f"the timing {trouble}", file=sys.stderr)
    return int(bool(trouble))


def run_sessions(options: argparse.Namespace, sessions: Sessions) -> None:
    """Run the sessions one after another; the processes of the next one start while one runs."""
    began = time.monotonic()
    numbers = range(1, options.sessions + 1)
    left = [number for number in numbers if not sessions.has(number)]
    for number in numbers:
        if number not in left:
            say(f"session {number}: was there")
    started: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for place, number in enumerate(left):
            passed_s = time.monotonic() - began
            if options.sessions_budget_s is not None and passed_s > options.sessions_budget_s:
                say(f"sessions {number} to {options.sessions} are left out: {passed_s:.0f} s have passed")
                return
            for each in left[place : place + 2]:
                if each not in started:
                    command = torchrun(options.nproc, *arguments_of(options), "--session", str(each))
                    started[each] = sessions.start(each, command)
            sessions.run(number, started.pop(number), limit_s=options.session_limit_s, say=say)
    finally:
        for number, process in started.items():  # that were not let in
            end(process)
            shutil.rmtree(sessions.of(number))


def say(text: str) -> None:
    print(text, flush=True)


def arguments_of(options: argparse.Namespace) -> list[str]:
    """Return the arguments that make a child have these options."""
    arguments = ["--directory", str(options.directory)]
    for name, value in vars(options).items():
        if name in OF_THE_PARENT or value is None or value is False:
            continue
        given = value.absolute() if isinstance(value, Path) else value
        arguments += [f"--{name.replace('_', '-')}", *([] if value is True else [str(given)])]
    return arguments


def _caches_of_timing(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables of the timing: binaries as a session left them, and a result cache of its own."""
    first = Sessions(options.directory).environment(1)
    own = options.directory / "timing"
    return {
        "TRITON_CACHE_DIR": first["TRITON_CACHE_DIR"],
        "DIST_AUTOTUNE_CACHE_DIR": str(own / "cache"),
        "DIST_AUTOTUNE_LOG_DIR": str(own / "logs"),
    }


def _command(options: argparse.Namespace) -> str:
    """Return the command that starts the same again from the root of the tree."""
    kept = kept_arguments(sys.argv[1:], (*NOT_MEASURED, "--directory", "--nproc"))
    return shlex.join(["python", "-m", "benchmarks.regret", *kept, "--nproc", str(options.nproc)])


if __name__ == "__main__":
    main()
