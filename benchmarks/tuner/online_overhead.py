"""What `mode="online"` adds to a step, while it tunes and after. No GPU: the host's cost is the same there.

    python -m benchmarks.tuner.online_overhead

Protocol: a step makes 10 launches of one tuned kernel whose launch does nothing, so that what is left is the
tuner's own work: choosing, timing, the log, the exchange, deciding. Tuned and bare steps alternate in blocks
of 50; of each, the median of the block in which it was lowest, as interruptions only add. A row is the
difference of the two. With two ranks, the slower rank's figure.

Traps: on a busy machine exchanges wait for the scheduler, so look at the load printed. A launch of a real
kernel costs its own time in both arms. An EventClock adds the recording of two events a launch, which this
does not have.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.options import new_parser

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import torch.distributed as dist
import triton

from dist_autotune import contextual_autotune

LAUNCHES, BLOCK_STEPS = 10, 50


class Nothing:
    """A kernel whose launch does nothing."""

    arg_names = ("x", "n")

    def __init__(self) -> None:
        self.fn = _kernel.fn

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        pass


@triton.jit
def _kernel(x, n, BLOCK: triton.language.constexpr):
    pass


def step_of() -> Callable[[], None]:
    """Return a function with launches of a kernel of its own."""
    configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64, 128)]
    kernel = triton.autotune(configs, ["n"])(Nothing())
    x = torch.zeros(64)

    def step() -> None:
        for _ in range(LAUNCHES):
            kernel[(4,)](x, 64)

    return step


def measure(blocks: int, *, settled: bool, **options: Any) -> float:
    """Return the microseconds that the tuner adds to a step."""
    n_repeat = 1 if settled else 10**6
    step = contextual_autotune(
        step_of(), mode="online", n_warmup=0, n_repeat=n_repeat, progress=False, cache=False, **options
    )
    bare = contextual_autotune(step_of(), n_warmup=0, n_repeat=1, cache=False, log_dir=None, progress=False)
    bare()  # so that its launches below are stock Triton's with a known config
    while settled and not step.settled:
        step()
    for _ in range(5):
        step()
    tuned_us, bare_us = [], []
    for _ in range(blocks):
        tuned_us.append(median_us(step))
        bare_us.append(median_us(bare.fn))
    return min(tuned_us) - min(bare_us)


def median_us(step: Callable[[], None]) -> float:
    """Return the median time of a step, over one block of them."""
    taken = []
    for _ in range(BLOCK_STEPS):
        began = time.perf_counter()
        step()
        taken.append((time.perf_counter() - began) * 1e6)
    return statistics.median(taken)


ROWS: dict[str, dict[str, Any]] = {
    "tuning": {"settled": False},
    "tuning, no log": {"settled": False, "log_dir": None},
    "settled": {"settled": True},
    "settled, watch=False": {"settled": True, "watch": False},
}


def all_rows(blocks: int, *, is_dist: bool) -> dict[str, float]:
    return {name: measure(blocks, is_dist=is_dist, **row) for name, row in ROWS.items()}


def one_rank(rank: int, world_size: int, directory: str, blocks: int) -> None:
    os.chdir(directory)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = all_rows(blocks, is_dist=True)
    Path(f"{directory}/rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=20, help=f"of {BLOCK_STEPS} steps, for each figure")
    parser.add_argument("--ranks", type=int, default=2, help="of the runs with several")
    blocks, ranks = parser.parse_args().blocks, parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        alone = all_rows(blocks, is_dist=False)
        context = multiprocessing.get_context("spawn")
        arguments = [(rank, ranks, directory, blocks) for rank in range(ranks)]
        processes = [context.Process(target=one_rank, args=each) for each in arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        by_rank = [json.loads(Path(f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        os.chdir("/")
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions}")
    print(f"added to a step of {LAUNCHES} launches, us: one process, is_dist on {ranks} ranks")
    for name in ROWS:
        print(f"{name:42} {alone[name]:8.1f} {max(found[name] for found in by_rank):8.1f}")


if __name__ == "__main__":
    main()
