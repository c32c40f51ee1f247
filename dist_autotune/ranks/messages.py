"""Messages between ranks and their hub: frames of a JSON header and the `bytes` that it refers to.

A request carries an `id`, its reply the same.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""JSON-representable, but for `bytes` in it."""
Reply: TypeAlias = Callable[[Message], None]
End: TypeAlias = dict[str, Any]
"""How an exchange ended: "merged", "failed" or "missing", and what belongs to it."""

TOKEN_BYTES = 32  # what a connection begins with, in either direction
LENGTH = struct.Struct("!I")  # before a frame, and before each part of it
_PART = "bytes"  # {_PART: n} stands for the n-th part behind the header


def pack(message: Message) -> bytes:
    """Return the frame of a message."""
    parts: list[bytes] = []

    def refer(part: bytes) -> dict[str, int]:
        parts.append(part)
        return {_PART: len(parts) - 1}

    header = json.dumps(message, separators=(",", ":"), default=refer).encode()
    body = b"".join(LENGTH.pack(len(part)) + part for part in (header, *parts))
    return LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray) -> Iterator[Message]:
    """Take every whole message out of `buffer`."""
    while len(buffer) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        header, *parts = _parts_of(bytes(buffer[LENGTH.size : end]))
        del buffer[:end]
        message = json.loads(header, object_hook=functools.partial(_resolve, parts))
        if not isinstance(message, dict):
            raise ValueError("a message is an object")
        yield message


def _resolve(parts: list[bytes], found: Message) -> Any:
    return parts[found[_PART]] if _PART in found else found


def _parts_of(body: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(body):
        (size,) = LENGTH.unpack_from(body, place)
        place += LENGTH.size + size
        if place > len(body):
            raise ValueError("a part is longer than its frame")
        yield body[place - size : place]
