"""The programs of examples/, whose steps some benchmarks time."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from benchmarks.common.processes import ROOT


def load_example(name: str) -> ModuleType:
    """Return the module of an example; equal names give one module."""
    known = f"example_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, ROOT / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[known] = importlib.util.module_from_spec(spec)  # dataclasses look there
        spec.loader.exec_module(module)
    return sys.modules[known]
