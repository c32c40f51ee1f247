"""a + b at the speed of the memory: `elementwise_add`, in plain Triton."""

from __future__ import annotations

from .operation import VARIANTS, elementwise_add

__all__ = ["VARIANTS", "elementwise_add"]
