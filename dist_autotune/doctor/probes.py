"""The doctor's probes, run in helper processes: each is a sequence of stages that return facts."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import collect_env

from ..formatting import counted
from .examination import REPORT

MEMORY_LIMIT_S = 20.0
WORDS = 1024  # int32, that each rank writes to each other in a trial of symmetric memory


@dataclass(frozen=True)
class Helper:
    """One helper process: its rank, the directory that all share, and its time limit."""

    rank: int
    world_size: int
    directory: str
    limit_s: float


def main(probe: str, about: dict[str, Any]) -> None:
    """Run one probe and leave the process without any tear-down that could wait for a peer."""
    helper = Helper(**about)
    signal.alarm(int(helper.limit_s) + 30)  # should the process that started this one be killed
    facts, code = dict[str, Any](), 1
    try:
        for stage, run_stage in PROBES[probe].items():
            print(f"\n{REPORT}{json.dumps({'stage': stage, 'facts': facts})}", flush=True)
            facts |= run_stage(helper) or {}
        print(f"\n{REPORT}{json.dumps({'facts': facts})}", flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _join(helper: Helper) -> None:
    if has_gpu := torch.cuda.is_available():
        torch.cuda.set_device(helper.rank)
    backend, store = "cpu:gloo,cuda:nccl" if has_gpu else "gloo", f"file://{helper.directory}/store"
    dist.init_process_group(backend, store, rank=helper.rank, world_size=helper.world_size)


def _describe_devices(helper: Helper) -> dict[str, Any]:
    """Return the GPUs that torch sees and those that the driver lists."""
    listed = collect_env.get_gpu_info(collect_env.run) or ""
    return {
        "names": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())],
        "listed": listed.splitlines(),
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) or "",
    }


def _try_memory(helper: Helper) -> dict[str, Any]:
    """Return the backend that "auto" takes, and why, after each rank has written to each."""
    try:  # the tuner does without the workloads, and so does an installation of it
        from dist_autotune.kernels.symm import open_symmetric_memory
    except ImportError as error:
        return {"memory": f"not tried: {error}"}
    with open_symmetric_memory(timeout_s=MEMORY_LIMIT_S) as opened:
        box = opened.allocate((helper.world_size, WORDS), torch.int32)
        mine = torch.full((WORDS,), helper.rank + 1, dtype=torch.int32, device=opened.device)
        stream = opened.side_stream()
        stream.fork()
        for peer in range(helper.world_size):
            opened.copy(box.peers[peer][helper.rank], mine, stream)
        stream.join()
        opened.barrier()
        if any(set(row.tolist()) != {rank + 1} for rank, row in enumerate(box.local)):
            raise RuntimeError(f"rank {helper.rank} did not see what its peers wrote")
        seen = f"{counted(helper.world_size, 'rank')} wrote to each other"
        return {"memory": f"{opened.name}: {opened.reason}; {seen}"}


PROBES: dict[str, dict[str, Callable[[Helper], dict[str, Any] | None]]] = {
    "this host": {"devices": _describe_devices},
    "two CPU ranks": {"gloo": _join, "shm": _try_memory},
    "symmetric memory": {"gloo and NCCL": _join, "memory": _try_memory},
}
