"""Run a program of this repository as forked ranks, which have imported torch and Triton already.

A start of Python takes 2 s for that and torchrun 5 s, longer than most of these programs run. What torchrun
itself does is tested in `test_launch.py`.
"""

import io
import logging
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import triton  # noqa: F401 - so that the ranks have it

from benchmarks.common.processes import with_benchmarks
from dist_autotune.cli.commands import main
from ranks import Result, assert_all_ok, run_ranks, store_server

__all__ = ["environment_of_rank", "printed", "run_program", "start_program", "torchrun"]


def run_program(
    program: Path | str, *arguments: str, ranks: int = 2, environment: dict[str, str] | None = None
) -> str:
    """Return what the ranks print, one after the other; fail where one of them does.

    program: a file, or the name of a module.
    """
    ended = start_program(program, *arguments, ranks=ranks, environment=environment)
    output = "".join(printed(rank) for rank in range(ranks))
    print(output)  # pytest shows it where a rank fails
    assert_all_ok(ended)
    return output


def start_program(
    program: Path | str,
    *arguments: str,
    ranks: int = 2,
    environment: dict[str, str] | None = None,
    options: Sequence[str] | None = None,
) -> list[Result]:
    """Return how the program ends on each rank. options: of `dist-autotune run`, which runs it then."""
    with store_server(ranks) as port:
        started = (ranks, program, arguments, environment or {}, port, options)
        return run_ranks(_become, ranks, *started, init="none", timeout_s=240)


def torchrun(module: str, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a module of this repository as ranks that torchrun starts, which GPUs need; return how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = with_benchmarks(os.environ | {"OMP_NUM_THREADS": "1"})
    return subprocess.run(
        [*command, "-m", "--", module, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def printed(rank: int) -> str:
    """Return what a rank of the program has printed that was started last."""
    return Path(f"printed-{rank}").read_text()


def environment_of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set; the store is that of `store_server`."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in place.items()}


def _become(
    rank: int,
    ranks: int,
    program: Path | str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    port: int,
    options: Sequence[str] | None,
) -> None:
    """Be that program on this rank."""
    os.environ |= environment_of_rank(rank, ranks, port) | environment
    sys.argv = [str(program), *arguments]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
    printed = os.open(f"printed-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
    warnings.resetwarnings()  # pytest makes errors of them
    logging.getLogger().handlers.clear()  # and keeps what is logged
    try:
        if isinstance(program, str):
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        elif options is None:
            runpy.run_path(str(program), run_name="__main__")
        else:
            sys.argv = ["dist-autotune", "run", *options, *sys.argv]
            main()
    except SystemExit as end:
        if end.code:
            raise
