"""Names of kernels, keys and candidates that are the same text on every rank and in every process."""

from __future__ import annotations

import ast
import enum
import inspect
import numbers
import re
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..codec import digest
from ..errors import TuningError

_UNKNOWN = object()
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class KernelSource:
    """One kernel function: where it stands and what it is made of.

    `text_digest` covers the source of the function and of every `@jit` function it reaches;
    `digest` adds the constants they capture. Two ranks with equal `name` and different
    `text_digest` run different versions of the code.
    """

    name: str  # module and qualified name
    short_name: str
    text_digest: str
    digest: str
    texts: tuple[tuple[str, str], ...] = ()  # (name, digest of its own text) of each function it is made of


_SOURCES: weakref.WeakKeyDictionary[Callable[..., Any], KernelSource] = weakref.WeakKeyDictionary()


def kernel_source(function: Callable[..., Any]) -> KernelSource:
    """Return the source identity of the Python function under a Triton kernel."""
    known = _SOURCES.get(function)
    if known is not None:
        return known
    parts: dict[Any, _Part] = {}
    _collect(function, parts)
    text = "\n".join(sorted(part.text for part in parts.values()))
    captured = "\n".join(sorted(constant for part in parts.values() for constant in part.constants))
    name = _full_name(function)
    texts = tuple(sorted((part.name, digest(part.text)) for part in parts.values()))
    source = KernelSource(name, function.__name__, digest(name + text), digest(name + text + captured), texts)
    return _SOURCES.setdefault(function, source)


def function_digest(function: Callable[..., Any]) -> str:
    """Return the digest of a Python function's own source text."""
    return digest(_source(function))


def key_text(key: tuple[Any, ...]) -> str:
    """Return the tuning key as canonical text, equal for keys that compare equal.

    Numbers that are equal (`True`, `1`, `1.0`, `numpy.int64(1)`) have one text, as they are one
    key of a dict. Raises TuningError for a value without a text of its own (one whose repr holds
    an address): it would silently be a different key on every rank.
    """
    return ", ".join(_value_text(value) for value in key)


def candidate_digest(all_kwargs: dict[str, Any]) -> str:
    """Return the digest by which ranks match candidates: of the launch options, in any order."""
    return digest("\n".join(f"{name}={_value_text(all_kwargs[name])}" for name in sorted(all_kwargs)))


def constants_text(function: Callable[..., Any], arguments: dict[str, Any], left_out: set[str]) -> str:
    """Return the constexpr arguments of a launch that are not among `left_out`, as text."""
    names = sorted(constexpr_names(function) & arguments.keys() - left_out)
    return ", ".join(f"{name}={_value_text(arguments[name], strict=False)}" for name in names)


_CONSTEXPR_NAMES: weakref.WeakKeyDictionary[Callable[..., Any], frozenset[str]] = weakref.WeakKeyDictionary()


def constexpr_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters that are annotated as constexpr."""
    known = _CONSTEXPR_NAMES.get(function)
    if known is not None:
        return known
    parameters = inspect.signature(function).parameters.values()
    names = frozenset(p.name for p in parameters if "constexpr" in str(p.annotation))
    return _CONSTEXPR_NAMES.setdefault(function, names)


def _value_text(value: Any, *, strict: bool = True) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, numbers.Number):
        return _number_text(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_value_text(item, strict=strict) for item in value)})"
    if isinstance(value, (set, frozenset)):  # their repr differs from process to process
        return f"{{{', '.join(sorted(_value_text(item, strict=strict) for item in value))}}}"
    if isinstance(value, dict):
        items = sorted(
            (_value_text(k, strict=strict), _value_text(v, strict=strict)) for k, v in value.items()
        )
        return f"{{{', '.join(f'{k}: {v}' for k, v in items)}}}"
    inner = getattr(value, "value", None)
    if type(value).__name__ == "constexpr":
        return _value_text(inner, strict=strict)
    functions = _callees(value)
    if functions:
        return "+".join(f"{_full_name(function)}#{kernel_source(function).digest}" for function in functions)
    text = repr(value) if strict or not hasattr(value, "shape") else type(value).__name__
    if _ADDRESS.search(text) or hasattr(value, "data_ptr"):
        if not strict:
            return type(value).__qualname__
        raise TuningError(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be part of a tuning key: it has "
            f"no text that is the same on every rank ({text[:80]}). Use a number, string, dtype or enum."
        )
    return text


def _number_text(value: Any) -> str:
    if isinstance(value, complex):
        return repr(value)
    return (
        repr(int(value))
        if value == value and value not in (float("inf"), -float("inf")) and int(value) == value
        else repr(float(value))
    )


def _full_name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _python_function(value: Any) -> types.FunctionType | None:
    """Return the Python function under a Triton callable (jit, heuristics, autotune), or of itself."""
    for _ in range(8):
        if isinstance(value, types.FunctionType):
            return value
        if not hasattr(value, "fn"):
            return None
        value = value.fn
    return None


def _callees(value: Any) -> list[types.FunctionType]:
    """Return the functions that a kernel may call through `value`: of an aggregate, its methods."""
    if getattr(value, "__triton_aggregate__", False):
        found = [_python_function(member) for member in value.hash_attrs]  # what Triton's own digest covers
    else:
        found = [_python_function(value)]
    return [function for function in found if function is not None]


@dataclass
class _Part:
    """One function that a kernel is made of."""

    name: str
    text: str
    constants: list[str] = field(default_factory=list)  # it captures


def _collect(function: Callable[..., Any], parts: dict[Any, _Part]) -> None:
    """Walk `function` and what it refers to: sources of callees, values of captured constants."""
    if function in parts:
        return
    name, source = _full_name(function), _source(function)
    part = parts[function] = _Part(name, f"{name}\n{source}")
    for reference, value in _references(function, source):
        callees = _callees(value)
        for callee in callees:
            # Triton's own are covered by its version, which every entry and every session carries.
            if (callee.__module__ or "").partition(".")[0] != "triton":
                _collect(callee, parts)
        is_plain = isinstance(value, (bool, int, float, str))
        if not callees and (is_plain or type(value).__name__ in ("constexpr", "dtype")):
            part.constants.append(f"{name}:{reference}={_value_text(value, strict=False)}")


def _references(function: Callable[..., Any], source: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and dotted names of globals and closure cells that the source mentions."""
    scope = {**getattr(function, "__globals__", {}), **inspect.getclosurevars(function).nonlocals}
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            value = _resolved(node, scope)
            if value is not _UNKNOWN:
                yield ast.unparse(node), value


def _resolved(node: ast.expr, scope: dict[str, Any]) -> Any:
    """Return what a name, or a name in modules, stands for."""
    if isinstance(node, ast.Name):
        return scope.get(node.id, _UNKNOWN)
    if isinstance(node, ast.Attribute):
        owner = _resolved(node.value, scope)
        if isinstance(owner, types.ModuleType):
            return getattr(owner, node.attr, _UNKNOWN)
    return _UNKNOWN


def _source(function: Callable[..., Any]) -> str:
    """Return the function's text without its decorators, as `@autotune` configs are no part of it."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return repr(getattr(getattr(function, "__code__", None), "co_code", b""))
    start = re.search(r"^\s*def\s+\w+\s*\(", text, re.MULTILINE)
    return text[start.start() :].strip() + "\n" if start else text
