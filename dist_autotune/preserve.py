"""Putting state back between the runs of one call, so that only the final run leaves its effects."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .errors import InvalidOption


class Snapshot:
    """The random number generators, and the named tensors and `state_dict()` holders, as they are now."""

    def __init__(self, preserved: Sequence[Any]) -> None:
        self._restorers: list[Callable[[], None]] = [_random_state()]
        self._restorers += [_restorer(item) for item in preserved]

    def restore(self) -> None:
        """Put everything back. Tensors keep their storage: only their contents are written."""
        for restore in self._restorers:
            restore()


def _restorer(item: Any) -> Callable[[], None]:
    if isinstance(item, torch.Tensor):
        saved = item.detach().clone()

        def restore_tensor() -> None:
            with torch.no_grad():
                item.copy_(saved)

        return restore_tensor
    if callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None)):
        state = copy.deepcopy(item.state_dict())
        return lambda: item.load_state_dict(copy.deepcopy(state))
    raise InvalidOption(
        f"preserve= holds a {type(item).__module__}.{type(item).__qualname__}: it is neither a tensor nor "
        "does it have state_dict() and load_state_dict()"
    )


def _random_state() -> Callable[[], None]:
    on_cpu = torch.get_rng_state()
    on_gpu = (
        torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    )
    in_python = random.getstate()
    in_numpy = np.random.get_state()

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
        random.setstate(in_python)
        np.random.set_state(in_numpy)

    return restore
