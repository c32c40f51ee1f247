"""The doctor's probes: stages that return facts, on forked ranks of a process of their own."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.utils import collect_env

from ..formatting import counted
from .examination import REPORT

MEMORY_LIMIT_S = 20.0
WORDS = 1024  # int32, that each rank writes to each other in a trial of symmetric memory
Facts = dict[str, Any]


@dataclass(frozen=True)
class Rank:
    """One rank of a probe, and the directory that all share."""

    rank: int
    world_size: int
    directory: str


def main(arguments: Sequence[str]) -> None:
    """Run a probe on its ranks; exit code 1, and a last report, if one of them fails: it ends the others."""
    probe, count, directory, limit_s = arguments
    signal.alarm(int(float(limit_s)) + 30)  # should the process that started this one be killed
    try:
        start_processes(_run, (probe, int(count), directory), int(count), start_method="fork")
    except ProcessException as error:
        _say(rank=error.error_index, problem=str(error).strip().splitlines()[-1][:300])
        os._exit(1)


def _run(rank: int, probe: str, count: int, directory: str) -> None:
    """Run all stages; leave without any tear-down that could wait for a peer."""
    facts: Facts = {}
    for stage, run_stage in PROBES[probe].items():
        _say(rank=rank, stage=stage, facts=facts)
        facts |= run_stage(Rank(rank, count, directory)) or {}
    _say(rank=rank, facts=facts)
    os._exit(0)


def _say(**report: Any) -> None:
    os.write(1, f"\n{REPORT}{json.dumps(report)}\n".encode())  # one write: ranks share the output


def _join(rank: Rank) -> None:
    if has_gpu := torch.cuda.is_available():
        torch.cuda.set_device(rank.rank)
    backend, store = "cpu:gloo,cuda:nccl" if has_gpu else "gloo", f"file://{rank.directory}/store"
    dist.init_process_group(backend, store, rank=rank.rank, world_size=rank.world_size)


def _describe_devices(rank: Rank) -> Facts:
    """Return the GPUs that torch sees, and the GPUs that the driver lists."""
    listed = collect_env.get_gpu_info(collect_env.run) or ""
    return {
        "names": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())],
        "listed": listed.splitlines(),
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) or "",
    }


def _try_memory(rank: Rank) -> Facts:
    """Return the backend that "auto" takes, and why, after each rank has written to each."""
    try:  # the tuner does without the workloads, and so does an installation of it
        from dist_autotune.kernels.symm import open_symmetric_memory
    except ImportError as error:
        return {"memory": f"not tried: {error}"}
    with open_symmetric_memory(timeout_s=MEMORY_LIMIT_S) as opened:
        box = opened.allocate((rank.world_size, WORDS), torch.int32)
        mine = torch.full((WORDS,), rank.rank + 1, dtype=torch.int32, device=opened.device)
        stream = opened.side_stream()
        stream.fork()
        for peer in range(rank.world_size):
            opened.copy(box.peers[peer][rank.rank], mine, stream)
        stream.join()
        opened.barrier()
        if any(set(row.tolist()) != {place + 1} for place, row in enumerate(box.local)):
            raise RuntimeError(f"rank {rank.rank} did not see what its peers wrote")
        seen = f"{counted(rank.world_size, 'rank')} wrote to each other"
        return {"memory": f"{opened.name}: {opened.reason}; {seen}"}


PROBES: dict[str, dict[str, Callable[[Rank], Facts | None]]] = {
    "this host": {"devices": _describe_devices},
    "two CPU ranks": {"gloo": _join, "shm": _try_memory},
    "symmetric memory": {"gloo and NCCL": _join, "memory": _try_memory},
}

if __name__ == "__main__":
    main(sys.argv[1:])
