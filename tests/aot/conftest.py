"""The AOT world: kernels are compiled for GPUs that need not be there, so the interpreter must be off."""

from __future__ import annotations

import os
import sys

import pytest

if "triton" in sys.modules:
    raise pytest.UsageError("triton is loaded with the interpreter on; run `pytest tests/aot` by itself")
os.environ.pop("TRITON_INTERPRET", None)
