"""Where the time of an online session goes: a step while it tunes, as it is and with one part left out.

    python -m benchmarks.tuner.meanwhile [--keys 32] [--configs 12] [--step-ms 30] [--ranks 1]
                                         [--overhead 0.15] [--arms NAME...] [--cuda]

Protocol: a step's host touches many objects of Python, as a training script does, for about --step-ms, and
launches a kernel with --keys keys. Each arm runs in processes of its own, with nothing compiled but where it
says so, until all is settled; then come 100 settled steps. A share is the mean step of the whole session,
without the first, over the mean settled one: 1.15 is promised with overhead=0.15. "host" is the same of the
processor time of the thread that makes the steps, which other work on the machine slows down less.

    arm            what is left out
    as it is       nothing
    compilers      all candidates are in Triton's cache
    slow ones      all candidates take the same time (on a device)
    exchanges      each rank tunes alone (with several)
    starts         ranks do not wait for each other before a trial
    fillers        trials are not held until the host has enqueued them
    log            no records are written

Traps: without --cuda a pretended device launches nothing, so steps are the host's, and a trial is as fast as
any step. Neighbours on the machine change wall times by more than a part costs: look at "host", and repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from benchmarks.common.options import new_parser
from benchmarks.common.pretended_device import PretendedDevice
from benchmarks.common.processes import environment_without_torchrun, with_benchmarks
from dist_autotune import contextual_autotune
from dist_autotune.timing.synchronized_start import SynchronizedStart

ARMS = ("as it is", "compilers", "slow ones", "exchanges", "starts", "fillers", "log")
SETTLED_STEPS, MOST_STEPS = 100, 4000
COLUMNS = (
    "left out",
    "steps",
    "seconds",
    "meanwhile ms",
    "settled ms",
    "share",
    "host",
    "forks",
    "the session's own",
)


@triton.jit
def passes(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PASSES: tl.constexpr, ID: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    for _ in range(PASSES):
        x = x * 0.999 + ID
    tl.store(y_ptr + offs, x, mask=offs < n)


def tuned_step(options: argparse.Namespace) -> Any:
    """Return the step, and what leaves out the part that the arm is named after."""
    slow = (
        [1] * options.configs if options.arm == "slow ones" else [1 + n % 5 for n in range(options.configs)]
    )
    configs = [
        triton.Config({"BLOCK": 1024, "PASSES": 200 * slow[n], "ID": n}) for n in range(options.configs)
    ]
    kernel = triton.autotune(configs, ["n"])(passes)
    device = "cuda" if options.cuda else "cpu"
    tensors = [torch.zeros(1 << 16, device=device), torch.zeros(1 << 16, device=device)]
    objects = [{"value": value} for value in range(max(1000, int(3.5e4 * options.step_ms)))]

    def step() -> None:
        for key in range(options.keys):
            n = (1 << 16) - 16 * key
            kernel[(64,)](*tensors, n)
        sum(each["value"] for each in objects)
        if options.ranks > 1:
            dist.all_reduce(torch.ones(1))

    if options.arm == "starts":
        SynchronizedStart.lead_ms = lambda self, filler_ms, *_, **__: filler_ms  # type: ignore[method-assign]
    given: dict[str, Any] = {
        "search": options.search,
        "overhead": options.overhead,
        "cache": False,
        "progress": False,
    }
    given["is_dist"] = options.ranks > 1 and options.arm != "exchanges"
    given |= {"fillers": {"filler_ms": 0.0}, "log": {"log_dir": None}}.get(options.arm, {})
    return contextual_autotune(step, mode="online", **given)


def one_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the steps of one arm took in this process."""
    torch.set_num_threads(1)
    if not options.cuda:
        PretendedDevice().install()
        torch.cuda.current_device = lambda: 0
    if options.ranks > 1:
        store = dist.FileStore("store", options.ranks)
        dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.ranks)
    fork, forks = os.fork, list[float]()
    os.fork = lambda: forks.append(0.0) or fork()  # type: ignore[func-returns-value]
    tuned, took, host = tuned_step(options), list[float](), list[float]()
    settled_at = 0
    while len(took) < (settled_at + SETTLED_STEPS if settled_at else MOST_STEPS):
        began, began_host = time.perf_counter(), time.thread_time()
        tuned()
        took.append(time.perf_counter() - began)
        host.append(time.thread_time() - began_host)
        settled_at = settled_at or len(took) * tuned.settled
    return {
        "ms": took,
        "host_ms": host,
        "steps": settled_at,
        "forks": len(forks),
        "cost": str(tuned.report.cost),
    }


def measured(arm: str, options: argparse.Namespace, cache: Path) -> list[dict[str, Any]]:
    """Return what the ranks of an arm took. cache: Triton's, of "as it is" and "compilers" alone."""
    with tempfile.TemporaryDirectory(prefix="meanwhile-") as place:
        environment = with_benchmarks(environment_without_torchrun())
        environment["TRITON_CACHE_DIR"] = str(
            cache if arm in ("as it is", "compilers") else Path(place, "triton")
        )
        command = [sys.executable, "-m", "benchmarks.tuner.meanwhile", *sys.argv[1:], "--arm", arm, "--rank"]
        started = [
            subprocess.Popen([*command, str(rank)], cwd=place, env=environment, stdout=subprocess.PIPE)
            for rank in range(options.ranks)
        ]
        return [json.loads(process.communicate()[0]) for process in started]


def row(arm: str, ranks: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the line of an arm, of the slowest rank's steps."""
    steps, cost = ranks[0]["steps"], ranks[0]["cost"].partition(": ")[2]
    if not steps:
        return (arm, "did not settle", *["-"] * (len(COLUMNS) - 2))
    shares, means = [], []
    for name in ("ms", "host_ms"):
        times = [max(of_ranks) for of_ranks in zip(*(rank[name] for rank in ranks), strict=True)]
        means.append((statistics.fmean(times[1:steps]), statistics.fmean(times[steps:])))
        shares.append(f"{means[-1][0] / means[-1][1]:.3f}")
    seconds = sum(ranks[0]["ms"][:steps])
    meanwhile, settled = (f"{1e3 * each:.1f}" for each in means[0])
    return (arm, str(steps), f"{seconds:.1f}", meanwhile, settled, *shares, str(ranks[0]["forks"]), cost)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--keys", type=int, default=32, help="of the kernel")
    parser.add_argument("--configs", type=int, default=12, help="of each key")
    parser.add_argument("--step-ms", type=float, default=30.0, help="of the host, without launches")
    parser.add_argument("--ranks", type=int, default=1, help="processes that agree")
    parser.add_argument("--overhead", type=float, default=0.15, help="as the option")
    parser.add_argument("--search", default="auto", help="racing compiles and tries all, also of small keys")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="'as it is' comes first")
    parser.add_argument("--cuda", action="store_true", help="use the GPU that is here")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(one_rank(options)))
        return
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f}, torch {torch.__version__}, Triton {triton.__version__}")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    with tempfile.TemporaryDirectory(prefix="meanwhile-triton-") as cache:
        for arm in ARMS:
            if arm in options.arms and (options.ranks > 1 or arm not in ("exchanges", "starts")):
                print("| " + " | ".join(row(arm, measured(arm, options, Path(cache)))) + " |", flush=True)


if __name__ == "__main__":
    main()
