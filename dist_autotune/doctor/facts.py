"""What `dist-autotune doctor` looks at. Whatever could crash or hang is tried in helper processes."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import triton

from .. import settings
from ..errors import InvalidOption
from ..formatting import counted
from ..options import Options
from ..triton_api import interception
from ..version import __version__
from .helper_process import Child, first_problem, run_children

RANKS_LIMIT_S = 60.0  # of which starting and importing torch may take most
GPU_LIMIT_S = 120.0
MEMORY_LIMIT_S = 120.0

CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
COMPILED = {"TRITON_INTERPRET": None, "OMP_NUM_THREADS": "1"}
CACHE, LOGS = "cache directory", "log directory"
GPU_BACKENDS = ("nvshmem", "torch")  # of symmetric memory

PACKAGES = {  # name for people -> distributions; the first that is installed counts
    "filelock": ("filelock",),
    "nvshmem4py": ("nvshmem4py-cu13", "nvshmem4py-cu12"),
    "libnvshmem": ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
    "cuda-bindings": ("cuda-bindings",),
    "cuda-core": ("cuda-core",),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}


@dataclass(frozen=True, kw_only=True)
class Examination:
    """The facts, as they were found."""

    versions: dict[str, str | None]
    variables: dict[str, str]
    setting_error: str
    directories: dict[str, str]
    is_interpreted: bool  # TRITON_INTERPRET was set when Triton was imported
    ranks: tuple[Child, ...]
    gpu: Child
    memory: dict[str, tuple[Child, ...]]  # by the backend that was asked for

    @property
    def gpus(self) -> list[dict[str, Any]]:
        return list(self.gpu.facts.get("devices", {}).get("gpus", []))

    @property
    def world(self) -> str:
        """Return where kernels run: "gpu" or "interpreter"."""
        return "gpu" if self.gpus and not self.is_interpreted else "interpreter"

    def of_ranks(self, stage: str) -> dict[str, Any]:
        """Return the facts of one stage of the two CPU ranks; rank 0 tells them."""
        return self.ranks[0].facts.get(stage, {})

    def links(self) -> list[dict[str, Any]]:
        """Return for each ordered pair of GPUs: peer access, measured GB/s, and the link's name."""
        access = self.gpu.facts.get("peers", {}).get("access", [])
        copies = {(a, b): speed for a, b, speed in self.gpu.facts.get("copies", {}).get("gb_per_s", [])}
        smi = self.gpu.facts.get("links", {})
        numbers = [smi.get("index_of_uuid", {}).get(gpu["uuid"], gpu["index"]) for gpu in self.gpus]
        names = smi.get("links", {})
        return [
            {
                "from": a,
                "to": b,
                "peer_access": can,
                "gb_per_s": copies.get((a, b)),
                "link": names.get(f"{numbers[a]} {numbers[b]}", ""),
            }
            for a, b, can in access
        ]

    def backends(self) -> dict[str, tuple[bool, str]]:
        """Return for each backend of symmetric memory whether it works, and what was seen."""
        found = {"shm": _outcome(self.ranks, "shm")}
        for asked, children in self.memory.items():
            used = children[0].facts.get("memory", {}).get("backend", asked)
            found[used] = _outcome(children, "memory")
        for backend in GPU_BACKENDS:
            found.setdefault(backend, (False, "not tried: it needs two GPUs"))
        return found


def examine() -> Examination:
    """Look at everything; takes some seconds, and minutes only where something hangs."""
    directories, error = _settings()
    ranks = run_children("ranks", 2, RANKS_LIMIT_S, CPU_ONLY, directories=directories)
    (gpu,) = run_children("gpus", 1, GPU_LIMIT_S, COMPILED)
    devices = gpu.facts.get("devices", {})
    driver = devices.get("driver") or gpu.facts.get("links", {}).get("driver")
    found = versions()
    return Examination(
        versions=found | {"driver": driver or None, "NCCL": devices.get("nccl") or found["NCCL"]},
        variables=settings.variables(),
        setting_error=error,
        directories=directories,
        is_interpreted=interception.is_interpreted(),
        ranks=tuple(ranks),
        gpu=gpu,
        memory=_try_memory(len(devices.get("gpus", []))),
    )


def versions() -> dict[str, str | None]:
    """Return the versions of what matters here; None: not installed, or not known without a GPU."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "dist_autotune": __version__,
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "driver": None,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
    }
    if torch.version.hip:
        found["ROCm"] = torch.version.hip
    return found | {name: _installed(*distributions) for name, distributions in PACKAGES.items()}


def _settings() -> tuple[dict[str, str], str]:
    """Return the directories in force, and what is wrong with the variables."""
    cache = settings.cache_directory()
    directories = {} if cache is None else {CACHE: str(cache)}
    try:
        settings.check_variables()
        logs = Options().resolved_log_dir()
    except InvalidOption as error:
        return directories, str(error)
    return directories | ({LOGS: str(logs)} if logs else {}), "" if cache is not None else settings.NO_HOME


def _installed(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _try_memory(gpus: int) -> dict[str, tuple[Child, ...]]:
    """Try what "auto" takes, then what it does not, each with as many ranks as there are GPUs."""
    tried: dict[str, tuple[Child, ...]] = {}
    for backend in ("auto", *GPU_BACKENDS) if gpus > 1 else ():
        used = {children[0].facts.get("memory", {}).get("backend") for children in tried.values()}
        if backend not in used:
            children = run_children("memory", gpus, MEMORY_LIMIT_S, COMPILED, backend=backend)
            tried[backend] = tuple(children)
    return tried


def _outcome(children: tuple[Child, ...], stage: str) -> tuple[bool, str]:
    failed = first_problem(children)
    if failed is not None:
        return False, failed.ending
    facts = children[0].facts.get(stage, {})
    if "absent" in facts:
        return False, f"not tried: {facts['absent']}"
    return True, f"{counted(len(children), 'rank')} wrote to each other"
