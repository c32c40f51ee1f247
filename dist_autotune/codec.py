"""Frozen dataclasses to strict JSON and back.

JSON has no infinity and no NaN, and a tuner has both: `inf` means "failed here". They are written as
the strings "inf", "-inf" and "nan"; a field declared as `float` reads them back as numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")
Reader = Callable[[object], object]

_MAX_DEPTH = 64  # of nested lists and objects: what walks them is recursive
_compact = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode
_indented = json.JSONEncoder(allow_nan=False, check_circular=False, indent=2).encode


def to_json(value: object, *, indent: bool = False) -> str:
    """Return `value` as strict JSON: one line, or indented for people."""
    encode = _indented if indent else _compact
    try:
        return encode(value)
    except ValueError:  # a float that JSON does not know; rare, so only then is the value walked
        return encode(_finite(value))


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
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escaped(name): escaped(item) for name, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return value


def from_json(kind: type[D], data: object) -> D:
    """Return parsed JSON as a `kind`, a dataclass.

    A field that `kind` does not have is dropped: a newer version may have added it. A field that is
    missing or has the wrong type is a ValueError that names it.
    """
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, found {type(data).__name__}")
    values = {}
    for name, read in _field_readers(kind).items():
        if name in data:
            try:
                values[name] = read(data[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    try:
        return kind(**values)
    except TypeError as error:  # "missing 2 required keyword-only arguments: ..."
        raise ValueError(str(error).partition(" ")[2]) from error


def _is_deeper(value: object, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return depth == 0 or any(
        _is_deeper(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value)
    )


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@functools.cache
def _field_readers(kind: type[DataclassInstance]) -> dict[str, Reader]:
    hints = typing.get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}


def _reader(hint: object) -> Reader:
    """Return the function that checks and converts a JSON value to the type `hint`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is float:
        return _read_float
    if hint is typing.Any:
        return _read_anything
    if hint is str or hint is int or hint is bool:
        return functools.partial(_read_exactly, hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return functools.partial(from_json, hint)
    if origin is tuple and arguments[1:] == (...,):
        return functools.partial(_read_tuple, _reader(arguments[0]))
    if origin is tuple:
        return functools.partial(_read_fields, tuple(map(_reader, arguments)))
    if origin in (dict, Mapping) and arguments[0] is str:
        return functools.partial(_read_dict, _reader(arguments[1]))
    if origin in (types.UnionType, typing.Union) and len(arguments) == 2 and arguments[1] is types.NoneType:
        return functools.partial(_read_optional, _reader(arguments[0]))
    raise TypeError(f"serialize: no reader for a field of type {hint}")


def _read_float(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or value in ("inf", "-inf", "nan"):
        return float(typing.cast("float | str", value))
    raise ValueError(f"expected a number, found {value!r}")


def _read_anything(value: object) -> object:
    return value


def _read_exactly(kind: type[T], value: object) -> T:
    if isinstance(value, kind) and type(value) is kind:  # isinstance alone would take True for an int
        return value
    raise ValueError(f"expected {kind.__name__}, found {value!r}")


def _read_tuple(read: Reader, value: object) -> tuple[object, ...]:
    return tuple(read(item) for item in _read_exactly(list, value))


def _read_fields(readers: tuple[Reader, ...], value: object) -> tuple[object, ...]:
    items = _read_exactly(list, value)
    if len(items) != len(readers):
        raise ValueError(f"expected {len(readers)} items, found {value!r}")
    return tuple(read(item) for read, item in zip(readers, items, strict=True))


def _read_dict(read: Reader, value: object) -> dict[str, object]:
    return {name: read(item) for name, item in _read_exactly(dict, value).items()}


def _read_optional(read: Reader, value: object) -> object:
    return None if value is None else read(value)


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that stand for `text`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
