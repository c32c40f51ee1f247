"""The device that this process computes on, as far as results depend on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ..triton_api import interception


@dataclass(frozen=True)
class Device:
    """The device that results hold for."""

    name: str
    capability: str
    driver: str

    @property
    def text(self) -> str:
        return f"{self.name} {self.capability} {self.driver}".strip()

    @classmethod
    def current(cls) -> Device:
        if interception.is_interpreted() or not torch.cuda.is_available():
            return cls("interpreter", "", "")
        major, minor = torch.cuda.get_device_capability()
        return cls(torch.cuda.get_device_name(), f"{major}.{minor}", _driver_version())


def _driver_version() -> str:
    """Return the NVIDIA driver's version, as the kernel module states it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return found.group(0) if found else ""
