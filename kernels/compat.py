"""The one place for names that differ between Triton 3.6 and the newest, so that kernels compile on both.

    tma_load, tma_store,     3.8 renamed them; in 3.9 the old names raise
    aggregate                3.6 has only the private decorator, which needs an `__init__`, and annotations
                             that are not strings
    load_accumulator         from tensor memory; until 3.7 the caller names the layout of the registers
    inline_asm               PTX with a tensor's registers and addresses of shared memory; None before 3.9
    compiled_for             "cuda", "hip", or "cpu" in the interpreter

Importing this needs no GPU.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar, dataclass_transform

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = [
    "HAS_INLINE_PTX",
    "GluonASTSource",
    "aggregate",
    "compiled_for",
    "inline_asm",
    "is_one_warp",
    "leave_the_core",
    "load_accumulator",
    "partition_barrier",
    "reinterpret",
    "tma_load",
    "tma_store",
]

_buffer = gl.shared_memory_descriptor


def _aggregate_with_init(cls: Any) -> Any:
    """Return the class as an aggregate; its constructor takes the fields in their order."""
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
    """Return the class as an aggregate: its constructor takes the fields, its methods are device code."""
    made: type[Aggregate] = _make_aggregate(cls)
    return made


def _builtin(function: Any) -> Any:
    """Return the function as a builtin: the compiler passes `_semantic`, the interpreter does not."""
    function.__triton_builtin__ = True
    return function


@_builtin
def compiled_for(_semantic: Any = None) -> Any:
    """Return the name of the kernel's target, a constexpr."""
    return tl.constexpr("cpu" if _semantic is None else _semantic.builder.options.backend_name)


@_builtin
def leave_the_core(seconds: Any, _semantic: Any = None) -> None:
    """Sleep, in the interpreter only: there ranks share few cores, and threads share Python's lock."""
    time.sleep(tl.core._unwrap_if_constexpr(seconds))


@_builtin
def is_one_warp(_semantic: Any = None, _generator: Any = None) -> Any:
    """Return whether one warp runs the code that is compiled, a constexpr; otherwise a program does."""
    if not hasattr(_semantic, "num_warps"):  # Gluon's
        return tl.constexpr(_semantic.builder.options.num_warps == 1)
    warps = tl.constexpr(_semantic.num_warps(_generator))
    if warps.value != 1:
        raise NotImplementedError(f"a Gluon partition of {warps.value} warps waits; only one warp may")
    return tl.constexpr(True)


tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret: Any = getattr(_buffer, "reinterpret", None) or _buffer._reinterpret

inline_asm: Any = getattr(gl, "inline_asm", None)
HAS_INLINE_PTX = inline_asm is not None

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
