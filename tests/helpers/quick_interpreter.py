"""Triton's interpreter without work that it does in vain at every step: kernels run in a third of the time.

What kernels compute and what is refused stays the same; only tests use this. Programs that tests start as
processes of their own run the interpreter as it is.
"""

import dataclasses
import functools
import inspect
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
    interpreter._patch_builtin = _BuiltinsOnce()
    options = interpreter.interpreter_builder.options
    if not options.debug:  # then it computes whether integers overflow and does not look at the answer
        without = dataclasses.replace(options, sanitize_overflow=False)
        interpreter.interpreter_builder.options = without
    # Each value that a kernel computes has a type of its own, with texts that nobody reads: it is kept.
    core.block_type.__init__ = _types_of_blocks(core.block_type.__init__)
    core._type_for_tuple_values = _types_of_tuples(core._type_for_tuple_values)
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype)
    core.tensor.__init__ = _tensors(core.tensor.__init__)
    core.dtype.__eq__ = _same_types(core.dtype.__eq__)
    core._unwrap_if_constexpr = _unwrapped(core._unwrap_if_constexpr)
    interpreter.TensorHandle.__init__ = _handles()
    launch = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = functools.partialmethod(_in_a_roomy_frame, launch)
    semantic = interpreter.TritonSemantic
    semantic.binary_op_type_checking_impl = _operands(semantic.binary_op_type_checking_impl)
    semantic.broadcast_impl_value = _broadcast(semantic.broadcast_impl_value)
    semantic.scalar_constant = _constants(semantic.scalar_constant)
    semantic.cast = _cast(semantic.cast)
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
        sides = type.shape if type.is_block() else ()
        found = kept.get(sides)
        if found is None:
            init(self, handle, type)
            assert vars(self).keys() == {"handle", "shape", "numel", "type", "dtype"}
            kept[sides] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = found

    return init_once


def _handles() -> Any:
    check = interpreter.TensorHandle.__post_init__
    most: dict[str, int] = {}  # bytes of an element that `check` has found right

    def init_once(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        name = dtype.name
        if data.itemsize > most.get(name, 0):
            check(self)
            most[name] = data.itemsize

    return init_once


def _same_types(equal: Any) -> Any:
    return lambda self, other: self is other or equal(self, other)


def _unwrapped(unwrap: Any) -> Any:
    plain = {core.tensor, core.dtype, int, float, bool, str, type(None)}

    def unwrap_unless_plain(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    return unwrap_unless_plain


def _cast(cast: Any) -> Any:
    def cast_unless_alike(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, fp_downcast_rounding)

    return cast_unless_alike


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
        if type(lhs) is core.tensor:
            kind = lhs.dtype
            takes_int32 = kind is tl.int32 or (allow_lhs_ptr and type(kind) is core.pointer_type)
            if type(rhs) is int and takes_int32 and -(2**31) <= rhs < 2**31:
                rhs = self.scalar_constant(rhs, tl.int32)
                return self.broadcast_impl_value(lhs, rhs)
            if type(rhs) is core.tensor:
                alike = rhs.dtype is kind and type(kind) is core.dtype
                if (takes_int32 and rhs.dtype is tl.int32) or (
                    alike and not (div_or_mod and kind.is_floating())
                ):
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


class _BuiltinsOnce:
    """Finds the built-in functions of a module or class once, and calls them unchecked."""

    def __init__(self) -> None:
        self._kept: dict[Any, list[tuple[str, Any]]] = {}

    def __call__(self, package: Any, builder: Any, scope: Any) -> None:
        if package not in self._kept:
            members = inspect.getmembers(package)
            self._kept[package] = [(name, each) for name, each in members if core.is_builtin(each)]
        semantic = interpreter.TritonSemantic(builder)
        for name, member in self._kept[package]:
            if getattr(package, name) is member:  # else another launch has replaced it
                scope.set_attr(package, name, _with_semantic(member, semantic))


_CHECKING = core.builtin(lambda _semantic: None).__code__  # it asks whether `_semantic` is there


def _with_semantic(builtin: Any, semantic: Any) -> Any:
    member = builtin.__wrapped__ if getattr(builtin, "__code__", None) is _CHECKING else builtin

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    return call


_modules_of: dict[Any, set[str]] = {}


def _language_modules(fn: Any) -> set[str]:
    if fn not in _modules_of:
        found = {value.__name__ for value in fn.__globals__.values() if value is tl or value is core}
        if not found:
            return found  # yet
        _modules_of[fn] = found
    return _modules_of[fn]
