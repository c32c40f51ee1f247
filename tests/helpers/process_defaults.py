"""Defaults of a process under which what is made without a type or a device is unusable."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def odd_defaults() -> Iterator[None]:
    """Set them for the block; this process had torch's own."""
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
