"""Prepared launches: all that launches of one compiled kernel share is made once.

They are bare where the launcher is known: Triton's launcher in C is called without Triton's preparations, and
is given what Triton's own way gives it. While hooks are set, launches go that way: a profiler sees them.

    both   grid, stream, function, cooperative, dependent
    3.6    scratch, scratch of profilers; metadata, three for hooks; the kernel's arguments, one by one
    3.9    metadata, three for hooks; scratch, scratch of profilers; arguments' kinds, twice; then one tuple
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime.driver import driver

from ..matrices import DESCRIPTORS_KEPT, Block, Matrix, describe
from ..tensors import remember
from . import loading
from .loading import launch, load

try:
    from triton.backends.nvidia import driver as nvidia
except ImportError:  # Triton was built without it
    nvidia = None

FORMAT_OF_3_6 = "iiiKKppOOOOOO"  # as its launchers parse what is before the kernel's arguments
IS_3_9 = triton.__version__.startswith("3.9.")

Launch = Callable[[int, Sequence[Any]], None]  # on a stream, with all arguments but the last ones
Expand = Callable[[Any], Sequence[Any]]  # from a descriptor to what the launcher is given for it


class BareLaunch(NamedTuple):
    """Launches a compiled kernel without hooks; `expand` encodes the descriptors, its first arguments."""

    launch: Launch
    expand: tuple[Expand, ...]


class PreparedLaunch:
    """Launches one compiled kernel on one grid, on the current stream.

    matrices, blocks: of the descriptors, which are the kernel's first arguments: another launch has matrices
    that lie alike, at other addresses. last: the arguments that are the same in all launches.
    """

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, int, int],
        matrices: Sequence[Matrix],
        blocks: Sequence[Block],
        last: tuple[Any, ...],
    ) -> None:
        self._own_way = compiled[grid]
        self._matrices, self._blocks, self._last = matrices, blocks, last
        self._driver = driver.active
        self._device = self._driver.get_current_device()  # on which the kernel is loaded
        self._bare = bare_launch(compiled, grid, len(matrices), last)
        self._encoded: list[dict[int, Sequence[Any]]] = [{} for _ in matrices]  # descriptors by address

    def at(self, addresses: Sequence[int], middle: Sequence[float | None]) -> None:
        """Launch with matrices at these addresses, and with the arguments between them and the last ones.

        Tensors are given by their addresses: a launcher that is given a tensor asks the driver for its device
        pointer.
        """
        bare = self._bare
        if bare is None or _are_watched():
            descriptors = [self._describe(*placed) for placed in enumerate(addresses)]
            launch(self._own_way, *descriptors, *middle, *self._last)
            return
        if addresses:
            arguments: list[Any] = []
            for index, address in enumerate(addresses):
                encoded = self._encoded[index].get(address)
                arguments += self._encode(bare, index, address) if encoded is None else encoded
            arguments += middle
        else:
            arguments = middle  # type: ignore[assignment]
        bare.launch(self._driver.get_current_stream(self._device), arguments)

    def _describe(self, index: int, address: int) -> Any:
        return describe(self._matrices[index]._replace(address=address), self._blocks[index])

    def _encode(self, bare: BareLaunch, index: int, address: int) -> Sequence[Any]:
        """Encode a descriptor, which is kept; with more of them than layers have, all are encoded anew."""
        known = self._encoded[index]
        if len(known) >= DESCRIPTORS_KEPT:
            known.clear()
        encoded = known[address] = tuple(bare.expand[index](self._describe(index, address)))
        return encoded


def _are_watched() -> bool:
    """Return whether somebody is to be told of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if enter.__class__ is leave.__class__ is knobs.HookChain:  # else somebody has put a hook in its place
        return bool(enter.calls or leave.calls)
    return any(hook.calls if isinstance(hook, knobs.HookChain) else hook for hook in (enter, leave))


class PlainLaunches:
    """The launches of a kernel that is not tuned; the second one of a kind is prepared."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._of: dict[Hashable, PreparedLaunch] = {}

    def launch(
        self,
        kind: Hashable,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[int],
        constants: dict[str, Any],
        *,
        only_load: bool = False,
    ) -> PreparedLaunch | None:
        """Launch the kernel, or only load it; return the kind's prepared launch, None until there is one.

        kind: all that the compiled kernel and its grid depend on. The arguments are in the order of its
        parameters, which end with constants.
        """
        prepared = self._of.get(kind)
        if prepared is not None:
            if not only_load:
                prepared.at((), [*[tensor.data_ptr() for tensor in tensors], *numbers])
            return prepared
        constants = {**constants, **self._options}
        arguments = (*[tensor.detach() for tensor in tensors], *numbers)
        if only_load:
            load(self._kernel, grid, *arguments, **constants)
            return None
        compiled = self._kernel[grid](*arguments, **constants)
        if not hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            return None
        last = tuple(constants[name] for name in self._kernel.arg_names if name in constants)
        return remember(self._of, kind, PreparedLaunch(compiled, grid, (), (), last))


class PlainLaunch:
    """Launches of one kind (see `PlainLaunches`) with tensors of one layout; keeps no tensors but `held`.

    held: tensors after those of each launch. programs: 0 launches nothing.
    """

    def __init__(
        self,
        launches: PlainLaunches,
        kind: Hashable,
        programs: int,
        numbers: tuple[int, ...],
        constants: dict[str, Any],
        *,
        held: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self._launches, self._kind, self._programs = launches, kind, programs
        self._held, self._numbers, self._constants = held, numbers, constants
        self._rest = (*[tensor.data_ptr() for tensor in held], *numbers)
        self._prepared: PreparedLaunch | None = None

    def __call__(self, *tensors: torch.Tensor, only_load: bool = False) -> None:
        """Enqueue the kernel on the current stream, or only load it."""
        if self._prepared is not None and not only_load:
            self._prepared.at((), [*[tensor.data_ptr() for tensor in tensors], *self._rest])
        elif self._programs:
            grid, every = (self._programs, 1, 1), (*tensors, *self._held)
            given = (self._kind, grid, every, self._numbers, self._constants)
            self._prepared = self._launches.launch(*given, only_load=only_load)


# ---- bare launches


def bare_launch(
    compiled: Any, grid: tuple[int, int, int], descriptors: int, last: tuple[Any, ...]
) -> BareLaunch | None:
    """Return how to launch a compiled kernel without hooks; None if unknown.

    descriptors: how many of the kernel's first arguments are TMA descriptors; there are no others. last: its
    last arguments, which are the same in all launches.
    """
    launcher = compiled.run
    if nvidia is None or type(launcher) is not nvidia.CudaLauncher or launcher.profile_scratch_size:
        return None
    signature = list(compiled.src.signature.items())
    if any(map(_is_descriptor, signature[descriptors:])):
        return None
    meta = getattr(compiled.metadata, "tensordesc_meta", None) or [None] * descriptors
    of_each = list(zip(signature[:descriptors], meta, strict=True))
    if getattr(nvidia, "_BASE_ARGS_FORMAT", None) == FORMAT_OF_3_6:
        return BareLaunch(
            _launch_of_3_6(compiled, grid, last), tuple(_expand_of_3_6(*each) for each in of_each)
        )
    if IS_3_9 and not launcher.gsan_enabled:
        return BareLaunch(
            _launch_of_3_9(compiled, grid, last), tuple(_expand_of_3_9(*each) for each in of_each)
        )
    return None


def _expand_of_3_6(kind: tuple[Any, Any], meta: Any) -> Expand:
    before = (None,) * len(FORMAT_OF_3_6)
    wrapped = nvidia.wrap_handle_tensordesc(lambda *given: given[len(before) :], dict([kind]), [meta])
    return lambda descriptor: wrapped(*before, descriptor)


def _expand_of_3_9(kind: tuple[Any, Any], meta: Any) -> Expand:
    wrapped = nvidia.wrap_handle_tensordesc(lambda *given: given[-1], dict([kind]), [meta])
    return lambda descriptor: wrapped((descriptor,))


def _launch_of_3_6(compiled: Any, grid: tuple[int, int, int], last: tuple[Any, ...]) -> Launch:
    launch = compiled.run.launch
    if any(map(_is_descriptor, compiled.src.signature.items())):
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    function, scratch = _function(compiled), _scratch(compiled, grid)
    before = (None, compiled.packed_metadata, None, None, None)
    return lambda stream, arguments: launch(
        *grid, stream, *function, scratch and scratch(stream), *before, *arguments, *last
    )


def _launch_of_3_9(compiled: Any, grid: tuple[int, int, int], last: tuple[Any, ...]) -> Launch:
    launch, launcher = driver.active.utils.launch, compiled.run
    function, scratch = _function(compiled), _scratch(compiled, grid)
    before = (*function, compiled.packed_metadata, None, None, None)
    kinds = (None, launcher.arg_annotations, launcher.kernel_signature)
    return lambda stream, arguments: launch(
        *grid, stream, *before, scratch and scratch(stream), *kinds, (*arguments, *last)
    )


def _function(compiled: Any) -> tuple[Any, ...]:
    return compiled.function, compiled.run.launch_cooperative_grid, compiled.run.launch_pdl


def _scratch(compiled: Any, grid: tuple[int, int, int]) -> Callable[[int], Any] | None:
    """Return what allocates the scratch memory of a launch on a stream; None if the kernel needs none.

    It is of our allocator, which the own way finds in its context: see `loading.launch`.
    """
    launcher = compiled.run
    size = grid[0] * grid[1] * grid[2] * launcher.num_ctas * launcher.global_scratch_size
    if not size:
        return None
    return lambda stream: loading.allocate_scratch(size, launcher.global_scratch_align, stream)


def _is_descriptor(argument: tuple[Any, Any]) -> bool:
    _name, kind = argument
    return str(kind).startswith("tensordesc")
