"""Call all operations by turns for as long as wanted, as unkindly as is legal, and check every result.

    ./launch.sh tests/helpers/soak.py [--calls 10000 | --seconds 150] [--backend torch|nvshmem] [--seed N]

Each round opens all operations between canaries, calls and replays them in a random order with a session of
the tuner in the middle (see `composed_runs`), and closes them. CPU ranks have no graphs.

The last line is `calls=... wrong=... hung=... seconds=...`; the exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import os
import sys
import time
import traceback
import warnings

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from composed_runs import LARGE, PATIENCE_S, SMALL, by_turns

from dist_autotune.kernels.agreement.errors import PeerTimeout
from dist_autotune.kernels.symm import SymmetricMemoryError

ON_GPU = torch.cuda.is_available()
CALLS_OF_A_ROUND = 80 if ON_GPU else 20
LIMIT_S = 5 * PATIENCE_S  # for a round: then the watchdog tells where this rank stands and ends it


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=10_000 if ON_GPU else 60)
    parser.add_argument("--seconds", type=float, help="of calls, instead of their number")
    parser.add_argument("--backend", default="auto", help="symmetric memory: auto, torch, nvshmem, shm")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def calls_left(options: argparse.Namespace, calls: int, began: float) -> int:
    """Return the same on all ranks: how many calls, by the clock of rank 0, the next round has."""
    left = CALLS_OF_A_ROUND
    if options.seconds is None:
        left = min(left, options.calls - calls)
    elif time.monotonic() - began >= options.seconds:
        left = 0
    told = [left]
    dist.broadcast_object_list(told, device=torch.device("cpu"))
    return told[0]


def main() -> int:
    options = parse()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ON_GPU else "gloo", timeout=datetime.timedelta(seconds=LIMIT_S)
    )
    warnings.filterwarnings("ignore", ".* has not been tuned")  # at first they have not
    rank, sizes, began = dist.get_rank(), LARGE if ON_GPU else SMALL, time.monotonic()
    calls, wrong, hung = 0, 0, 0
    try:
        while count := calls_left(options, calls, began):
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            found = by_turns(rank, sizes, count, ON_GPU, options.seed + calls, options.backend)
            for text in found:
                print(f"rank {rank}, from call {calls}: {text}", flush=True)
            everywhere: list[int] = [0] * dist.get_world_size()
            dist.all_gather_object(everywhere, len(found))
            calls, wrong = calls + count, wrong + sum(everywhere)
            if rank == 0:
                print(f"calls={calls} wrong={wrong} seconds={time.monotonic() - began:.0f}", flush=True)
    except (PeerTimeout, SymmetricMemoryError):  # the latter when closing does not come to its end
        traceback.print_exc()
        hung = 1
    if rank == 0 or hung:
        seconds = time.monotonic() - began
        print(f"calls={calls} wrong={wrong} hung={hung} seconds={seconds:.1f}", flush=True)
    return 1 if wrong or hung else 0


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        # No tear-down of the interpreter, which could wait for a peer or for a stream that does not end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
