"""Messages between ranks and their hub: a length, then JSON. A reply has the `id` of its request."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

HubMessage: TypeAlias = dict[str, Any]
"""JSON-representable, but for `bytes` in it."""
Reply: TypeAlias = Callable[[HubMessage], None]
End: TypeAlias = dict[str, Any]
"""How an exchange ended: "merged", "failed" or "missing", and what belongs to it."""

TOKEN_BYTES = 32  # at the start of a connection, in either direction
LENGTH = struct.Struct("!I")  # before a frame
_BYTES = "bytes"  # {_BYTES: text} stands for the bytes that are `text` in Latin-1


def pack(message: HubMessage) -> bytes:
    """Return the frame of a message."""
    body = json.dumps(message, separators=(",", ":"), default=lambda data: {_BYTES: data.decode("latin-1")})
    return LENGTH.pack(len(body)) + body.encode()


def unpack(buffer: bytearray) -> Iterator[HubMessage]:
    """Take every whole message out of `buffer`."""
    while len(buffer) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        message = json.loads(buffer[LENGTH.size : end], object_hook=_with_bytes)
        del buffer[:end]
        if not isinstance(message, dict):
            raise ValueError("a message is an object")
        yield message


def _with_bytes(found: HubMessage) -> Any:
    return found[_BYTES].encode("latin-1") if _BYTES in found else found
