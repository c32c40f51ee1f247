"""How long the ranks of a host take to compile a kernel's candidates with nothing in the cache.

    python -m benchmarks.tuner.compile_time --ranks 2 --candidates 16 --rounds 3 [--cuda] [--json FILE]
        [--kernel persistent_gemm]

Protocol: the candidates of the allgather-GEMM kernel, or of the Gluon GEMM, whose configs have a `pre_hook`,
compiled for Hopper on a device that need not be here, or with --cuda on the ones that are. A figure is the
wall time from the moment all ranks stand ready to the end of the last one, in processes and with a cache
directory of their own; beside it stand the seconds that all of them computed, which other work on the machine
changes less. Before that each rank has compiled one other candidate, as in a session, whose first run has
launched one. The arms take turns, in every second round in reverse order.

    arm                  what each rank does
    one after another    compiles every candidate itself, as stock Triton does
    threads              compiles every candidate itself, in as many threads as there are cores
    shared               what a session does: child processes, each candidate on one rank

Trap: a rank that is late finds what the others have compiled; the ranks start together, so both compile all.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime._async_compile import AsyncCompileMode

from benchmarks.common.options import new_parser
from benchmarks.common.pretended_device import PretendedDevice
from dist_autotune.compilation.pool import PoolOptions
from dist_autotune.compilation.preflight import preflight
from dist_autotune.kernels.ag_gemm.plain import GPU_CANDIDATES, all_gather_gemm
from dist_autotune.kernels.epilogues import NO_ACTIVATION
from dist_autotune.kernels.gemm.launch import tuned_gemm
from dist_autotune.kernels.matrices import Block, as_matrix, describe
from dist_autotune.triton_api.launch import Launch, load_kernel

WORLD, ROWS, COLUMNS, INNER = 8, 8192, 4096, 4096
READY_S = 600.0

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Kernel:
    """A kernel with its candidates for Hopper, and a launch of it."""

    tuner: Any
    arguments: Callable[[str], Arguments]  # for a device; only types and alignment of tensors count
    is_pruned: bool

    def configs(self, launch: Launch) -> list[triton.Config]:
        """Return what this launch can be tuned among."""
        return list(launch.candidates().values()) if self.is_pruned else list(GPU_CANDIDATES)


def launch_ag_gemm(device: str) -> Arguments:
    a = torch.empty(16, dtype=torch.bfloat16, device=device)
    words = torch.empty(6 * WORLD, dtype=torch.int32, device=device)
    errors = torch.empty(WORLD, dtype=torch.int64, device=device)
    sizes = {"M": ROWS, "N": COLUMNS, "K": INNER, "slots": WORLD, "capacity": ROWS // WORLD}
    strides = {"stride_b": INNER, "stride_cm": COLUMNS}
    names = all_gather_gemm.fn.do_not_specialize
    any_value = {name: None if name.endswith("_ptr") else 0 for name in names}
    constants = {"WORLD": WORLD, "TMA_LEGAL": True, "BY_COLUMNS": False, "FENCE": True, "UPCAST": False}
    constants["ACTIVATION"] = NO_ACTIVATION
    return (a, a, a, words, errors), {"grid": (1,), **any_value, **sizes, **strides, **constants}


def launch_persistent_gemm(device: str) -> Arguments:
    tensors = [
        torch.empty(shape, dtype=torch.bfloat16, device=device)
        for shape in ((ROWS, INNER), (COLUMNS, INNER), (COLUMNS, INNER), (ROWS, COLUMNS))
    ]
    descriptors = [describe(as_matrix(tensor), Block(8, 64)) for tensor in tensors]
    counter = torch.zeros(2, dtype=torch.int32, device=device)
    constants = {"TRANS_A": False, "TRANS_B": True, "TENSOR_MEMORY": False}
    names = {"SCHEDULE": "grouped", "OUT": "bf16", "DTYPE": "bf16", "ACTIVATION": NO_ACTIVATION}
    tuned_by = (0, 132, 128, 128, ROWS, COLUMNS)  # wanted, programs, alignments and classes
    arguments = (*descriptors, counter, ROWS, COLUMNS, INNER, *tuned_by, *(None,) * 4)
    return arguments, {"grid": (1,), **constants, **names}


KERNELS = {
    "ag_gemm": Kernel(all_gather_gemm, launch_ag_gemm, is_pruned=False),
    "persistent_gemm": Kernel(tuned_gemm, launch_persistent_gemm, is_pruned=True),
}


def each_for_itself(threads: int) -> Callable[..., dict[str, Any]]:
    """Return the arm in which a rank compiles every candidate in `threads` threads."""

    def compile_all(launch: Launch, configs: dict[str, Any], options: PoolOptions) -> dict[str, Any]:
        with ThreadPoolExecutor(threads) as executor, AsyncCompileMode(executor):
            kernels = [compiled(launch, config) for config in configs.values()]
        for kernel in kernels:
            load_kernel(kernel)
        return {"compiled": len(kernels)}

    return compile_all


def compiled(launch: Launch, config: triton.Config) -> Any:
    """Compile a config as its first launch does."""
    launch.run_pre_hook(config)
    return launch.compile(config)


def shared(launch: Launch, configs: dict[str, Any], options: PoolOptions) -> dict[str, Any]:
    """Compile as a session does."""
    found = preflight(launch, configs, options)
    assert not found.reasons, found.reasons
    assert not found.counts.remark, found.counts.remark
    return vars(found.counts)


ARMS = {
    "one after another": each_for_itself(1),
    "threads": each_for_itself(os.cpu_count() or 1),
    "shared": shared,
}


def rank_main(
    kernel: Kernel, arm: str, rank: int, ranks: int, candidates: int, directory: Path, *, cuda: bool
) -> None:
    """Take one rank's part and write down what it did."""
    os.environ["TRITON_CACHE_DIR"] = str(directory / "cache")
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        PretendedDevice().install()
    launch = Launch(kernel.tuner, *kernel.arguments("cuda" if cuda else "cpu"))
    *others, warm_up = kernel.configs(launch)
    if not 0 < candidates <= len(others):
        raise SystemExit(f"--candidates: 1 to {len(others)}")
    load_kernel(compiled(launch, warm_up))
    configs = {str(index): config for index, config in enumerate(others[:candidates])}
    (directory / f"ready-{rank}").touch()
    deadline = time.monotonic() + READY_S
    while len(list(directory.glob("ready-*"))) < ranks:
        assert time.monotonic() < deadline, "a rank is missing"
        time.sleep(1e-3)
    began, before_s = time.monotonic(), computed_s()
    options = PoolOptions(session="benchmark", local_rank=rank, local_ranks=ranks)
    done = ARMS[arm](launch, configs, options)
    record = {"began": began, "ended": time.monotonic(), "computed_s": computed_s() - before_s, **done}
    (directory / f"record-{rank}.json").write_text(json.dumps(record))


def computed_s() -> float:
    """Return the seconds that this process and its ended children have computed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(kernel: Kernel, arm: str, ranks: int, candidates: int, *, cuda: bool) -> dict[str, Any]:
    """Return the wall time of all ranks together, and what each did."""
    with tempfile.TemporaryDirectory(prefix="compile-time-") as name:
        directory = Path(name)
        pids = []
        for rank in range(ranks):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    rank_main(kernel, arm, rank, ranks, candidates, directory, cuda=cuda)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise SystemExit(f"{arm}: the ranks ended with {codes}")
        records = [json.loads((directory / f"record-{rank}.json").read_text()) for rank in range(ranks)]
    seconds = max(r["ended"] for r in records) - min(r["began"] for r in records)
    computed = sum(record["computed_s"] for record in records)
    by_rank = [record["compiled"] for record in records]
    return {"arm": arm, "seconds": seconds, "computed_s": computed, "compiled": by_rank}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--kernel", choices=list(KERNELS), default="ag_gemm", help="whose candidates are compiled"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes that compile")
    parser.add_argument("--candidates", type=int, default=16, help="of the kernel")
    parser.add_argument("--rounds", type=int, default=3, help="of all arms")
    parser.add_argument("--cuda", action="store_true", help="use the GPUs that are here")
    parser.add_argument("--json", type=Path, help="the file for the figures")
    chosen = parser.parse_args()
    kernel = KERNELS[chosen.kernel]
    torch.set_num_threads(1)  # its threads do not survive the fork of a rank
    triton.runtime.cache.triton_key()  # reads all of the compiler: once, not in every rank
    rows = []
    for round_ in range(chosen.rounds):
        for arm in list(ARMS) if round_ % 2 == 0 else reversed(ARMS):
            rows.append(measure(kernel, arm, chosen.ranks, chosen.candidates, cuda=chosen.cuda))
    cores = len(os.sched_getaffinity(0))
    versions = f"Triton {triton.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{chosen.kernel}: {chosen.ranks} ranks, {cores} cores, {chosen.candidates} candidates, {versions}")
    medians = {arm: statistics.median(r["seconds"] for r in rows if r["arm"] == arm) for arm in ARMS}
    for arm, median in medians.items():
        of_arm = [row for row in rows if row["arm"] == arm]
        times = ", ".join(f"{row['seconds']:.1f}" for row in of_arm)
        computed = statistics.median(row["computed_s"] for row in of_arm)
        print(
            f"{arm:18} {median:7.1f} s  {medians['one after another'] / median:5.2f} x  ({times})  "
            f"{computed:7.1f} s computed, {of_arm[0]['compiled']} compiled by rank"
        )
    if chosen.json:
        chosen.json.write_text(
            json.dumps({"cores": cores, "versions": versions, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
