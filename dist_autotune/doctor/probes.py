"""What the doctor tries out in helper processes: directories, two CPU ranks, GPUs, symmetric memory.

A probe is a function that reports stage by stage. It may crash, hang or end its process: see `helpers`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock

from ..ranks.group import ProcessGroup
from ..search.messages import Vote, merge
from ..storage.device import Device
from .helpers import REPORT

EXCHANGES = 20
EXCHANGE_LIMIT_S = 20.0
LOCK_LIMIT_S = 5.0
WORDS = 1024  # int32, that each rank writes to each other in a trial of symmetric memory


@dataclass(frozen=True)
class Place:
    """Which helper this is, and what it has found so far."""

    rank: int
    world_size: int
    directory: str
    limit_s: float
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Give a dict for the facts of one stage; they are reported when the block ends well."""
        self._report(stage=name)
        facts: dict[str, Any] = {}
        try:
            yield facts
        except BaseException as error:
            self._report(stage=name, error=f"{type(error).__name__}: {error}"[:2000])
            raise
        self.facts[name] = facts
        self._report(stage=name)

    def _report(self, **about: str) -> None:
        sys.stdout.write(f"\n{REPORT}{json.dumps({'facts': self.facts, **about})}\n")
        sys.stdout.flush()


def main(probe: str, arguments: dict[str, Any]) -> None:
    """Run one probe and leave the process without any tear-down that could wait for a peer."""
    place = Place(*(arguments.pop(name) for name in ("rank", "world_size", "directory", "limit_s")))
    signal.alarm(int(place.limit_s) + 30)  # should the process that started this one be killed
    try:
        PROBES[probe](place, **arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def ranks(place: Place, *, directories: dict[str, str]) -> None:
    """Try the directories that the tuner writes to, then the exchange between ranks and their memory."""
    if place.rank == 0:
        with place.stage("directories") as facts:
            facts.update({name: why_unwritable(Path(path)) for name, path in directories.items()})
    with place.stage("gloo"):
        _join("gloo", place)
    with place.stage("exchange") as facts:
        group, times_ms = ProcessGroup(dist.group.WORLD), []
        for _ in range(EXCHANGES):
            began = time.perf_counter()
            group.exchange(Vote(place.rank).encode(), merge, EXCHANGE_LIMIT_S, "the doctor's exchange")
            times_ms.append((time.perf_counter() - began) * 1e3)
        facts["median_ms"] = sorted(times_ms)[EXCHANGES // 2]
    with place.stage("shm") as facts:
        facts.update(_try_memory("shm", place))


def why_unwritable(directory: Path) -> str:
    """Return why files cannot be written and locked in `directory`; what this makes, it takes away again."""
    made: list[Path] = []
    try:
        made += [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as scratch:
            Path(scratch, "file").write_text("written")
            with FileLock(Path(scratch, "lock"), timeout=LOCK_LIMIT_S):
                pass
    except (OSError, NotImplementedError) as error:  # the latter: a filesystem without locks
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    finally:
        with contextlib.suppress(OSError):  # never made, or used by somebody else by now
            for path in made:
                path.rmdir()
    return ""


def gpus(place: Place) -> None:
    """Describe the GPUs that torch sees, and which can read which."""
    with place.stage("devices") as facts:
        every = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        facts["names"] = [torch.cuda.get_device_name(each) for each in every]
        facts["why_none"] = "" if every else _why_no_gpu()
        facts["device_files"] = len(list(Path("/dev").glob("nvidia[0-9]*")))
        facts["driver"] = Device.current().driver
    with place.stage("links") as facts:
        pairs = [(a, b) for a in every for b in every if a != b]
        facts["pairs"] = [
            {"from": a, "to": b, "peer_access": torch.cuda.can_device_access_peer(a, b)} for a, b in pairs
        ]


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter: a build of torch for the CPU
        return str(error).strip().splitlines()[0]
    return "torch counts no devices"


def memory(place: Place) -> None:
    """Try the symmetric memory of a GPU for each rank."""
    with place.stage("gloo and NCCL"):
        torch.cuda.set_device(place.rank)
        _join("cpu:gloo,cuda:nccl", place)
    with place.stage("memory") as facts:
        facts.update(_try_memory("auto", place))


def _join(backend: str, place: Place) -> None:
    dist.init_process_group(
        backend,
        init_method=f"file://{place.directory}/store",
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(seconds=place.limit_s),
    )


def _try_memory(backend: str, place: Place) -> dict[str, str]:
    """Return the backend that was used and why, after each rank has written to each; or what is absent."""
    try:  # the tuner does without the workloads, and so does an installation of it
        from dist_autotune.kernels.symm import open_symmetric_memory
    except ImportError as error:
        return {"absent": str(error)}
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
        return {"backend": opened.name, "reason": opened.reason}


PROBES: dict[str, Callable[..., None]] = {"ranks": ranks, "gpus": gpus, "memory": memory}
