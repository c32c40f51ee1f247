"""From the start of the processes to the first settled call of a tuned function: how long, and with what.

    python -m benchmarks.tuner.tuning_time [--ranks RANKS] [--rounds ROUNDS] [--m M] [--n N] [--k K]
                                           [--json FILE]

Protocol: torchrun starts fresh ranks, which import, join a group, open an `AllGatherGemm` and call it inside
`contextual_autotune(is_dist=True)` until nothing is left to try. Then the product is checked. In each round

    cold             Triton's cache is empty, and that of the tuner
    binaries warm    Triton's cache is as the cold start has left it, the tuner's is empty
    all warm         both are as the starts before have left them

A row is the median over the rounds of the rank that settled last: seconds since torchrun was started, then
the parts of it; compiling, runs and exchanges are from the session's report (`TuningReport.spent`).

Traps: the first process of all reads torch from a cold disk, so one that only imports goes before. Ranks
share the compiling, so a rank that compiles little waits for its peers in exchanges. `common/render.py`
makes a page of the --json file. Without a GPU a tiny shape runs in Triton's interpreter, where nothing
is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.options import NOT_MEASURED, add_record_options, new_parser
from benchmarks.common.processes import environment_without_torchrun, run_limited, with_benchmarks
from benchmarks.fresh_sessions.sessions import torchrun

PROGRAM = "benchmarks.tuner.tuning_time"
STARTED = "TUNING_TIME_STARTED"  # seconds of the epoch, told to the processes
LIMIT_S = 1800.0  # for one start of all ranks
ARMS = ("cold", "binaries warm", "all warm")
COLUMNS = (
    "caches",
    "settled after s",
    "imports",
    "group",
    "opening",
    "session",
    "compiling",
    "runs of the function",
    "exchanges",
    "runs",
)


@dataclass(frozen=True)
class Start:
    """One rank's start. Seconds; the first four one after another, the next three parts of `session_s`."""

    settled_s: float
    imports_s: float
    group_s: float
    opening_s: float
    session_s: float
    compiling_s: float
    runs_s: float
    exchanges_s: float
    runs: int


# ---- one rank


def rank_main(options: argparse.Namespace) -> None:
    """Be one rank: tune, and write down what it took."""
    began = float(os.environ[STARTED])
    from benchmarks.ag_gemm import DEFAULT, DTYPES, Problem, Shape
    from benchmarks.common.arms import Plan
    from benchmarks.common.ranks import Ranks, run_on_ranks
    from benchmarks.common.records import describe_run, write_json
    from dist_autotune import contextual_autotune
    from dist_autotune.kernels.ag_gemm import AllGatherGemm

    imported = time.time()
    shape = Shape(options.m or DEFAULT.m, options.n or DEFAULT.n, options.k or DEFAULT.k)
    dtype = DTYPES[options.dtype]

    def body(ranks: Ranks) -> int:
        joined = time.time()
        problem = Problem(shape, dtype, ranks)
        problem.refresh()
        with AllGatherGemm(problem.rows, shape.k, dtype) as op:
            step = contextual_autotune(
                lambda: op(problem.a, problem.weight), is_dist=True, name="tuning time"
            )
            ranks.synchronize()
            opened, reports = time.time(), []
            while not step.settled:
                product = step()
                reports.append(step.report)
            ranks.synchronize()
            settled = time.time()
            error = problem.product_error(product)
            if not error <= problem.limit:
                raise RuntimeError(f"wrong result: relative error {error:.1e}, at most {problem.limit:.1e}")
        spent = {
            name: sum(getattr(report.spent, name) for report in reports)
            for name in ("compiling_s", "runs_s", "exchanges_s")
        }
        start = Start(
            settled_s=settled - began,
            imports_s=imported - began,
            group_s=joined - imported,
            opening_s=opened - joined,
            session_s=settled - opened,
            runs=sum(report.runs for report in reports),
            **spent,
        )
        title = f"Tuning an all-gather + GEMM, {shape}, from the start of the processes"
        plan = Plan(warm_ups=0, iterations=options.rounds, limit_s=LIMIT_S)
        record = describe_run(ranks, op="tuning_time", title=title, commit=options.commit, plan=plan)
        record["figures"] = "wall clock, seconds"
        write_json(options.one_rank / f"rank-{ranks.rank}.json", {"start": asdict(start), "record": record})
        return 0

    run_on_ranks(body)


# ---- all ranks


def start_ranks(arguments: list[str], ranks: int, directory: Path, caches: dict[str, str]) -> list[Any]:
    """Start the ranks, wait for their end; return what each wrote down. Raises SystemExit on failure."""
    environment = {**with_benchmarks(environment_without_torchrun()), **caches, STARTED: repr(time.time())}
    own = ("--one-rank", str(directory), *arguments)
    trouble = run_limited(torchrun(ranks, *own, module=PROGRAM), environment, LIMIT_S)
    if trouble:
        raise SystemExit(f"a start {trouble}")
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def one_round(arguments: list[str], ranks: int) -> tuple[dict[str, Start], dict[str, Any]]:
    """Return the start of the rank that settled last, by arm, and what rank 0 says of the run."""
    found: dict[str, Start] = {}
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tuning-time-") as name:
        directory = Path(name)
        for arm in ARMS:
            tuner_cache = directory / ("tuner-0" if arm == "cold" else "tuner-1")
            caches = {
                "TRITON_CACHE_DIR": str(directory / "triton"),
                "DIST_AUTOTUNE_CACHE_DIR": str(tuner_cache),
            }
            written = start_ranks(arguments, ranks, directory, caches)
            starts = [Start(**of_rank["start"]) for of_rank in written]
            found[arm] = max(starts, key=lambda start: start.settled_s)
            record = written[0]["record"]
    return found, record


def table(rounds: list[dict[str, Start]]) -> dict[str, Any]:
    """Return the medians of all rounds, as a table of a record."""
    rows = []
    for arm in ARMS:
        starts = [asdict(found[arm]) for found in rounds]
        medians = {name: statistics.median(start[name] for start in starts) for name in starts[0]}
        runs = medians.pop("runs")
        rows.append((arm, *(f"{seconds:.2f}" for seconds in medians.values()), f"{runs:g}"))
    notes = [
        "Seconds of the rank that settled last; compiling (and loading), runs of the function and exchanges "
        "(waiting for peers included) are parts of the session."
    ]
    return {"columns": COLUMNS, "figures": COLUMNS[1:], "rows": rows, "notes": notes}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes of each start")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind")
    for name, text in (("m", "rows of all ranks"), ("n", "columns of each rank"), ("k", "inner dimension")):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--dtype", default="bf16", help="of the operands")
    add_record_options(parser)
    parser.add_argument("--one-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_rank:
        rank_main(options)
        return
    from benchmarks.common.records import write_json
    from benchmarks.common.render import summary

    shape = [f"--{name}={getattr(options, name)}" for name in "mnk" if getattr(options, name)]
    arguments = [*shape, f"--dtype={options.dtype}", f"--rounds={options.rounds}"]
    if options.commit:
        arguments.append(f"--commit={options.commit}")
    rounds = []
    subprocess.run([sys.executable, "-c", "import torch, triton, dist_autotune"], check=True)
    for _ in range(options.rounds):
        found, record = one_round(arguments, options.ranks)
        rounds.append(found)
    kept = [text for text in arguments if not text.startswith(NOT_MEASURED)]
    program = ["python", "-m", PROGRAM, f"--ranks={options.ranks}", *kept]
    record["command"] = shlex.join(program)
    record["table"], record["clocks"] = table(rounds), {}
    record["rounds"] = [{arm: asdict(start) for arm, start in found.items()} for found in rounds]
    if options.json is not None:
        write_json(options.json, record)
    print(summary(record))


if __name__ == "__main__":
    main()
