"""Memory that every rank of one host sees: a protocol and three backends. Imports no other room.

backend   device  memory                             needs
shm       CPU     files mapped by every process      nothing
torch     CUDA    torch.distributed._symmetric_memory   cuda-bindings (torch's CUDA 13 wheels bring it)
nvshmem   CUDA    NVSHMEM's symmetric heap           nvshmem4py, and the same ranks each time
"""

from __future__ import annotations

import logging
import socket
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

from . import nvshmem
from .base import Copy, Lowered, SideStream, Step, SymmetricMemory, SymmetricTensor, Wait, Write
from .nvshmem import NvshmemMemory
from .ranks import SharingRanks, SymmetricMemoryError
from .shm import ShmMemory
from .torch_symm import TorchMemory

__all__ = [
    "Copy",
    "Lowered",
    "SideStream",
    "Step",
    "SymmetricMemory",
    "SymmetricMemoryError",
    "SymmetricTensor",
    "Wait",
    "Write",
    "open_symmetric_memory",
]

BACKENDS = {"shm": "cpu", "nvshmem": "cuda", "torch": "cuda"}
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)


def open_symmetric_memory(
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    device: torch.device | str | None = None,
    *,
    timeout_s: float = 300.0,
) -> SymmetricMemory:
    """Return symmetric memory over the group's ranks; collective.

    `group` may be any subset of the world; None is the default group, or this process alone where there
    is none. `device` None is this process's GPU, or the CPU where there is none or `backend` is "shm".
    "auto" takes shm on the CPU; on GPUs NVSHMEM where every rank can use it, else torch. `.reason` of the
    result says why. `timeout_s` bounds each wait for a peer.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is none of 'auto', {', '.join(map(repr, BACKENDS))}")
    device = _device(backend, device)
    if backend != "auto" and BACKENDS[backend] != device.type:
        raise ValueError(f"backend {backend!r} is for {BACKENDS[backend]} devices, not for {device}")
    ranks = SharingRanks(group, timeout_s=timeout_s)
    unusable = nvshmem.why_unusable(ranks) if device.type == "cuda" and backend == "auto" else None
    reasons = _compare(ranks, device, unusable)
    chosen, reason = backend, "asked for"
    if backend == "auto":
        chosen, reason = _choose(device, reasons)
    try:
        memory = _open(chosen, ranks, device, reason)
    except SymmetricMemoryError as error:  # raised on all ranks or on none
        if backend != "auto" or chosen != "nvshmem":
            raise
        memory = _open("torch", ranks, device, f"not nvshmem: {error}")
    _log.info("%s: symmetric memory %s on %s: %s", ranks, memory.name, device, memory.reason)
    return memory


def _open(backend: str, ranks: SharingRanks, device: torch.device, reason: str) -> SymmetricMemory:
    if backend == "shm":
        return ShmMemory(ranks, reason)
    return TorchMemory(ranks, device, reason) if backend == "torch" else NvshmemMemory(ranks, device, reason)


def _device(backend: str, device: torch.device | str | None) -> torch.device:
    if device is None:
        on_gpu = backend != "shm" and torch.cuda.is_available()
        device = "cuda" if on_gpu or BACKENDS.get(backend) == "cuda" else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"symmetric memory is for cpu and cuda devices, not for {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        asked = f"backend {backend!r}" if backend != "auto" else f"device {device}"
        raise SymmetricMemoryError(
            f"{asked} needs a GPU and torch sees none. On the CPU backend='shm' has memory, and kernels need "
            "TRITON_INTERPRET=1 before Triton is imported"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _compare(ranks: SharingRanks, device: torch.device, unusable: str | None) -> list[str | None]:
    """Raise on all ranks if they cannot share memory; return why each cannot use NVSHMEM."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    own = {"boot": boot, "host": socket.gethostname(), "gpu": gpu, "unusable": unusable}
    facts = ranks.exchange("opening symmetric memory", own | {"name": uuid.uuid4().hex})
    ranks.memory_name = facts[0]["name"]
    if len({fact["boot"] for fact in facts}) > 1:  # containers of one machine have names of their own
        hosts = ", ".join(f"rank {rank} on {fact['host']}" for rank, fact in enumerate(facts))
        raise SymmetricMemoryError(
            f"the group spans several hosts ({hosts}); pass a group of one host's ranks"
        )
    if len({fact["gpu"] is None for fact in facts}) > 1:
        raise SymmetricMemoryError("some ranks asked for a GPU and some for the CPU; ask for one kind on all")
    gpus = [fact["gpu"] for fact in facts if fact["gpu"]]
    if len(set(gpus)) < len(gpus):
        raise SymmetricMemoryError(
            f"two ranks use the same GPU ({', '.join(gpus)}); call torch.cuda.set_device"
        )
    return [fact["unusable"] for fact in facts]


def _choose(device: torch.device, unusable: list[str | None]) -> tuple[str, str]:
    if device.type == "cpu":
        return "shm", "CPU processes of one host share files"
    for rank, reason in enumerate(unusable):
        if reason:
            return "torch", f"not nvshmem: rank {rank}: {reason}"
    return "nvshmem", "every rank can use it"
