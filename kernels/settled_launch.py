"""The short way to a launch: config, compiled kernel and grid as the tuning left them.

    first calls of a shape     Autotuner -> the config's blocks go into new descriptors -> the kernel
    settled                    what was remembered of such a launch, called directly

The short way is taken while no launch may be a trial, and as long as the tuner's choice for the shape is the
one that was remembered, so a later tuning is followed at once.

A launch that nobody has tuned and that cannot be timed alone takes the first candidate, which is said once.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import triton

from dist_autotune import is_tuning

from .configs import take_first
from .matrices import DESCRIPTORS_KEPT, Block, Matrix, describe
from .prepared_launch import PreparedLaunch

KEPT = 512
OF_MANY_SIZES = ("M", "size_class")  # what changes from call to call of one layer

Shape = TypeVar("Shape", bound=Hashable)
BlocksOf = Callable[[dict[str, Any]], dict[str, Block]]  # descriptors' blocks under all constants
Grid = Callable[[dict[str, Any]], tuple[int, int, int]]


class UntunedWarning(UserWarning):
    """An operation runs with the first of its candidates, as nobody has tuned it for such a shape."""


@dataclass(frozen=True, eq=False)
class Settled:
    """How a shape is launched as long as `config` is the tuner's choice for `key`."""

    config: triton.Config
    key: tuple[Any, ...]
    blocks: tuple[Block, ...]  # of the descriptors
    constants: tuple[Any, ...]  # in the order of the kernel's parameters, which end with them
    compiled: Any
    grid: tuple[int, int, int]

    def launch(self, matrices: tuple[Matrix, ...], *arguments: Any) -> None:
        """Launch the kernel; descriptors of `matrices`, with the config's blocks, are its first arguments."""
        _prepared(self, matrices)(*arguments)


@functools.lru_cache(maxsize=DESCRIPTORS_KEPT)
def _prepared(settled: Settled, matrices: tuple[Matrix, ...]) -> PreparedLaunch:
    descriptors = tuple(map(describe, matrices, settled.blocks))
    return PreparedLaunch(settled.compiled, settled.grid, descriptors, settled.constants)


class SettledLaunches(Generic[Shape]):
    """What is known of the shapes of one tuned kernel whose constants are its last parameters.

    A shape is all that the config and the compiled kernel depend on. No tensor of a caller is kept.
    operation: the name under which it is said that a shape has not been tuned, if it is to be.
    """

    def __init__(self, tuner: Any, blocks_of: BlocksOf, *, operation: str = "", kept: int = KEPT) -> None:
        self._tuner, self._blocks_of, self._kept = tuner, blocks_of, kept
        self._operation = operation
        self._told: set[tuple[Any, ...]] = set()
        self._of: OrderedDict[Shape, Settled] = OrderedDict()

    def find(self, shape: Shape) -> Settled | None:
        """Return how to launch the shape the short way; None if this launch must ask the tuner."""
        settled = self._of.get(shape)
        if settled is None or is_tuning() or self._choice(settled.key) is not settled.config:
            return None
        return settled

    def remember(
        self,
        shape: Shape,
        compiled: Any,
        grid: Grid,
        sizes: dict[str, Any],
        constants: dict[str, Any],
        dtypes: tuple[str, ...],
    ) -> None:
        """Keep the short way to what the tuner has just launched, if that is what it has settled on.

        sizes, constants: the arguments that no config sets. dtypes: of the tensors among the arguments.
        """
        tuner, named = self._tuner, {**sizes, **constants}
        key = (*(named[name] for name in tuner.keys), *dtypes)
        config = self._choice(key)
        if take_first.configs_not_timed() > 1 and self._operation:
            self._tell_untuned(key, {name: named[name] for name in tuner.keys})
        if is_tuning() or config is None or config is not tuner.best_config:
            return
        if not hasattr(compiled, "packed_metadata"):  # nothing was launched
            return
        named = {**constants, **config.kwargs}
        ordered = tuple(named[name] for name in tuner.arg_names if name in named)
        blocks = tuple(self._blocks_of({**sizes, **named}).values())
        self._of[shape] = Settled(config, key, blocks, ordered, compiled, grid(config.kwargs))
        if len(self._of) > self._kept:
            self._of.popitem(last=False)

    def _tell_untuned(self, key: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        """Warn, once for all sizes of a layer, that its first candidate runs; sessions still tune it."""
        from dist_autotune.tuner.results import (
            mark_provisional,  # not at the top: it loads what sessions need
        )

        mark_provisional(self._tuner, key)
        layer = tuple(size for name, size in sizes.items() if name not in OF_MANY_SIZES)
        if layer in self._told or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        self._told.add(layer)
        shape = ", ".join(f"{name}={size}" for name, size in sizes.items())
        warnings.warn(
            f"{self._operation} [{shape}] has not been tuned and takes the first of its candidates in every "
            "call. Call it in a function decorated with contextual_autotune, on all ranks with is_dist=True, "
            "which tunes it and keeps the result on disk",
            UntunedWarning,
            stacklevel=2,
        )

    def _choice(self, key: tuple[Any, ...]) -> triton.Config | None:
        """Return the tuner's settled config, if there is one."""
        configs = self._tuner.configs
        choice: triton.Config | None = configs[0] if len(configs) == 1 else self._tuner.cache.get(key)
        return choice
