"""What the doctor tries out, in helper processes: directories, two CPU ranks, GPUs, symmetric memory.

A probe is a function that reports stage by stage. It may crash, hang or end its process: see `helpers`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock

from ..ranks.group import ProcessGroup
from ..search.messages import RunReport, merge
from ..storage.device import Device
from .helpers import report_path

EXCHANGES, WARM_UPS = 50, 5
EXCHANGE_LIMIT_S = 20.0
LOCK_LIMIT_S = 5.0
WORDS = 1024  # int32, what each rank writes to each other in a trial of symmetric memory


@dataclass(frozen=True)
class Place:
    """Which helper this is, and where it reports."""

    rank: int
    world_size: int
    directory: str
    limit_s: float

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Give a dict for the facts of one stage; they are reported when the block ends well."""
        self.report(stage=name)
        facts: dict[str, Any] = {}
        yield facts
        self.report(stage=name, facts=facts)

    def report(self, **record: Any) -> None:
        with report_path(self.directory, self.rank).open("a") as file:
            file.write(json.dumps(record) + "\n")


def main(probe: str, arguments: dict[str, Any]) -> None:
    """Run one probe and leave the process without any tear-down that could wait for a peer."""
    place = Place(*(arguments.pop(name) for name in ("rank", "world_size", "directory", "limit_s")))
    signal.alarm(int(place.limit_s) + 30)  # should the process that started this one be killed
    try:
        PROBES[probe](place, **arguments)
    except BaseException as error:
        traceback.print_exc()
        place.report(error=f"{type(error).__name__}: {error}"[:2000])
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def ranks(place: Place, *, directories: dict[str, str]) -> None:
    """Try the directories that the tuner writes to, then the exchange between ranks and their memory."""
    if place.rank == 0:
        with place.stage("directories") as facts:
            for name, path in directories.items():
                facts[name] = why_unwritable(Path(path))
    with place.stage("gloo"):
        _join("gloo", place)
    with place.stage("exchange") as facts:
        agreement, payload = ProcessGroup(dist.group.WORLD), RunReport(place.rank).encode()
        times_ms = []
        for _ in range(WARM_UPS + EXCHANGES):
            began = time.perf_counter()
            agreement.exchange(payload, merge, EXCHANGE_LIMIT_S, "the doctor's exchange")
            times_ms.append((time.perf_counter() - began) * 1e3)
        facts["median_ms"] = statistics.median(times_ms[WARM_UPS:])
    with place.stage("shm") as facts:
        facts.update(_try_memory("shm", place))


def why_unwritable(directory: Path) -> str:
    """Return why files cannot be written and locked in `directory`; what this makes, it takes away again."""
    made: list[Path] = []
    try:
        made += [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as scratch:
            (Path(scratch) / "file").write_text("written")
            with FileLock(Path(scratch) / "lock", timeout=LOCK_LIMIT_S):
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
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        facts["gpus"] = [_describe(index) for index in range(count)]
        facts["why_none"] = "" if count else _why_no_gpu()
        facts["device_files"] = len(list(Path("/dev").glob("nvidia[0-9]*")))
        facts["driver"] = Device.current().driver
    with place.stage("links") as facts:
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        facts["peer_access"] = [[*pair, torch.cuda.can_device_access_peer(*pair)] for pair in pairs]


def _describe(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter: a build of torch for the CPU
        return str(error).strip().splitlines()[0]
    return "torch counts no devices"


def memory(place: Place, *, backend: str) -> None:
    """Try a backend of symmetric memory, with a GPU for each rank."""
    with place.stage("gloo and NCCL"):
        torch.cuda.set_device(place.rank)
        _join("cpu:gloo,cuda:nccl", place)
    with place.stage("memory") as facts:
        facts.update(_try_memory(backend, place))


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
        wanted = torch.arange(1, place.world_size + 1, dtype=torch.int32)[:, None].expand(-1, WORDS)
        if not torch.equal(box.local.cpu(), wanted):
            raise RuntimeError(f"rank {place.rank} did not see what its peers wrote")
        return {"backend": opened.name, "reason": opened.reason}


PROBES: dict[str, Callable[..., None]] = {"ranks": ranks, "gpus": gpus, "memory": memory}
