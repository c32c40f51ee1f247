"""A rank's connection to the hub of its group."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator
from typing import Any

from .hub import SEND_S
from .wire import TOKEN_BYTES, HubMessage, pack, unpack

LOOK = -1  # the number of requests that only ask for a sign of life
_LEAST_S = 1e-3  # for a reply that is there already
# A wait is made of slices: a Ctrl-C that comes between Python's last look at signals and the system call that
# waits does not interrupt that call, and would go unnoticed until its end.
_SLICE_S = 0.5


class HubLost(Exception):
    """The hub has closed the connection: it may take another one, unless it has gone."""


class HubSilent(Exception):
    """The hub's process is stopped, or busy beyond measure: it may come back."""


class Client:
    """Sends one thread's requests to the hub; connects anew after an error or a Ctrl-C."""

    def __init__(self, endpoint: tuple[str, int], token: str, rank: int) -> None:
        self.send_s = SEND_S  # how long the hub may take to take a message in
        self.heard_at = 0.0  # when the hub last sent anything
        self._endpoint, self._rank = endpoint, rank
        self._token, self._answer = token[:TOKEN_BYTES].encode(), token[TOKEN_BYTES:].encode()
        self._numbers = itertools.count()
        self._replies: dict[int, HubMessage] = {}
        self._buffer = bytearray()
        self._is_answered = False  # the hub has shown that it is ours
        self._socket: socket.socket | None = None

    def send(self, op: str, sequence: int, **fields: Any) -> int:
        """Send a request and return its number."""
        request = next(self._numbers)
        self.notify(op, sequence, id=request, **fields)
        return request

    def notify(self, op: str, sequence: int, **fields: Any) -> None:
        """Send a message that has no reply."""
        data = pack({"op": op, "sequence": sequence, "rank": self._rank, **fields})
        with self._closed_by_errors():
            if self._socket is None:
                self._socket = socket.create_connection(self._endpoint, timeout=self.send_s)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                data = self._token + data
            self._socket.settimeout(self.send_s)
            self._socket.sendall(data)

    def receive(self, request: int, timeout_s: float) -> HubMessage | None:
        """Return the reply to a request, or None if there is none in time. Ctrl-C interrupts it."""
        until = time.monotonic() + max(timeout_s, _LEAST_S)
        while request not in self._replies:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None
            with self._closed_by_errors(), contextlib.suppress(TimeoutError):
                self._read(min(left_s, _SLICE_S))
        return self._replies.pop(request)

    def close(self) -> None:
        """Drop all replies under way."""
        self._replies.clear()
        if self._socket is not None:
            self._socket.close()
        self._socket, self._is_answered = None, False
        self._buffer.clear()

    @contextlib.contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.close()  # a part of a message may be lost
            if isinstance(error, TimeoutError):
                raise HubSilent from None
            if isinstance(error, OSError):
                raise HubLost(str(error)) from None
            raise

    def _read(self, timeout_s: float) -> None:
        if self._socket is None:
            raise ConnectionResetError("the connection to the hub is closed")
        self._socket.settimeout(timeout_s)
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionResetError("the hub has closed the connection")
        self._buffer += data
        self.heard_at = time.monotonic()
        if not self._is_answered:
            if len(self._buffer) < TOKEN_BYTES:
                return
            if self._buffer[:TOKEN_BYTES] != self._answer:
                raise ConnectionResetError("another program answers in place of the hub")
            del self._buffer[:TOKEN_BYTES]
            self._is_answered = True
        self._replies.update({int(message["id"]): message for message in unpack(self._buffer)})
