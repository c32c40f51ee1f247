"""Triton's interpreter without work that it does in vain at every step: kernels run in a third of the time.

What kernels compute and what is refused stays the same; only tests use this. Programs that tests start as
processes of their own run the interpreter as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any

import triton.language as tl
from frame_room import with_room
from triton.language import core
from triton.runtime import interpreter

MOST_KEPT = 4096  # larger constants of kernels are few


def install() -> None:
    """Change the interpreter, for good, in this process and those that it forks."""
    interpreter._patch_lang = _PatchOnce(interpreter._patch_lang)
    options = interpreter.interpreter_builder.options
    if not options.debug:  # then it computes whether integers overflow and does not look at the answer
        without = dataclasses.replace(options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = without
    # Each value that a kernel computes has a type of its own, with texts that nobody reads: it is kept.
    core.block_type.__init__ = _types_of_blocks(core.block_type.__init__)
    core._type_for_tuple_values = _types_of_tuples(core._type_for_tuple_values)
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype)
    core.tensor.__init__ = _tensors(core.tensor.__init__)
    launch = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = functools.partialmethod(_in_a_roomy_frame, launch)
    semantic = interpreter.TritonSemantic
    semantic.binary_op_type_checking_impl = _operands(semantic.binary_op_type_checking_impl)
    semantic.broadcast_impl_value = _broadcast(semantic.broadcast_impl_value)
    semantic.scalar_constant = _constants(semantic.scalar_constant)
    _rewrite_kernels()


def _in_a_roomy_frame(self: Any, launch: Any, *args: Any, **kwargs: Any) -> Any:
    return with_room(launch, self, *args, **kwargs)  # on whatever thread


def _rewrite_kernels() -> None:
    """Rewrite the functions of all kernels here, once, and not in each rank that is forked."""
    for name in [name for name in sys.modules if name.startswith("dist_autotune.kernels.")]:
        for value in list(vars(sys.modules[name]).values()):
            fn = getattr(value, "fn", None)
            for each in (value, fn):
                if isinstance(each, interpreter.InterpretedFunction):
                    # Rewriting puts the name there; the stock interpreter fails before it rewrites.
                    assert _language_modules(each.fn), f"{each.fn.__module__} does not import triton.language"
                    each.rewrite()


def _types_of_blocks(init: Any) -> Any:
    kept: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def init_once(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sides = _integers(shape)
        if sides is None or type(element_ty) is not core.dtype:  # pointers have names that say too little
            init(self, element_ty, shape)
            return
        key = element_ty.name, sides
        if key not in kept:
            init(self, element_ty, shape)
            kept[key] = vars(self).copy()
        vars(self).update(kept[key])

    return init_once


def _types_of_tuples(type_of: Any) -> Any:
    kept: dict[tuple[int, ...], Any] = {}

    def type_once(values: Sequence[Any], fields: Any = None) -> Any:
        integers = _integers(values)
        if integers is None or fields is not None:
            return type_of(values, fields)
        if integers not in kept:
            kept[integers] = type_of(values)
        return kept[integers]

    return type_once


def _integers(values: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the values if all are integers that a kernel knows at compile time."""
    found = tuple([value.value if type(value) is core.constexpr else value for value in values])
    return found if {*map(type, found)} <= {int} else None


def _numpy_types(type_of: Any) -> Any:
    kept: dict[str, Any] = {}

    def type_once(kind: Any) -> Any:
        scalar = kind.scalar
        if type(scalar) is not core.dtype:
            return type_of(kind)
        if scalar.name not in kept:
            kept[scalar.name] = type_of(kind)
        return kept[scalar.name]

    return type_once


def _tensors(init: Any) -> Any:
    kept: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_once(self: Any, handle: Any, type: Any) -> None:
        sides = tuple(type.shape) if type.is_block() else ()
        found = kept.get(sides)
        if found is None:
            init(self, handle, type)
            assert vars(self).keys() == {"handle", "shape", "numel", "type", "dtype"}
            kept[sides] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = found

    return init_once


def _operands(check: Any) -> Any:
    def check_unless_alike(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype:
            kind = lhs.dtype
            if type(kind) is core.dtype and not (div_or_mod and kind.is_floating()):
                return self.broadcast_impl_value(lhs, rhs)  # nothing to convert
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return check_unless_alike


def _broadcast(broadcast: Any) -> Any:
    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:  # see _tensors
            return lhs, rhs
        if rhs.type.is_block():
            return broadcast(self, lhs, rhs)
        kind = lhs.type if lhs.dtype is rhs.dtype else lhs.type.with_element_ty(rhs.dtype)
        return lhs, core.tensor(self.builder.create_splat(kind, rhs.handle), kind)

    return broadcast_unless_alike


def _constants(constant: Any) -> Any:
    kept: dict[tuple[int, Any], Any] = {}

    def constant_once(self: Any, value: Any, dtype: Any) -> Any:
        if type(value) is not int or abs(value) > MOST_KEPT or type(dtype) is not core.dtype:
            return constant(self, value, dtype)
        key = value, dtype.name
        if key not in kept:
            kept[key] = constant(self, value, dtype)
            kept[key].handle.data.flags.writeable = False  # others have it too
        return kept[key]

    return constant_once


class _PatchOnce:
    """Prepares `triton.language` for the interpreter at a launch, and not at each call within it again.

    Triton does so at every call of a device function, though the launch has done it, unless that function
    sees another of its modules. What is done holds until the launch restores what was before.
    """

    def __init__(self, patch: Any) -> None:
        self._patch = patch
        self._here = threading.local()  # another thread's launch may end first

    def __call__(self, fn: Any) -> Any:
        done = self._here.__dict__.setdefault("done", set())
        outermost, modules = not done, _language_modules(fn)
        if modules and modules <= done:
            return interpreter._LangPatchScope()  # nothing to restore
        scope = self._patch(fn)
        done |= modules
        if outermost:
            restore = scope.restore

            def restore_and_forget() -> None:
                done.clear()
                restore()

            scope.restore = restore_and_forget
        return scope


def _language_modules(fn: Any) -> set[str]:
    return {value.__name__ for value in fn.__globals__.values() if value is tl or value is core}
