"""Names of kernels, keys and candidates that are the same text on every rank and in every process."""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import inspect
import itertools
import math
import numbers
import re
import sys
import textwrap
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..codec import digest
from ..errors import TuningError
from ..formatting import one_line

_UNKNOWN = object()
# Their functions are no part of a kernel's source: their versions stand in every entry and session.
_LIBRARIES = {"triton", "torch", "numpy", *sys.stdlib_module_names} - {"__main__"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class KernelIdentity:
    """Which kernel it is, for cache, crash guard and agreement alike.

    Made of its source, that of all functions it reaches, captured constants, and heuristics with theirs, but
    not of their modules: a vendored copy, `__main__` and an import are one kernel.
    """

    short_name: str
    digest: str  # of all of it
    texts: tuple[tuple[str, str], ...] = ()  # (name, digest of its own text) of each function
    full_name: str = ""  # of the function, with its module; of a `tunable` empty
    code: str = ""  # digest of the sources alone


def family_of(kernel: str) -> str:
    """Return the part of a kernel's identity that stands for its source and keys."""
    return kernel.partition(".")[0]


_HOOK_TEXTS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_WITH_CAPTURES: weakref.WeakSet[Any] = weakref.WeakSet()  # hooks whose text holds what they capture
_SOURCES: weakref.WeakKeyDictionary[Callable[..., Any], KernelIdentity] = weakref.WeakKeyDictionary()


def kernel_source(function: Callable[..., Any]) -> KernelIdentity:
    """Return the source identity of the Python function under a Triton kernel."""
    if (known := _SOURCES.get(function)) is not None:
        return known
    parts: dict[Any, str] = {}
    constants: list[str] = []
    _collect(function, parts, constants)
    sources = "\n".join(sorted(parts.values()))
    made_of = function.__qualname__ + sources + "\n".join(sorted(constants))
    texts = tuple(sorted((_full_name(part), digest(text)) for part, text in parts.items()))
    source = KernelIdentity(function.__name__, digest(made_of), texts, _full_name(function), digest(sources))
    return _SOURCES.setdefault(function, source)


def kernel_identity(tuner: Any) -> KernelIdentity:
    """Return the identity of the kernel under an Autotuner, `@triton.heuristics` between them included."""
    source, heuristics, layer = kernel_source(tuner.base_fn), [], tuner.fn
    while layer is not tuner.base_fn and layer is not None:
        values = getattr(layer, "values", None)
        if isinstance(values, dict):
            heuristics += [
                (f"{source.short_name}.{name}", hook_text(values[name])) for name in sorted(values)
            ]
        layer = getattr(layer, "fn", None)
    if not heuristics:
        return source
    texts = tuple((name, digest(text)) for name, text in heuristics)
    made_of = "\n".join([source.digest, *(f"{name}={text}" for name, text in texts)])
    return replace(source, digest=digest(made_of), texts=source.texts + texts)


def config_digest(config: Any) -> str:
    """Return the digest by which ranks match configs: of the launch options, and of a `pre_hook`."""
    options = candidate_digest(config.all_kwargs())
    return options if config.pre_hook is None else digest(f"{options}\n{hook_text(config.pre_hook)}")


def tell_apart(configs: Sequence[Any]) -> None:
    """Tell hooks apart by the values that they capture, where configs of one kernel differ in nothing else.

    Otherwise they are left out: a hook may capture its rank, and its config is one candidate on all ranks.
    """
    alike: dict[str, list[Any]] = {}
    for config in configs:
        if config.pre_hook is not None:
            alike.setdefault(config_digest(config), []).append(config.pre_hook)
    for hooks in alike.values():
        if len({id(hook) for hook in hooks}) > 1:
            for hook in hooks:
                with contextlib.suppress(TypeError):  # it cannot be hashed, or held weakly
                    if hook not in _WITH_CAPTURES:
                        _WITH_CAPTURES.add(hook)
                        _HOOK_TEXTS[hook] = _hook_text(hook, captures=True)


def hook_text(hook: Any) -> str:
    """Return a Python callable as text, the same on every rank: name and sources.

    After `tell_apart` the text may also hold defaults and captured values as they were then; of a list or
    an object, the type.
    """
    try:
        if (known := _HOOK_TEXTS.get(hook)) is None:
            known = _HOOK_TEXTS.setdefault(hook, _hook_text(hook))
    except TypeError:  # it cannot be hashed, or held weakly
        return _hook_text(hook)
    return known


def _hook_text(hook: Any, *, captures: bool = False) -> str:
    if isinstance(hook, functools.partial):
        given = (*hook.args, *sorted(hook.keywords.items())) if captures else ()
        return f"partial({_hook_text(hook.func, captures=captures)}, {_stable_text(given)})"
    if isinstance(hook, types.MethodType):
        return f"{hook_text(hook.__func__)} of {type(hook.__self__).__qualname__}"
    if (function := _python_function(hook)) is None:
        call = type(hook).__call__ if callable(hook) else None
        return hook_text(call) if isinstance(call, types.FunctionType) else type(hook).__qualname__
    code, values = function.__code__, ""
    if captures:
        keywords = sorted((function.__kwdefaults__ or {}).items())
        captured = sorted(inspect.getclosurevars(function).nonlocals.items())
        values = _stable_text((*(function.__defaults__ or ()), *keywords, *captured))
    # Two lambdas of one line have one source text.
    body = (code.co_code.hex(), *code.co_names, *code.co_consts) if function.__name__ == "<lambda>" else ()
    return f"{kernel_source(function).code} {values} {_stable_text(body)}"


def _stable_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_stable_text, value))})"
    if isinstance(value, types.FunctionType):
        return kernel_source(value).digest
    is_plain = value is None or isinstance(value, (bool, int, float, str, bytes, enum.Enum))
    is_plain |= type(value).__name__ in ("constexpr", "dtype")
    return value_text(value, strict=False) if is_plain else type(value).__qualname__


def function_digest(function: Callable[..., Any]) -> str:
    return digest(_source(function))


def key_text(key: tuple[Any, ...], owner: str = "a kernel") -> str:
    """Return the tuning key of `owner` as canonical text, equal for keys that compare equal.

    Equal numbers (`True`, `1`, `1.0`, `numpy.int64(1)`) have one text, as they are one key of a dict. Raises
    TuningError for a value whose repr holds an address: it would be a different key on every rank.
    """
    try:
        return ", ".join(map(value_text, key))
    except TuningError as error:
        raise TuningError(f"{owner} cannot have this tuning key: {error}") from None


def candidate_digest(all_kwargs: dict[str, Any]) -> str:
    """Return the digest by which ranks match candidates: of the launch options, in any order."""
    return digest("\n".join(f"{name}={value_text(all_kwargs[name])}" for name in sorted(all_kwargs)))


def value_text(value: Any, *, strict: bool = True) -> str:
    """Return a value as text. strict: raise for one whose repr holds an address; else return its type."""
    text_of = functools.partial(value_text, strict=strict)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, enum.Enum):
        text = f"{type(value).__qualname__}.{value.name or repr(value.value)}"  # some flags have no name
        return text if strict else f"{text}={text_of(value.value)}"
    if isinstance(value, numbers.Number) and not isinstance(value, complex):
        number: Any = value
        is_whole = number == number and abs(number) != math.inf and int(number) == number
        return repr(int(number) if is_whole else float(number))
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, (set, frozenset)):  # their repr differs from process to process
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, dict):
        items = sorted((text_of(name), text_of(item)) for name, item in value.items())
        return f"{{{', '.join(f'{name}: {item}' for name, item in items)}}}"
    if type(value).__name__ == "constexpr":
        return text_of(value.value)
    if functions := _callees(value):
        return "+".join(f"{each.__qualname__}#{kernel_source(each).digest}" for each in functions)
    text = repr(value) if strict or not hasattr(value, "shape") else type(value).__name__
    if not (_ADDRESS.search(text) or hasattr(value, "data_ptr")):
        return text
    if not strict:
        return type(value).__qualname__
    raise TuningError(
        f"a {type(value).__module__}.{type(value).__qualname__} has no text that is the same on every rank "
        f"({one_line(text)[:80]}). Use a number, string, dtype or enum."
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
    is_aggregate = getattr(value, "__triton_aggregate__", False)
    members = value.hash_attrs if is_aggregate else [value]  # as in Triton's own digest
    return [function for function in map(_python_function, members) if function is not None]


def _collect(function: Callable[..., Any], parts: dict[Any, str], constants: list[str]) -> None:
    """Add the sources of `function` and its callees to `parts`, captured values to `constants`."""
    if function in parts:
        return
    name, source = function.__qualname__, _source(function)
    parts[function] = f"{name}\n{source}"
    for reference, value in _references(function, source):
        callees = _callees(value)
        for callee in callees:
            if (callee.__module__ or "").partition(".")[0] not in _LIBRARIES:
                _collect(callee, parts, constants)
        is_plain = isinstance(value, (bool, int, float, str))
        if not callees and (is_plain or type(value).__name__ in ("constexpr", "dtype")):
            constants.append(f"{name}:{reference}={value_text(value, strict=False)}")


def _references(function: Callable[..., Any], source: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and dotted names of globals and closure cells that the source mentions."""
    scope = {**getattr(function, "__globals__", {}), **inspect.getclosurevars(function).nonlocals}
    if function.__name__ == "<lambda>":  # of one in a decorator the source is that of the decorated function
        source = "\n".join(_names(function.__code__))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            value = _resolved(node, scope)
            if value is not _UNKNOWN:
                yield ast.unparse(node), value


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function's code mentions, and names that may be dotted."""
    yield from code.co_freevars
    yield from code.co_names
    yield from map(".".join, itertools.pairwise(code.co_names))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _resolved(node: ast.expr, scope: dict[str, Any]) -> Any:
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
