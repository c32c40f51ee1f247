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
        module = Path("/proc/driver/nvidia/version")  # where the kernel module states the driver's version
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", module.read_text() if module.exists() else "")
        return cls(torch.cuda.get_device_name(), f"{major}.{minor}", found.group(0) if found else "")
