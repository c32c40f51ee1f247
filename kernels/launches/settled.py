"""Settled launches: config, compiled kernel and grid as the tuning left them.

One is taken while its key is not on trial, and as long as the tuner's choice is the one that was remembered,
so a later tuning is followed at once. Of tuned functions that share an operation each launches the config
that it has settled on. A launch that nobody has tuned and that cannot be timed alone takes the first
candidate and warns once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import triton

from dist_autotune.for_operations import mark_provisional, settled_config, warn

from ..configs import INTERPRETED, take_first
from ..matrices import Block, Matrix, describe_at
from ..tensors import remember
from .loading import launch, load
from .prepared import PreparedLaunch

Tensors = tuple[torch.Tensor | None, ...]
OF_MANY_SIZES = ("M", "size_class")  # what changes from call to call of one layer
BlocksOf = Callable[[dict[str, Any]], dict[str, Block]]  # descriptors' blocks under all arguments
Grid = Callable[[dict[str, Any]], tuple[int, int, int]]  # how many programs run under a config


class UntunedWarning(UserWarning):
    """An operation runs with the first of its candidates, as nobody has tuned it for such a shape."""


class TunedKernel:
    """A tuned kernel whose constants are its last parameters.

    operation: the name in the warning that a shape has not been tuned, if there is to be one. blocks_of: of
    the descriptors that the host makes, if it makes any. sources_of: of which matrix each descriptor is under
    a config; None: one of each, in their order.
    """

    def __init__(
        self,
        tuner: Any,
        blocks_of: BlocksOf | None = None,
        *,
        operation: str = "",
        sources_of: Callable[[dict[str, Any]], tuple[int, ...]] | None = None,
    ) -> None:
        self.tuner, self.blocks_of, self.sources_of = tuner, blocks_of, sources_of
        # It keeps the arguments and config of its launch under way: one thread at a time may call it. An
        # interpreted launch ends with its kernel, which may wait for a peer's other thread.
        self.turn: AbstractContextManager[Any] = contextlib.nullcontext() if INTERPRETED else threading.Lock()
        self._operation = operation
        self._told: set[tuple[Any, ...]] = set()

    def tell_untuned(self, key: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Warn, once for all sizes of a layer, that its first candidate runs; sessions still tune it."""
        if not self._operation:
            return
        mark_provisional(self.tuner, key)
        layer = tuple(named[name] for name in self.tuner.keys if name not in OF_MANY_SIZES)
        if layer in self._told or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        self._told.add(layer)
        shape = ", ".join(f"{name}={named[name]}" for name in self.tuner.keys)
        warn(
            f"{self._operation} [{shape}] has not been tuned and takes the first of its candidates in every "
            "call. Call it in a function decorated with contextual_autotune, on all ranks with is_dist=True, "
            "which tunes it and keeps the result on disk",
            UntunedWarning,
        )


class Settled(NamedTuple):
    """How a kernel is launched as long as `config` is the tuner's choice for `key`."""

    config: triton.Config
    key: tuple[Any, ...]
    launch: PreparedLaunch
    sources: tuple[int, ...] | None  # of which matrix each descriptor is; None: one of each, in their order


class TunedLaunch:
    """The launches of a tuned kernel with arguments that lie alike: it keeps none but `held`.

    grid, constants: under a config, and those that no config sets. matrices: as those lie of which the host
    makes descriptors, the kernel's first arguments. held, numbers: the first of its tensors and of its
    numbers, which are the same in all launches.
    """

    def __init__(
        self,
        kernel: TunedKernel,
        grid: Grid,
        constants: dict[str, Any],
        matrices: tuple[Matrix, ...] = (),
        *,
        held: tuple[torch.Tensor, ...] = (),
        numbers: tuple[float, ...] = (),
    ) -> None:
        self._kernel, self._tuner = kernel, kernel.tuner
        self._grid, self._constants, self._matrices = grid, constants, matrices
        self._held, self._numbers = held, numbers
        self._held_at = [tensor.data_ptr() for tensor in held]
        self._last: Settled | None = None
        self._known: dict[triton.Config, Settled] = {}

    def __call__(self, addresses: tuple[int, ...], tensors: Tensors, scalars: tuple[float, ...]) -> None:
        """Enqueue the kernel; matrices are at these addresses, arguments in the order of its parameters."""
        settled = self._last
        if settled is None or settled_config(self._tuner, settled.key) is not settled.config:
            settled = self._last = self._find()
            if settled is None:
                self._ask(addresses, tensors, scalars)
                return
        if settled.sources is not None:
            addresses = tuple([addresses[source] for source in settled.sources])
        given_at = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        settled.launch.at(addresses, [*self._held_at, *given_at, *self._numbers, *scalars])

    def load(self, addresses: tuple[int, ...], tensors: Tensors, scalars: tuple[float, ...]) -> None:
        """Load what a launch with these arguments would run, unless it is known: see `loading.load`."""
        if self._find() is None:
            arguments = self._all(addresses, tensors, scalars)
            load(self._kernel.tuner, self._grid, *arguments, **self._constants)

    def _find(self) -> Settled | None:
        """Return how to launch the short way; None if this launch must ask the tuner."""
        for settled in self._known.values():
            if settled_config(self._tuner, settled.key) is settled.config:
                return settled
        return None

    def _ask(self, addresses: tuple[int, ...], tensors: Tensors, scalars: tuple[float, ...]) -> None:
        """Enqueue the kernel as the tuner has it, and remember what it has settled on."""
        kernel, arguments = self._kernel, self._all(addresses, tensors, scalars)
        with kernel.turn:
            take_first.configs_not_timed()  # what launches of other kernels have asked for
            compiled = launch(kernel.tuner[self._grid], *arguments, **self._constants)
            self._remember(compiled, arguments)

    def _all(
        self, addresses: tuple[int, ...], tensors: Tensors, scalars: tuple[float, ...]
    ) -> tuple[Any, ...]:
        """Return all arguments but the constants."""
        given = (
            tensor.detach() if tensor is not None and tensor.requires_grad else tensor for tensor in tensors
        )
        return (*describe_at(self._matrices, addresses), *self._held, *given, *self._numbers, *scalars)

    def _remember(self, compiled: Any, arguments: tuple[Any, ...]) -> None:
        """Keep the short way to what the tuner has just launched, if that is what it has settled on."""
        kernel, tuner = self._kernel, self._kernel.tuner
        named = dict(zip(tuner.arg_names, arguments, strict=False)) | self._constants
        types = (str(each.dtype) for each in arguments if isinstance(each, torch.Tensor))
        key = (*(named[name] for name in tuner.keys), *types)
        config = settled_config(tuner, key)
        if take_first.configs_not_timed() > 1:
            kernel.tell_untuned(key, named)
        # Without metadata nothing was launched.
        if config is None or config is not tuner.best_config or not hasattr(compiled, "packed_metadata"):
            return
        constants = self._constants | config.kwargs
        last = tuple(constants[name] for name in tuner.arg_names if name in constants)
        blocks = tuple(kernel.blocks_of(named | config.kwargs).values()) if kernel.blocks_of else ()
        sources = kernel.sources_of(config.kwargs) if kernel.sources_of else None
        matrices = self._matrices if sources is None else [self._matrices[source] for source in sources]
        made = PreparedLaunch(compiled, self._grid(config.kwargs), matrices, blocks, last)
        self._known[config] = Settled(config, key, made, sources)


class UnplannedLaunches:
    """Launches of tuned kernels in calls without a plan: equal ones share a `TunedLaunch`.

    Equal are kernel, device, numbers, constants, and types and alignments of tensors.
    """

    def __init__(self) -> None:
        self._of: dict[Hashable, TunedLaunch] = {}

    def launch(
        self,
        kernel: TunedKernel,
        grid: Grid,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
        constants: dict[str, Any],
    ) -> None:
        """Enqueue the kernel; the grid depends on the config, the device, numbers and constants alone."""
        kind = (kernel, tensors[0].device, *kinds_of(tensors), *numbers, *constants.values())
        known = self._of.get(kind)
        if known is None:
            known = remember(self._of, kind, TunedLaunch(kernel, grid, constants, numbers=numbers))
        known((), tensors, ())


def kinds_of(tensors: tuple[torch.Tensor, ...]) -> list[Hashable]:
    """Return types and alignments of tensors, for which Triton compiles a kernel anew."""
    return [each for tensor in tensors for each in (tensor.dtype, tensor.data_ptr() % 16 == 0)]
