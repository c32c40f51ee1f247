"""The one place for names that differ between Triton 3.6 and the newest: what uses them compiles on both.

    tma_load, tma_store      3.8 renamed them; 3.9 keeps the old names and lets them raise
    aggregate                a class of tensors and constants, from its annotations. 3.6 has only the private
                             decorator, which wants an `__init__`; and annotations that are no strings
    reinterpret              of shared memory; the method lost its underscore
    partition_barrier        of all warps of a partition, for their writes to global memory as well; renamed
    load_accumulator         from tensor memory; until 3.7 the caller names the layout of the registers
    inline_asm               PTX with a tensor's registers and addresses of shared memory; None before 3.9
    HAS_CLUSTERS_AND_PTX     whether there is that, and loads that several CTAs receive
    GluonASTSource           public since 3.9; what ahead-of-time compilation starts from
    compiled_for             "cuda", "hip", or "cpu" in the interpreter: known while a kernel is compiled, and
                             told to functions that count as Triton's own
    is_one_warp              whether one warp runs it; told to such functions, too
    bare_launch              the function that launches, below Triton's own preparations; known of 3.6

Gluon is NVIDIA's and AMD's; importing this needs no GPU. Triton without Gluon's names is not supported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.runtime import _allocation

try:
    from triton.backends.nvidia import driver as nvidia
except ImportError:  # Triton was built without it
    nvidia = None

__all__ = [
    "HAS_CLUSTERS_AND_PTX",
    "GluonASTSource",
    "aggregate",
    "bare_launch",
    "compiled_for",
    "inline_asm",
    "is_one_warp",
    "load_accumulator",
    "partition_barrier",
    "reinterpret",
    "tma_load",
    "tma_store",
]

_buffer = gl.shared_memory_descriptor


def _aggregate_with_init(cls: Any) -> Any:
    """Return the aggregate of a class whose constructor takes its fields in their order."""
    fields = dict(cls.__annotations__)

    def init(self: Any, *values: Any) -> None:
        for (name, kind), value in zip(fields.items(), values, strict=True):
            wrap = kind is tl.constexpr and not isinstance(value, tl.constexpr)
            setattr(self, name, tl.constexpr(value) if wrap else value)

    init.__triton_builtin__ = True  # type: ignore[attr-defined]  # it is not a part of the kernel's source
    cls.__init__ = init
    return tl.core._aggregate(cls)


_make_aggregate: Any = getattr(gluon, "aggregate", None) or _aggregate_with_init
Aggregate = TypeVar("Aggregate")


@dataclass_transform()
def aggregate(cls: type[Aggregate]) -> type[Aggregate]:
    """Return the class as an aggregate, whose constructor takes its fields; methods are device code."""
    made: type[Aggregate] = _make_aggregate(cls)
    return made


def _builtin(function: Any) -> Any:
    """Return the function as one that the compiler runs, and passes what it knows; not so the interpreter."""
    function.__triton_builtin__ = True
    return function


@_builtin
def compiled_for(_semantic: Any = None) -> Any:
    """Return what the kernel is compiled for, a constexpr."""
    return tl.constexpr("cpu" if _semantic is None else _semantic.builder.options.backend_name)


@_builtin
def is_one_warp(_semantic: Any = None, _generator: Any = None) -> Any:
    """Return whether one warp runs what is being compiled, a constexpr; otherwise it is a whole program."""
    if not hasattr(_semantic, "num_warps"):  # Gluon's
        return tl.constexpr(_semantic.builder.options.num_warps == 1)
    warps = tl.constexpr(_semantic.num_warps(_generator))
    if warps.value != 1:
        raise NotImplementedError(f"a Gluon partition of {warps.value} warps waits; only one warp may")
    return tl.constexpr(True)


tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret: Any = getattr(_buffer, "reinterpret", None) or _buffer._reinterpret

# 3.7 and 3.8 know multicast, too, but nothing here has been run with them.
inline_asm: Any = getattr(gl, "inline_asm", None)
HAS_CLUSTERS_AND_PTX = inline_asm is not None

partition_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier

if hasattr(blackwell, "get_tmem_reg_layout"):  # until 3.7
    _register_layout: Any = blackwell.get_tmem_reg_layout

    @gluon.jit
    def load_accumulator(accumulator):
        """Return what the tensor memory holds, in registers."""
        layout: gl.constexpr = _register_layout(
            accumulator.dtype, accumulator.shape, accumulator.layout, gl.num_warps()
        )
        return accumulator.load(layout)

else:

    @gluon.jit
    def load_accumulator(accumulator):
        """Return what the tensor memory holds, in registers."""
        return accumulator.load()


# ---- launches

# What the function that launches takes before the kernel's arguments, as 3.6 parses it: grid, stream,
# function, cooperative, dependent; then scratch, scratch of profilers, metadata, and three for hooks.
_BARE_FORMAT = "iiiKKppOOOOOO"


class BareLaunch(NamedTuple):
    """`launch(*grid, stream, *function, scratch, *first, *the other arguments)` launches the kernel."""

    launch: Callable[..., None]
    function: tuple[Any, ...]
    scratch: Callable[[int], Any] | None  # allocates for a stream, if the kernel needs it
    first: tuple[Any, ...]


def bare_launch(compiled: Any, grid: tuple[int, int, int], first: tuple[Any, ...]) -> BareLaunch | None:
    """Return how to launch a compiled kernel whose first arguments these are, without hooks; None if unknown.

    `first` has all TMA descriptors and is expanded by Triton itself, once. Newer releases do all this in C++.
    """
    launcher = compiled.run
    if nvidia is None or type(launcher) is not nvidia.CudaLauncher or launcher.profile_scratch_size:
        return None
    if getattr(nvidia, "_BASE_ARGS_FORMAT", None) != _BARE_FORMAT:
        return None
    signature = compiled.src.signature
    descriptors = [at for at, kind in enumerate(signature.values()) if str(kind).startswith("tensordesc")]
    if any(at >= len(first) for at in descriptors):
        return None
    launch, expanded = launcher.launch, first
    if descriptors:
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        meta = getattr(compiled.metadata, "tensordesc_meta", None)
        expand = nvidia.wrap_handle_tensordesc(lambda *given: given, signature, meta)
        before = (None,) * len(_BARE_FORMAT)
        expanded = expand(*before, *first)[len(before) :]
    size, alignment = launcher.global_scratch_size, launcher.global_scratch_align
    programs = grid[0] * grid[1] * grid[2] * launcher.num_ctas
    allocate = functools.partial(_allocate, programs * size, alignment) if size else None
    function = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    return BareLaunch(
        launch, function, allocate, (None, compiled.packed_metadata, None, None, None, *expanded)
    )


def _allocate(size: int, alignment: int, stream: int) -> Any:
    """Return scratch memory of the allocator that is set now, as launches ask for it."""
    return _allocation._allocator.get()(size, alignment, stream)
