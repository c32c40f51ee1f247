"""a + b at the speed of the memory: `elementwise_add`, in plain Triton."""

from __future__ import annotations

from .operation import elementwise_add

__all__ = ["elementwise_add"]
