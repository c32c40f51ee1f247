"""Frozen dataclasses to strict JSON and back. Infinity and NaN, which it lacks, become strings."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")
Reader = Callable[[Any], Any]

_MAX_DEPTH = 64  # of nested lists and objects, which are walked recursively
_compact = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode
_indented = json.JSONEncoder(allow_nan=False, check_circular=False, indent=2).encode


def to_json(value: object, *, indent: bool = False) -> str:
    """Return `value` as strict JSON: one line, or indented for people."""
    encode = _indented if indent else _compact
    try:
        return encode(value)
    except ValueError:  # a float that JSON does not know
        return encode(_mapped(value, _finite))


def parse_json(content: bytes) -> object:
    """Return what JSON from outside says; a ValueError in a few words where it cannot be used."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):  # malformed, bytes that are no text, nesting without end
        raise ValueError("damaged JSON") from None
    if content.count(b"[") + content.count(b"{") > _MAX_DEPTH and _is_deeper(data, _MAX_DEPTH):
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    return data


def escaped(value: object) -> object:
    """Return parsed JSON with escapes for lone surrogates, which no file and no terminal takes."""
    return _mapped(value, _escaped)


def from_json(kind: type[D], data: object) -> D:
    """Return parsed JSON as a dataclass, unknown fields dropped; a bad or missing one is a ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, found {type(data).__name__}")
    values = {}
    for name, read in _readers(kind).items():
        if name in data:
            try:
                values[name] = read(data[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    try:
        return kind(**values)
    except TypeError as error:  # "missing 2 required keyword-only arguments: ..."
        raise ValueError(str(error).partition(" ")[2]) from error


@functools.cache
def _readers(kind: type[DataclassInstance]) -> dict[str, Reader]:
    hints = typing.get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}


def _reader(hint: Any) -> Reader:
    """Return the function that checks and converts a JSON value to the type `hint`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint is float:
        return _read_float
    if dataclasses.is_dataclass(hint):
        return functools.partial(from_json, cast("type[DataclassInstance]", hint))
    readers = [_reader(item) for item in arguments if item not in (..., types.NoneType)]
    if origin in (types.UnionType, typing.Union):  # with None
        return lambda value: None if value is None else readers[0](value)
    if origin in (dict, Mapping):
        return lambda value: {name: readers[1](item) for name, item in _exactly(dict, value).items()}
    if origin is tuple and ... in arguments:
        return lambda value: tuple(map(readers[0], _exactly(list, value)))
    if origin is tuple:
        return lambda value: _read_fields(readers, _exactly(list, value))
    return functools.partial(_exactly, hint)


def _exactly(kind: type[T], value: object) -> T:
    if isinstance(value, kind) and type(value) is kind:  # isinstance alone would take True for an int
        return value
    raise ValueError(f"expected {kind.__name__}, found {value!r}")


def _read_float(value: Any) -> float:
    if type(value) in (int, float) or value in ("inf", "-inf", "nan"):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("expected a number, found one too large") from None
    raise ValueError(f"expected a number, found {value!r}")


def _read_fields(readers: list[Reader], items: list[Any]) -> tuple[Any, ...]:
    if len(items) != len(readers):
        raise ValueError(f"expected {len(readers)} items, found {items!r}")
    return tuple(read(item) for read, item in zip(readers, items, strict=True))


def _is_deeper(value: object, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_is_deeper(item, depth - 1) for item in items)


def _mapped(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return JSON data with `replace` of every name and value that holds no others."""
    if isinstance(value, dict):
        return {replace(name): _mapped(item, replace) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, replace) for item in value]
    return replace(value)


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that stand for `text`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
