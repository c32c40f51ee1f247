"""What the doctor tries out in helper processes: directories, two CPU ranks, GPUs, symmetric memory.

A probe is a sequence of stages, functions that return facts. One may crash, hang or end its process.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock

from ..formatting import counted
from ..ranks.group import ProcessGroup
from ..search.messages import Vote, merge
from ..storage.device import Device
from .examination import REPORT

EXCHANGES = 20
EXCHANGE_LIMIT_S = 20.0
LOCK_LIMIT_S = 5.0
WORDS = 1024  # int32, that each rank writes to each other in a trial of symmetric memory


@dataclass(frozen=True)
class Place:
    """Which helper this is, and what it tries."""

    rank: int
    world_size: int
    directory: str
    limit_s: float
    directories: dict[str, str] = field(default_factory=dict)


def main(probe: str, place: dict[str, Any]) -> None:
    """Run one probe and leave the process without any tear-down that could wait for a peer."""
    signal.alarm(int(place["limit_s"]) + 30)  # should the process that started this one be killed
    facts, code = dict[str, Any](), 1
    try:
        for stage, run_stage in PROBES[probe].items():
            print(f"\n{REPORT}{json.dumps({'stage': stage, 'facts': facts})}", flush=True)
            facts |= run_stage(Place(**place))
        print(f"\n{REPORT}{json.dumps({'facts': facts})}", flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _try_directories(place: Place) -> dict[str, Any]:
    return {"directories": {name: why_unwritable(Path(path)) for name, path in place.directories.items()}}


def why_unwritable(directory: Path) -> str:
    """Return why files cannot be written and locked in `directory`, or in the nearest parent that exists."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing) as scratch:
            Path(scratch, "file").write_text("written")
            with FileLock(Path(scratch, "lock"), timeout=LOCK_LIMIT_S):
                pass
    except (OSError, NotImplementedError) as error:  # the latter: a filesystem without locks
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ""


def _join(place: Place, backend: str = "gloo") -> dict[str, Any]:
    dist.init_process_group(
        backend,
        init_method=f"file://{place.directory}/store",
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(seconds=place.limit_s),
    )
    return {}


def _exchange(place: Place) -> dict[str, Any]:
    group, times_ms = ProcessGroup(dist.group.WORLD), []
    for _ in range(EXCHANGES):
        began = time.perf_counter()
        group.exchange(Vote(place.rank).encode(), merge, EXCHANGE_LIMIT_S, "the doctor's exchange")
        times_ms.append((time.perf_counter() - began) * 1e3)
    return {"median_ms": sorted(times_ms)[EXCHANGES // 2]}


def _describe_devices(place: Place) -> dict[str, Any]:
    """Return the GPUs that torch sees or why there are none, and which can read which."""
    every, why_none = range(torch.cuda.device_count() if torch.cuda.is_available() else 0), ""
    if not every:
        try:
            torch.cuda.init()
            why_none = "torch counts no devices"
        except (RuntimeError, AssertionError) as error:  # the latter: a build of torch for the CPU
            why_none = str(error).strip().splitlines()[0]
    access = torch.cuda.can_device_access_peer
    return {
        "names": [torch.cuda.get_device_name(device) for device in every],
        "why_none": why_none,
        "device_files": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "driver": Device.current().driver,
        "links": [{"from": a, "to": b, "peer_access": access(a, b)} for a in every for b in every if a != b],
    }


def _join_gpus(place: Place) -> dict[str, Any]:
    torch.cuda.set_device(place.rank)
    return _join(place, "cpu:gloo,cuda:nccl")


def _try_memory(place: Place, backend: str = "auto") -> dict[str, Any]:
    """Return the backend and why "auto" takes it, after each rank has written to each."""
    try:  # the tuner does without the workloads, and so does an installation of it
        from dist_autotune.kernels.symm import open_symmetric_memory
    except ImportError as error:
        return {"seen": f"not tried: {error}"}
    device = "cpu" if backend == "shm" else None
    with open_symmetric_memory(None, backend, device, timeout_s=EXCHANGE_LIMIT_S) as opened:
        box = opened.allocate((place.world_size, WORDS), torch.int32)
        mine = torch.full((WORDS,), place.rank + 1, dtype=torch.int32, device=opened.device)
        stream = opened.side_stream()
        stream.fork()
        for peer in range(place.world_size):
            opened.copy(box.peers[peer][place.rank], mine, stream)
        stream.join()
        opened.barrier()
        if any(set(row.tolist()) != {rank + 1} for rank, row in enumerate(box.local)):
            raise RuntimeError(f"rank {place.rank} did not see what its peers wrote")
        seen = f"{counted(place.world_size, 'rank')} wrote to each other"
        return {"backend": opened.name, "seen": seen if device else f"{opened.reason}; {seen}"}


PROBES: dict[str, dict[str, Callable[[Place], dict[str, Any]]]] = {
    "this host": {"directories": _try_directories, "devices": _describe_devices},
    "two CPU ranks": {
        "gloo": _join,
        "exchange": _exchange,
        "shm": lambda place: _try_memory(place, "shm"),
    },
    "symmetric memory": {"gloo and NCCL": _join_gpus, "memory": _try_memory},
}
