"""Messages between ranks and their hub: after a token, JSON objects, each after its length in four bytes.

A request carries an `id`, its reply the same. Payloads travel in them as text.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
Reply: TypeAlias = Callable[[Message], None]

TOKEN_BYTES = 32  # what a connection begins with, in either direction
LENGTH = struct.Struct("!I")


def pack(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray) -> Iterator[Message]:
    """Take every whole message out of `buffer`."""
    while len(buffer) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        body = bytes(buffer[LENGTH.size : end])
        del buffer[:end]
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ValueError("a message is an object")
        yield message


def text_of(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def bytes_of(text: str) -> bytes:
    return base64.b64decode(text)
