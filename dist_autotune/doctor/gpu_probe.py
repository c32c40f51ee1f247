"""GPUs as torch and nvidia-smi see them, and how fast copies between them are. For a helper process."""

from __future__ import annotations

import contextlib
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..storage.device import Device

COPY_BYTES = 256 << 20
COPIES = 7  # the median of them counts
WARM_UPS = 2
SMI_LIMIT_S = 10.0


def devices() -> dict[str, Any]:
    """Return the GPUs that torch sees, or why there are none, and the versions below torch."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "gpus": [_describe(index) for index in range(count)],
        "why_none": "" if count else _why_no_gpu(),
        "device_files": len(list(Path("/dev").glob("nvidia[0-9]*"))),
        "driver": Device.current().driver,
        "nccl": _nccl_version(),
    }


def _describe(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
        "uuid": str(getattr(properties, "uuid", "")),
    }


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter: a build of torch for the CPU
        return str(error).strip().splitlines()[0]
    return "torch counts no devices"


def _nccl_version() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # a build of torch without it
        return None


def copy_gb_per_s(source: int, target: int) -> float | None:
    """Return the bandwidth of a copy from one GPU to another; None: one of them has no room for it."""
    try:
        src = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
        dst = torch.empty_like(src, device=f"cuda:{target}")
    except torch.OutOfMemoryError:
        return None
    times = []
    with torch.cuda.device(source):  # torch copies between GPUs on the stream of the source
        for _ in range(WARM_UPS + COPIES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            dst.copy_(src, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    torch.cuda.synchronize(target)
    return float(COPY_BYTES / statistics.median(times[WARM_UPS:]) / 1e6)


def ask_smi() -> dict[str, Any]:
    """Return nvidia-smi's driver version, its index of each GPU's UUID, and its matrix of links."""
    facts: dict[str, Any] = {"driver": "", "index_of_uuid": {}, "links": {}}
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        for line in _smi("--query-gpu=index,uuid,driver_version", "--format=csv,noheader").splitlines():
            index, uuid, facts["driver"] = (part.strip() for part in line.split(","))
            facts["index_of_uuid"][uuid.removeprefix("GPU-")] = int(index)
        facts["links"] = parse_topology(_smi("topo", "-m"))
    return facts


def _smi(*arguments: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_LIMIT_S, check=True
    )
    return done.stdout


def parse_topology(text: str) -> dict[str, str]:
    """Return the links in the output of `nvidia-smi topo -m`: "0 1" -> "NV18", by nvidia-smi's indices."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line[:1] == ["GPU0"] and line[1:2] != ["X"]), [])
    columns = [name.removeprefix("GPU") for name in header if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for line in lines:
        if line is header or not line or not re.fullmatch(r"GPU\d+", line[0]):
            continue
        row = line[0].removeprefix("GPU")
        links.update({f"{row} {column}": link for column, link in zip(columns, line[1:], strict=False)})
    return {pair: link for pair, link in links.items() if link != "X"}
