"""What the first step of a training loop, and the steps after it, cost while candidates are compiled.

    python -m benchmarks.tuner.compile_behind [--rounds 3] [--step-ms 50] [--jobs N] [--cuda] [--json FILE]

Protocol: a step computes on one core for --step-ms and launches a matrix product with two keys; each key has
20 candidates, and nothing is in Triton's cache. Kernels are compiled for Hopper on a device that need not be
here and launches nothing, or with --cuda run on the one that is. Each arm makes its steps in a process of its
own. A figure is the wall time of a step; rounds take turns, every second one in reverse order.

    arm                  what a step does
    untuned              launches the first config of each key; nothing else is compiled
    tuned                is tuned with mode="online"

Trap: on a device that launches nothing, steps are the host's alone; which config wins says nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.common.options import new_parser
from benchmarks.common.pretended_device import PretendedDevice
from benchmarks.common.processes import with_benchmarks
from dist_autotune import contextual_autotune

ARMS = ("untuned", "tuned")
CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_stages=stages)
    for m, n in ((64, 64), (64, 128), (128, 64), (128, 128), (64, 256))
    for k in (32, 64)
    for stages in (3, 4)
]
ROWS, INNER, WIDTHS = 1024, 512, (1024, 2048)
LATER_STEPS = 100  # that are timed when nothing is compiled any more


@triton.jit
def product(a_ptr, b_ptr, c_ptr, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :])
        b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :])
        sums = tl.dot(a, b, sums)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], sums.to(tl.float16))


def compute(seconds: float) -> None:
    """Keep one core busy for so much of its time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def steps_of(arm: str, step_s: float, jobs: int | None, *, cuda: bool) -> dict[str, Any]:
    """Return what the steps of one arm took, in this process."""
    if not cuda:
        PretendedDevice().install()
        torch.cuda.current_device = lambda: 0
    device = "cuda" if cuda else "cpu"
    kernel = triton.autotune(CONFIGS[:1] if arm == "untuned" else CONFIGS, ["N"])(product)
    a = torch.zeros(ROWS, INNER, dtype=torch.float16, device=device)
    pairs = [(a.new_zeros(INNER, n), a.new_zeros(ROWS, n)) for n in WIDTHS]

    def step() -> None:
        for b, c in pairs:
            n = b.shape[1]
            grid = lambda config, n=n: (ROWS // config["BLOCK_M"], n // config["BLOCK_N"])  # noqa: E731
            kernel[grid](a, b, c, n, INNER)
        compute(step_s)

    options: dict[str, Any] = {} if jobs is None else {"compile_jobs": jobs}
    tuned = contextual_autotune(step, mode="online", cache=False, progress=False, log_dir=None, **options)
    took: list[float] = []
    while len(took) < LATER_STEPS or not tuned.settled:
        began = time.perf_counter()
        tuned()
        took.append(time.perf_counter() - began)
        outlook = tuned.report.outlook
        if getattr(outlook, "compiling", 0):  # of older versions too, which have none
            compiling = len(took)
        elif len(took) == 1:
            compiling = 1
    later = []
    for _ in range(LATER_STEPS):
        began = time.perf_counter()
        tuned()
        later.append(time.perf_counter() - began)
    while_compiling = took[1:compiling]
    return {
        "first_s": took[0],
        "compiled_after_s": sum(took[:compiling]),
        "steps": len(took),
        "while_compiling_ms": [1e3 * seconds for seconds in while_compiling],
        "later_ms": [1e3 * seconds for seconds in later],
    }


def measured(arm: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what one arm took in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="compile-behind-") as directory:
        command = [sys.executable, "-m", "benchmarks.tuner.compile_behind", "--arm", arm]
        command += ["--step-ms", str(chosen.step_ms)]
        command += ["--cuda"] * chosen.cuda + (["--jobs", str(chosen.jobs)] if chosen.jobs else [])
        environment = {**with_benchmarks(os.environ), "TRITON_CACHE_DIR": str(Path(directory, "cache"))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{arm}: {done.stderr}")
        return {"arm": arm, **json.loads(done.stdout)}


def line_of(arm: str, rows: list[dict[str, Any]]) -> str:
    """Return the medians over the rounds of one arm."""
    firsts = [row["first_s"] for row in rows]
    later = statistics.median(statistics.median(row["later_ms"]) for row in rows)
    text = f"{arm:8}  first step {statistics.median(firsts):6.2f} s  later {later:6.1f} ms"
    meanwhile = [row["while_compiling_ms"] for row in rows if row["while_compiling_ms"]]
    if meanwhile:
        usual, worst = (statistics.median(map(of, meanwhile)) for of in (statistics.median, max))
        compiled = statistics.median(row["compiled_after_s"] for row in rows)
        text += f"  meanwhile {usual:6.1f} ms, worst {worst:6.1f} ms; all compiled after {compiled:5.1f} s"
    return text


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of all arms")
    parser.add_argument("--step-ms", type=float, default=50.0, help="on one core")
    parser.add_argument("--jobs", type=int, help="candidates compiled at a time")
    parser.add_argument("--cuda", action="store_true", help="use the GPU that is here")
    parser.add_argument("--arm", choices=ARMS, help="run this arm in this process, and print its figures")
    parser.add_argument("--json", type=Path, help="the file for the figures")
    chosen = parser.parse_args()
    if chosen.arm:
        print(json.dumps(steps_of(chosen.arm, chosen.step_ms / 1e3, chosen.jobs, cuda=chosen.cuda)))
        return
    rows = []
    for round_ in range(chosen.rounds):
        rows += [measured(arm, chosen) for arm in (ARMS if round_ % 2 == 0 else reversed(ARMS))]
    cores = len(os.sched_getaffinity(0))
    versions = f"Triton {triton.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{len(WIDTHS) * len(CONFIGS)} candidates, {chosen.step_ms:g} ms a step, {cores} cores, {versions}")
    for arm in ARMS:
        print(line_of(arm, [row for row in rows if row["arm"] == arm]))
    if chosen.json:
        chosen.json.write_text(json.dumps({"cores": cores, "versions": versions, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
