"""Structs to strict JSON and back. Infinity and NaN, which it lacks, become strings."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_MAX_DEPTH = 64  # of nested lists and objects, which are walked recursively
_compact = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode
_indented = json.JSONEncoder(allow_nan=False, check_circular=False, indent=2).encode


def to_json(value: object, *, indent: bool = False) -> str:
    """Return `value` as strict JSON: one line, or indented for people."""
    encode, data = _indented if indent else _compact, to_builtins(value)
    try:
        return encode(data)
    except ValueError:  # a float that JSON does not know
        return encode(_mapped(data, _finite))


def to_builtins(value: object) -> Any:
    """Return structs as dicts, lists and the other types that JSON has."""
    return msgspec.to_builtins(value, enc_hook=_builtin)


def parse_json(content: bytes, schema: int) -> dict[str, Any]:
    """Return a JSON object from outside, of a schema version; a ValueError says briefly why there is none."""
    if not content.strip():
        raise ValueError("empty file")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):  # malformed, bytes that are no text, nesting without end
        raise ValueError("damaged JSON") from None
    if content.count(b"[") + content.count(b"{") > _MAX_DEPTH and _is_deeper(data, _MAX_DEPTH):
        raise ValueError(f"damaged JSON: nested deeper than {_MAX_DEPTH}")
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError("no schema version")
    if data["schema"] != schema:
        raise ValueError(f"schema {data['schema']}, expected {schema}")
    return data


def escaped(value: object) -> Any:
    """Return parsed JSON with escapes for lone surrogates, which no file and no terminal takes."""
    return _mapped(value, _escaped)


def from_json(kind: type[T], data: object) -> T:
    """Return parsed JSON as `kind`, unknown fields dropped; a bad or missing one is a ValueError."""
    return msgspec.convert(data, kind, strict=False)  # not strict: "inf" is a float


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


def _builtin(value: object) -> object:
    """Return a number of numpy's, or of another subclass, as the number that it is."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"{type(value).__name__} has no form in JSON")


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(value: Any) -> Any:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that stand for `text`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
