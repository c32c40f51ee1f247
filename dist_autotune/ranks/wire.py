"""Messages between ranks and their hub: a length, then msgpack. A reply has the `id` of its request."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from msgspec import msgpack

HubMessage: TypeAlias = dict[str, Any]
Reply: TypeAlias = Callable[[HubMessage], None]
End: TypeAlias = dict[str, Any]
"""The end of an exchange: the key "merged", "failed" or "missing", with its details."""

TOKEN_BYTES = 32  # at the start of a connection, in either direction
LENGTH = struct.Struct("!I")  # before a frame
_read = msgpack.Decoder(HubMessage).decode


def pack(message: HubMessage) -> bytes:
    """Return the frame of a message."""
    body = msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray) -> Iterator[HubMessage]:
    """Take every whole message out of `buffer`."""
    while len(buffer) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        message = _read(buffer[LENGTH.size : end])
        del buffer[:end]
        yield message
