"""Structs and plain values as strict JSON, by msgspec; floats that JSON lacks become null."""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def to_json(value: object, *, indent: bool = False) -> str:
    """Return `value` as JSON: one line, or indented for people."""
    try:
        content = msgspec.json.encode(value, enc_hook=builtin)
    except UnicodeEncodeError:  # a lone surrogate, as of a file name that is no UTF-8
        content = json.dumps(msgspec.to_builtins(value, enc_hook=builtin), separators=(",", ":")).encode()
    return (msgspec.json.format(content) if indent else content).decode()


class _Versioned(msgspec.Struct):
    schema: int


def parse(content: bytes, kind: type[T], schema: int) -> T:
    """Return JSON from outside as `kind`, unknown fields dropped; a ValueError says why it cannot be."""
    try:
        found = msgspec.json.decode(content, type=_Versioned).schema
        if found != schema:
            raise ValueError(f"schema {found}, expected {schema}")
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError):  # malformed, no text, or nested without end
        raise ValueError("damaged JSON") from None


def builtin(value: object) -> Any:
    """Return a number of numpy's, or of another subclass, as the number that it is."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"{type(value).__name__} has no form in JSON")


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that stand for `text`."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
