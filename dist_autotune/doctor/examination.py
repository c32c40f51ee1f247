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
    memory: tuple[Helper, ...]  # a rank for each GPU, with the backend of symmetric memory that "auto" takes

    @property
    def gpus(self) -> list[str]:
        """Return the names of the GPUs."""
        return list(self.gpu.of("devices").get("names", []))

    @property
    def links(self) -> list[dict[str, Any]]:
        """Return whether one GPU can read another, for each ordered pair."""
        return list(self.gpu.of("links").get("pairs", []))

    @property
    def world(self) -> str:
        """Return where kernels run: "gpu" or "interpreter"."""
        return "gpu" if self.gpus and not self.is_interpreted else "interpreter"

    def backends(self) -> dict[str, tuple[bool, str]]:
        """Return for each backend of symmetric memory whether it works, and what was seen."""
        found = {"shm": _outcome(self.ranks, "shm")}
        if self.memory:
            found[self.memory[0].of("memory").get("backend", "auto")] = _outcome(self.memory, "memory")
        return found


def examine() -> Examination:
    """Look at everything; takes some seconds, and minutes only where something hangs."""
    directories, error = directories_in_force()
    ranks = run_helpers("ranks", 2, RANKS_LIMIT_S, CPU_ONLY, directories=directories)
    (gpu,) = run_helpers("gpus", 1, GPU_LIMIT_S, COMPILED)
    count = len(gpu.of("devices").get("names", []))
    return Examination(
        versions=versions() | {"driver": gpu.of("devices").get("driver") or None},
        variables=settings.variables(),
        setting_error=error,
        directories=directories,
        is_interpreted=interception.is_interpreted(),
        ranks=ranks,
        gpu=gpu,
        memory=run_helpers("memory", count, GPU_LIMIT_S, COMPILED) if count > 1 else (),
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


def _outcome(helpers: tuple[Helper, ...], stage: str) -> tuple[bool, str]:
    if (failed := first_problem(helpers)) is not None:
        return False, failed.ending
    if absent := helpers[0].of(stage).get("absent"):
        return False, f"not tried: {absent}"
    return True, f"{counted(len(helpers), 'rank')} wrote to each other"
