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
from .helpers import Helper, first_problem, run_helpers

RANKS_LIMIT_S = 60.0  # of which starting and importing torch may take most
GPU_LIMIT_S = 120.0
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

    versions: dict[str, str | None]  # None: not installed, or not known without a GPU
    variables: dict[str, str]
    setting_error: str
    directories: dict[str, str]
    is_interpreted: bool  # TRITON_INTERPRET was set when Triton was imported
    ranks: tuple[Helper, ...]
    gpu: Helper
    memory: dict[str, tuple[Helper, ...]]  # by the backend that was asked for

    @property
    def gpus(self) -> list[dict[str, Any]]:
        return list(self.gpu.facts.get("devices", {}).get("gpus", []))

    @property
    def world(self) -> str:
        """Return where kernels run: "gpu" or "interpreter"."""
        return "gpu" if self.gpus and not self.is_interpreted else "interpreter"

    def of_ranks(self, stage: str) -> dict[str, Any]:
        """Return the facts of one stage of the two CPU ranks, by rank 0."""
        return self.ranks[0].facts.get(stage, {})

    def links(self) -> list[dict[str, Any]]:
        """Return whether one GPU can read another, for each ordered pair."""
        access = self.gpu.facts.get("links", {}).get("peer_access", [])
        return [{"from": a, "to": b, "peer_access": can} for a, b, can in access]

    def backends(self) -> dict[str, tuple[bool, str]]:
        """Return for each backend of symmetric memory whether it works, and what was seen."""
        found = {"shm": _outcome(self.ranks, "shm")}
        for asked, helpers in self.memory.items():
            used = helpers[0].facts.get("memory", {}).get("backend", asked)
            found[used] = _outcome(helpers, "memory")
        for backend in GPU_BACKENDS:
            found.setdefault(backend, (False, "not tried: it needs two GPUs"))
        return found


def examine() -> Examination:
    """Look at everything; takes some seconds, and minutes only where something hangs."""
    directories, error = directories_in_force()
    ranks = run_helpers("ranks", 2, RANKS_LIMIT_S, CPU_ONLY, directories=directories)
    (gpu,) = run_helpers("gpus", 1, GPU_LIMIT_S, COMPILED)
    devices = gpu.facts.get("devices", {})
    return Examination(
        versions=versions() | {"driver": devices.get("driver") or None},
        variables=settings.variables(),
        setting_error=error,
        directories=directories,
        is_interpreted=interception.is_interpreted(),
        ranks=tuple(ranks),
        gpu=gpu,
        memory=_try_memory(len(devices.get("gpus", []))),
    )


def directories_in_force() -> tuple[dict[str, str], str]:
    """Return the directories that the tuner writes to, and what is wrong with the settings."""
    cache, logs = settings.cache_directory(), None
    error = "" if cache is not None else settings.NO_HOME
    try:
        settings.check_variables()
        logs = Options().resolved_log_dir()
    except InvalidOption as invalid:
        error = str(invalid)
    return {name: str(path) for name, path in ((CACHE, cache), (LOGS, logs)) if path is not None}, error


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "dist_autotune": __version__,
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
    }
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    for name, distributions in PACKAGES.items():
        found[name] = next((installed[each] for each in distributions if each in installed), None)
    return found


def _try_memory(gpus: int) -> dict[str, tuple[Helper, ...]]:
    """Try what "auto" takes, then what it does not, each with as many ranks as there are GPUs."""
    tried: dict[str, tuple[Helper, ...]] = {}
    for backend in ("auto", *GPU_BACKENDS) if gpus > 1 else ():
        used = {helpers[0].facts.get("memory", {}).get("backend") for helpers in tried.values()}
        if backend not in used:
            tried[backend] = tuple(run_helpers("memory", gpus, GPU_LIMIT_S, COMPILED, backend=backend))
    return tried


def _outcome(helpers: tuple[Helper, ...], stage: str) -> tuple[bool, str]:
    failed = first_problem(helpers)
    if failed is not None:
        return False, failed.ending
    facts = helpers[0].facts.get(stage, {})
    if "absent" in facts:
        return False, f"not tried: {facts['absent']}"
    return True, f"{counted(len(helpers), 'rank')} wrote to each other"
