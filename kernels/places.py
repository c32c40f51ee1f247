"""What is found out about tensors is kept by where they are and how they lie, and looked up from then on.

No tensor is kept: another one in the same place is as good.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, TypeVar

import torch

KEPT = 512

_ONE_AT_A_TIME = threading.Lock()

Known = TypeVar("Known")


def place_of(tensor: Any) -> Hashable:
    """Return all that a call with a tensor depends on but its elements; of what is no tensor, its type."""
    if not isinstance(tensor, torch.Tensor):
        return str(type(tensor))
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def keep(known: dict[Hashable, Known], key: Hashable, value: Known) -> Known:
    """Return the value, which is in the dict from now on; of KEPT entries the oldest is forgotten.

    Any thread may call this; those that look up need not wait.
    """
    with _ONE_AT_A_TIME:
        if len(known) >= KEPT and key not in known:
            del known[next(iter(known))]
        known[key] = value
    return value
