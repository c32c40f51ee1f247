"""Messages between ranks and their hub: after a token, frames of a JSON header and bytes.

A request carries an `id`, its reply the same. Payloads travel as the bytes that they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""JSON-representable, but for `bytes` in it."""
Reply: TypeAlias = Callable[[Message], None]

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
        body = bytes(buffer[LENGTH.size : end])
        del buffer[:end]
        yield _message(list(_parts_of(body)))


def _message(frame: list[bytes]) -> Message:
    header, *parts = frame
    message = json.loads(header, object_hook=lambda found: parts[found[_PART]] if _PART in found else found)
    if not isinstance(message, dict):
        raise ValueError("a message is an object")
    return message


def _parts_of(body: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(body):
        (size,) = LENGTH.unpack_from(body, place)
        place += LENGTH.size + size
        if place > len(body):
            raise ValueError("a part is longer than its frame")
        yield body[place - size : place]
