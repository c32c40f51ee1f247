"""Settled launches: config, compiled kernel and grid as the tuning left them.

One is taken while no launch may be a trial, and as long as the tuner's choice for the shape is the one that
was remembered, so a later tuning is followed at once. Of tuned functions that share an operation each
launches the config that it has settled on. A launch that nobody has tuned and that cannot be timed alone
takes the first candidate and warns once.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import torch
import triton

from dist_autotune.for_operations import mark_provisional, settled_config

from ..configs import INTERPRETED, take_first
from ..matrices import Block, Matrix, describe_at
from ..tensors import remember
from .loading import launch, load
from .prepared import PreparedLaunch

Tensors = tuple[torch.Tensor | None, ...]
Arguments = tuple[tuple[int, ...], Tensors, tuple[float, ...]]  # addresses of matrices, tensors, numbers
OF_MANY_SIZES = ("M", "size_class")  # what changes from call to call of one layer
BlocksOf = Callable[[dict[str, Any]], dict[str, Block]]  # descriptors' blocks under all constants


class LaunchShape(Hashable, Protocol):
    """All that the config of a tuned kernel and its compiled form depend on."""

    def sizes(self) -> dict[str, int]:
        """Return the arguments in the key of the tuning that are no constants."""

    def constants(self) -> dict[str, Any]:
        """Return the constexprs of the kernel that no config sets, in the order of its parameters."""

    def grid(self, meta: dict[str, Any]) -> tuple[int, int, int]:
        """Return how many programs run under a config."""


Shape = TypeVar("Shape", bound=LaunchShape)


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

    sources: tuple[int, ...] | None  # of which matrix each descriptor is; None: one of each, in their order

    _prepared: dict[Hashable, PreparedLaunch] = field(default_factory=dict)  # by how the matrices lie

    def prepared(self, matrices: tuple[Matrix, ...]) -> PreparedLaunch:
        """Return the launch for matrices that lie so, wherever they are."""
        lie = tuple(matrix[1:] for matrix in matrices)
        found = self._prepared.get(lie)
        if found is None:
            described = matrices if self.sources is None else [matrices[source] for source in self.sources]
            made = PreparedLaunch(self.compiled, self.grid, described, self.blocks, self.constants)
            found = remember(self._prepared, lie, made)
        return found


class SettledLaunches(Generic[Shape]):
    """The settled launches of one tuned kernel whose constants are its last parameters; no tensor is kept.

    operation: the name in the warning that a shape has not been tuned, if there is to be one. blocks_of: of
    the descriptors that the host makes, if it makes any. sources_of: as in `Settled`, under a config.
    """

    def __init__(
        self,
        tuner: Any,
        blocks_of: BlocksOf | None = None,
        *,
        operation: str = "",
        sources_of: Callable[[dict[str, Any]], tuple[int, ...]] | None = None,
    ) -> None:
        self.tuner, self._blocks_of, self._operation = tuner, blocks_of, operation
        self._sources_of = sources_of
        # It keeps the arguments and config of its launch under way: one thread at a time may call it. An
        # interpreted launch ends with its kernel, which may wait for a peer's other thread.
        self.turn: AbstractContextManager[Any] = contextlib.nullcontext() if INTERPRETED else threading.Lock()
        self._told: set[tuple[Any, ...]] = set()
        self._of: dict[Shape, tuple[Settled, ...]] = {}  # one for each config

    def find(self, shape: Shape) -> Settled | None:
        """Return how to launch the shape the short way; None if this launch must ask the tuner."""
        for settled in self._of.get(shape, ()):
            if self.is_current(settled):
                return settled
        return None

    def is_current(self, settled: Settled | None) -> TypeGuard[Settled]:
        """Return whether it still is how its shape is to be launched."""
        return settled is not None and settled_config(self.tuner, settled.key) is settled.config

    def remember(self, shape: Shape, compiled: Any, constants: dict[str, Any], tensors: Tensors) -> None:
        """Keep the short way to what the tuner has just launched, if that is what it has settled on.

        constants: the constexprs that no config sets. tensors: those among the arguments; some may be None.
        """
        sizes, tuner = shape.sizes(), self.tuner
        named = {**sizes, **constants}
        types = (str(tensor.dtype) for tensor in tensors if tensor is not None)
        key = (*(named[name] for name in tuner.keys), *types)
        config = settled_config(tuner, key)
        if take_first.configs_not_timed() > 1 and self._operation:
            self._tell_untuned(key, {name: named[name] for name in tuner.keys})
        if config is None or config is not tuner.best_config:
            return
        if not hasattr(compiled, "packed_metadata"):  # nothing was launched
            return
        named = {**constants, **config.kwargs}
        ordered = tuple(named[name] for name in tuner.arg_names if name in named)
        blocks = tuple(self._blocks_of({**sizes, **named}).values()) if self._blocks_of else ()
        sources = self._sources_of(config.kwargs) if self._sources_of else None
        settled = Settled(config, key, blocks, ordered, compiled, shape.grid(config.kwargs), sources)
        others = (each for each in self._of.get(shape, ()) if each.config is not config)
        remember(self._of, shape, (settled, *others))

    def _tell_untuned(self, key: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        """Warn, once for all sizes of a layer, that its first candidate runs; sessions still tune it."""
        mark_provisional(self.tuner, key)
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


class ShapeLaunch(Generic[Shape]):
    """The launches of one shape. The settled way is looked up again when the tuner's choice has changed.

    matrices: as those lie of which the host makes descriptors, the kernel's first arguments. constants: those
    that the shape does not know of. held, numbers: the first of its tensors and of its numbers, which are the
    same in all launches.
    """

    def __init__(
        self,
        launches: SettledLaunches[Shape],
        shape: Shape,
        matrices: tuple[Matrix, ...] = (),
        constants: dict[str, Any] | None = None,
        *,
        held: tuple[torch.Tensor, ...] = (),
        numbers: tuple[float, ...] = (),
    ) -> None:
        self._launches, self._shape, self._matrices = launches, shape, matrices
        self._constants, self._held, self._numbers = constants, held, numbers
        self._held_at = [tensor.data_ptr() for tensor in held]
        self._settled: Settled | None = None
        self._prepared: PreparedLaunch | None = None

    def __call__(self, addresses: tuple[int, ...], tensors: Tensors, scalars: tuple[float, ...]) -> None:
        """Enqueue the kernel; matrices are at these addresses, arguments in the order of its parameters."""
        settled = self._settled
        if not self._launches.is_current(settled):
            settled = self._settled = self._launches.find(self._shape)
            self._prepared = None if settled is None else settled.prepared(self._matrices)
        if settled is None or self._prepared is None:
            self._ask(addresses, tensors, scalars)
            return
        if settled.sources is not None:
            addresses = tuple([addresses[source] for source in settled.sources])
        given_at = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        self._prepared.at(addresses, [*self._held_at, *given_at, *self._numbers, *scalars])

    def load(self, addresses: tuple[int, ...], tensors: Tensors, scalars: tuple[float, ...]) -> None:
        """Load what a launch with these arguments would run, unless it is known: see `loading.load`."""
        launches, shape = self._launches, self._shape
        if launches.find(shape) is None:
            arguments, _, constants = self._all(addresses, tensors, scalars)
            load(launches.tuner, shape.grid, *arguments, **constants)

    def _ask(self, addresses: tuple[int, ...], tensors: Tensors, scalars: tuple[float, ...]) -> None:
        """Enqueue the kernel as the tuner has it, and remember what it has settled on."""
        launches, shape = self._launches, self._shape
        arguments, given, constants = self._all(addresses, tensors, scalars)
        with launches.turn:
            take_first.configs_not_timed()  # what launches of other kernels have asked for
            compiled = launch(launches.tuner[shape.grid], *arguments, **constants)
            launches.remember(shape, compiled, constants, given)

    def _all(
        self, addresses: tuple[int, ...], tensors: Tensors, scalars: tuple[float, ...]
    ) -> tuple[tuple[Any, ...], Tensors, dict[str, Any]]:
        """Return all arguments, the tensors among them, and the constants that no config sets."""
        given = (*self._held, *(tensor if tensor is None else tensor.detach() for tensor in tensors))
        arguments = (*describe_at(self._matrices, addresses), *given, *self._numbers, *scalars)
        return arguments, given, {**self._shape.constants(), **(self._constants or {})}
