"""Launches of a tuned kernel, each way shorter than the one before it.

    by the tuner   Autotuner, the config's blocks in new descriptors, the kernel. The first calls of a shape
    settled        config, compiled kernel and grid as the tuning left them (`SettledLaunches`)
    prepared       what layers share is made once, a descriptor once for its address (`PreparedLaunch`)
    bare           Triton's launcher in C, called without Triton's preparations (`bare_launch`)

A settled launch is taken while no launch may be a trial, and as long as the tuner's choice for the shape is
the one that was remembered, so a later tuning is followed at once. A launch that nobody has tuned and that
cannot be timed alone takes the first candidate and warns once.

A bare launch gives the kernel what Triton's own gives. It is left out while hooks are set, as a profiler sees
every launch, and with releases whose launcher is not known:

    both   grid, stream, function, cooperative, dependent
    3.6    scratch, scratch of profilers; metadata, three for hooks; the kernel's arguments, one by one
    3.9    metadata, three for hooks; scratch, scratch of profilers; arguments' kinds, twice; then one tuple
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeGuard, TypeVar

import torch
import triton
from triton import knobs
from triton.runtime.driver import driver

from dist_autotune import is_tuning

from .configs import INTERPRETED, take_first
from .matrices import DESCRIPTORS_KEPT, Block, Matrix, describe, describe_at
from .tensors import remember

try:
    from triton.backends.nvidia import driver as nvidia
except ImportError:  # Triton was built without it
    nvidia = None

FORMAT_OF_3_6 = "iiiKKppOOOOOO"  # as its launchers parse what is before the kernel's arguments
IS_3_9 = triton.__version__.startswith("3.9.")
PLAIN = frozenset({int, float, bool, type(None)})  # arguments that are no tensors

Launch = Callable[[int, Sequence[Any]], None]  # on a stream, with all arguments but the last ones
Expand = Callable[[Any], Sequence[Any]]  # from a descriptor to what the launcher is given for it
Tensors = tuple[torch.Tensor | None, ...]
OF_MANY_SIZES = ("M", "size_class")  # what changes from call to call of one layer


class BareLaunch(NamedTuple):
    """Launches a compiled kernel without hooks; `expand` encodes the descriptors, its first arguments."""

    launch: Launch
    expand: tuple[Expand, ...]


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

    It is of our allocator, which the own way finds in its context: see `launch`.
    """
    launcher = compiled.run
    size = grid[0] * grid[1] * grid[2] * launcher.num_ctas * launcher.global_scratch_size
    return (lambda stream: _allocate_scratch(size, launcher.global_scratch_align, stream)) if size else None


def _is_descriptor(argument: tuple[Any, Any]) -> bool:
    _name, kind = argument
    return str(kind).startswith("tensordesc")


class PreparedLaunch:
    """Launches one compiled kernel on one grid, on the current stream.

    matrices, blocks: of the descriptors, which are the kernel's first arguments: another launch has matrices
    that lie alike, in other places. last: the arguments that are the same in all launches.
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

    def __call__(self, addresses: Sequence[int], *middle: Any) -> None:
        """Launch with matrices at these addresses, and with the arguments between them and the last ones."""
        # Addresses: of a tensor the launcher asks the driver whether the device can reach it.
        numbers = [each if each.__class__ in PLAIN else each.data_ptr() for each in middle]
        self.at(addresses, numbers)

    def at(self, addresses: Sequence[int], middle: Sequence[float | None]) -> None:
        """Launch so with tensors that are given by their addresses, too."""
        bare = self._bare
        if bare is None or _are_watched():
            descriptors = [self._describe(*placed) for placed in enumerate(addresses)]
            launch(self._own_way, *descriptors, *middle, *self._last)
            return
        if addresses:
            arguments: list[Any] = []
            for place, address in enumerate(addresses):
                encoded = self._encoded[place].get(address)
                arguments += self._encode(bare, place, address) if encoded is None else encoded
            arguments += middle
        else:
            arguments = middle  # type: ignore[assignment]
        bare.launch(self._driver.get_current_stream(self._device), arguments)

    def _describe(self, place: int, address: int) -> Any:
        return describe(self._matrices[place]._replace(address=address), self._blocks[place])

    def _encode(self, bare: BareLaunch, place: int, address: int) -> Sequence[Any]:
        """Encode a descriptor, which is kept; with more of them than layers have, all are encoded anew."""
        known = self._encoded[place]
        if len(known) >= DESCRIPTORS_KEPT:
            known.clear()
        encoded = known[address] = tuple(bare.expand[place](self._describe(place, address)))
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
        programs: int,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[int],
        constants: dict[str, Any],
        *,
        only_load: bool = False,
    ) -> None:
        """Launch it, or load it; the arguments are in the order of its parameters, which end with constants.

        kind: all that the compiled kernel and its grid depend on.
        """
        prepared = self._of.get(kind)
        if prepared is not None:
            if not only_load:
                prepared.at((), [*[tensor.data_ptr() for tensor in tensors], *numbers])
            return
        grid, constants = (programs, 1, 1), {**constants, **self._options}
        arguments = (*[tensor.detach() for tensor in tensors], *numbers)
        if only_load:
            load(self._kernel, grid, *arguments, **constants)
            return
        compiled = self._kernel[grid](*arguments, **constants)
        if hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            last = tuple(constants[name] for name in self._kernel.arg_names if name in constants)
            remember(self._of, kind, PreparedLaunch(compiled, grid, (), (), last))


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

    _prepared: dict[Hashable, PreparedLaunch] = field(default_factory=dict)  # by how the matrices lie

    def launch(self, matrices: tuple[Matrix, ...], *arguments: Any) -> None:
        """Launch the kernel; descriptors of `matrices`, with the config's blocks, are its first arguments."""
        self.prepared(matrices)([matrix.address for matrix in matrices], *arguments)

    def prepared(self, matrices: tuple[Matrix, ...]) -> PreparedLaunch:
        """Return the launch for matrices that lie so, wherever they are."""
        lie = tuple(matrix[1:] for matrix in matrices)
        found = self._prepared.get(lie)
        if found is None:
            made = PreparedLaunch(self.compiled, self.grid, matrices, self.blocks, self.constants)
            found = remember(self._prepared, lie, made)
        return found


class SettledLaunches(Generic[Shape]):
    """The settled launches of one tuned kernel whose constants are its last parameters; no tensor is kept.

    operation: the name in the warning that a shape has not been tuned, if there is to be one. blocks_of: of
    the descriptors that the host makes, if it makes any.
    """

    def __init__(self, tuner: Any, blocks_of: BlocksOf | None = None, *, operation: str = "") -> None:
        self.tuner, self._blocks_of, self._operation = tuner, blocks_of, operation
        self._told: set[tuple[Any, ...]] = set()
        self._of: dict[Shape, Settled] = {}

    def find(self, shape: Shape) -> Settled | None:
        """Return how to launch the shape the short way; None if this launch must ask the tuner."""
        settled = self._of.get(shape)
        return settled if self.is_current(settled) else None

    def is_current(self, settled: Settled | None) -> TypeGuard[Settled]:
        """Return whether it still is how its shape is to be launched."""
        if settled is None or is_tuning():
            return False
        tuner = self.tuner
        choice = tuner.configs[0] if len(tuner.configs) == 1 else tuner.cache.get(settled.key)
        return choice is settled.config

    def launch(self, shape: Shape, tensors: Tensors, scalars: tuple[float, ...], **constants: Any) -> None:
        """Enqueue a kernel that makes its own descriptors; the arguments are in the order of its parameters.

        constants: those that the shape does not know of.
        """
        ShapeLaunch(self, shape, constants=constants)((), tensors, scalars)

    def load(self, shape: Shape, arguments: tuple[Any, ...]) -> None:
        """Load what a launch with these arguments would run, unless it is known: see `load`."""
        if self.find(shape) is None:
            load(self.tuner, shape.grid, *arguments, **shape.constants())

    def remember(self, shape: Shape, compiled: Any, constants: dict[str, Any], tensors: Tensors) -> None:
        """Keep the short way to what the tuner has just launched, if that is what it has settled on.

        constants: the constexprs that no config sets. tensors: those among the arguments; some may be None.
        """
        sizes, tuner = shape.sizes(), self.tuner
        named = {**sizes, **constants}
        types = (str(tensor.dtype) for tensor in tensors if tensor is not None)
        key = (*(named[name] for name in tuner.keys), *types)
        config = tuner.configs[0] if len(tuner.configs) == 1 else tuner.cache.get(key)
        if take_first.configs_not_timed() > 1 and self._operation:
            self._tell_untuned(key, {name: named[name] for name in tuner.keys})
        if is_tuning() or config is None or config is not tuner.best_config:
            return
        if not hasattr(compiled, "packed_metadata"):  # nothing was launched
            return
        named = {**constants, **config.kwargs}
        ordered = tuple(named[name] for name in tuner.arg_names if name in named)
        blocks = tuple(self._blocks_of({**sizes, **named}).values()) if self._blocks_of else ()
        settled = Settled(config, key, blocks, ordered, compiled, shape.grid(config.kwargs))
        remember(self._of, shape, settled)

    def _tell_untuned(self, key: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        """Warn, once for all sizes of a layer, that its first candidate runs; sessions still tune it."""
        from dist_autotune.tuner.results import mark_provisional  # it loads what only sessions need

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
    that the shape does not know of.
    """

    def __init__(
        self,
        launches: SettledLaunches[Shape],
        shape: Shape,
        matrices: tuple[Matrix, ...] = (),
        constants: dict[str, Any] | None = None,
    ) -> None:
        self._launches, self._shape, self._matrices = launches, shape, matrices
        self._constants = constants
        self._settled: Settled | None = None
        self._prepared: PreparedLaunch | None = None

    def __call__(self, addresses: tuple[int, ...], tensors: Tensors, scalars: tuple[float, ...]) -> None:
        """Enqueue the kernel; matrices are at these addresses, arguments in the order of its parameters."""
        prepared = self.prepared()
        if prepared is not None:
            at = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
            prepared.at(addresses, [*at, *scalars])
        else:
            self.ask(addresses, tensors, scalars)

    def prepared(self) -> PreparedLaunch | None:
        """Return the settled way; None if this launch must ask the tuner."""
        if not self._launches.is_current(self._settled):
            self._settled = found = self._launches.find(self._shape)
            self._prepared = None if found is None else found.prepared(self._matrices)
        return self._prepared

    def ask(self, addresses: tuple[int, ...], tensors: Tensors, scalars: tuple[float, ...]) -> None:
        """Enqueue the kernel as the tuner has it, and remember what it has settled on."""
        launches, shape = self._launches, self._shape
        constants = {**shape.constants(), **(self._constants or {})}
        arguments = (*describe_at(self._matrices, addresses), *tensors, *scalars)
        compiled = launch(launches.tuner[shape.grid], *arguments, **constants)
        launches.remember(shape, compiled, constants, tensors)


def launch(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Launch `kernel`, a kernel with its grid, that makes TMA descriptors on the device; return what it does.

    They need scratch memory; the caller's own allocator stays what it is.
    """
    context = contextvars.copy_context()
    context.run(triton.set_allocator, _allocate_scratch)
    return context.run(kernel, *args, **kwargs)


def load(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """Compile and load what a launch with these arguments would run, and run nothing.

    To be called before a side stream is given waits for peers: a driver that loads a kernel may first wait
    for all that is enqueued. What fails here fails at the launch again, which raises.
    """
    if INTERPRETED:
        return
    with contextlib.suppress(Exception):
        compiled = launch(kernel.run, *args, grid=grid, warmup=True, **kwargs)
        compiled._init_handles()
        if compiled.n_spills and not torch.version.hip:
            _make_room_for_locals(4 * compiled.n_spills)


def _make_room_for_locals(bytes_of_thread: int) -> None:
    """Have the driver grow local memory now: at the first launch it would await all streams."""
    from cuda.bindings import driver

    needed = bytes_of_thread + 512
    stack = driver.CUlimit.CU_LIMIT_STACK_SIZE
    status, limit = driver.cuCtxGetLimit(stack)
    if int(status) == 0 and limit < needed:
        driver.cuCtxSetLimit(stack, needed)
        torch.cuda._sleep(1)  # the limit is acted upon at the next launch, of whatever kernel
        torch.cuda.current_stream().synchronize()


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
