"""A rank's line to the hub of its group: a socket, or on the hub's own rank a call."""

from __future__ import annotations

import functools
import itertools
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from .hub import SEND_S, Hub
from .messages import TOKEN_BYTES, Message, pack, unpack

_LEAST_S = 1e-3  # for a reply that is there already
# A wait is made of slices: a Ctrl-C that comes between Python's last look at signals and the system call that
# waits does not interrupt that call, and would go unnoticed until its end.
_SLICE_S = 0.5


class HubLost(Exception):
    """The hub has gone, and will not come back."""


class HungUp(HubLost):
    """The hub has closed a connection that stood: it may take another one."""


class HubSilent(Exception):
    """The hub's process is stopped, or busy beyond measure: it may come back."""


class Client(Protocol):
    """Requests and their replies; used by one thread.

    patience_s: how long the hub may take to take a message in.
    """

    patience_s: float

    def send(self, op: str, sequence: int, **fields: Any) -> int:
        """Send a request and return its number."""

    def receive(self, request: int, timeout_s: float) -> Message | None:
        """Return the reply to a request, or None if there is none in time. Ctrl-C interrupts it."""

    def tell(self, op: str, sequence: int) -> None:
        """Send a message that has no reply."""

    def close(self) -> None:
        """Forget all replies under way."""


class LocalClient:
    """The line of the rank that runs the hub."""

    def __init__(self, hub: Hub, position: int) -> None:
        self.patience_s = SEND_S
        self._hub = hub
        self._position = position
        self._numbers = itertools.count()
        self._replies: dict[int, Message] = {}
        self._arrived = threading.Condition()

    def send(self, op: str, sequence: int, **fields: Any) -> int:
        request = next(self._numbers)
        self._handle({"op": op, "id": request, "sequence": sequence, **fields})
        return request

    def receive(self, request: int, timeout_s: float) -> Message | None:
        until = time.monotonic() + timeout_s
        with self._arrived:
            while request not in self._replies and (left_s := until - time.monotonic()) > 0:
                self._arrived.wait(min(left_s, _SLICE_S))
            return self._replies.pop(request, None)

    def tell(self, op: str, sequence: int) -> None:
        self._handle({"op": op, "sequence": sequence})

    def close(self) -> None:
        self._replies.clear()

    def _handle(self, message: Message) -> None:
        reply = functools.partial(self._hub.hand_over, self._reply)
        self._hub.handle({**message, "position": self._position}, reply)

    def _reply(self, message: Message) -> None:
        with self._arrived:
            self._replies[int(message["id"])] = message
            self._arrived.notify_all()


class SocketClient:
    """The line of any other rank, by one of several ways to the hub.

    An interrupted reply leaves it closed; the next request connects anew.
    """

    def __init__(self, ways: Sequence[tuple[str, int]], token: str, position: int) -> None:
        self.patience_s = SEND_S
        self._ways = ways
        self._token, self._answer = token[:TOKEN_BYTES].encode(), token[TOKEN_BYTES:].encode()
        self._position = position
        self._numbers = itertools.count()
        self._replies: dict[int, Message] = {}
        self._buffer = bytearray()
        self._is_answered = False  # the hub has shown that it is ours
        self._socket: socket.socket | None = None

    def send(self, op: str, sequence: int, **fields: Any) -> int:
        request = next(self._numbers)
        self._send({"op": op, "id": request, "sequence": sequence, **fields})
        return request

    def tell(self, op: str, sequence: int) -> None:
        self._send({"op": op, "sequence": sequence})

    def receive(self, request: int, timeout_s: float) -> Message | None:
        until = time.monotonic() + max(timeout_s, _LEAST_S)
        while request not in self._replies:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None
            try:
                self._read(min(left_s, _SLICE_S))
            except TimeoutError:
                continue
            except BaseException as error:
                self.close()  # a part of a message may be lost
                if isinstance(error, OSError):
                    raise HungUp(str(error)) from None
                raise
        return self._replies.pop(request)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._is_answered = False
        self._buffer.clear()
        self._replies.clear()

    def _read(self, timeout_s: float) -> None:
        if self._socket is None:
            raise ConnectionResetError("the connection to the hub is closed")
        self._socket.settimeout(timeout_s)
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionResetError("the hub has closed the connection")
        self._buffer += data
        if not self._is_answered:
            if len(self._buffer) < TOKEN_BYTES:
                return
            if self._buffer[:TOKEN_BYTES] != self._answer:
                raise ConnectionResetError("another program answers in place of the hub")
            del self._buffer[:TOKEN_BYTES]
            self._is_answered = True
        for message in unpack(self._buffer):
            self._replies[int(message["id"])] = message

    def _send(self, message: Message) -> None:
        data = pack({**message, "position": self._position})
        stands = self._socket is not None
        try:
            if self._socket is None:
                self._socket = self._connected()
                stands, data = True, self._token + data
            self._socket.settimeout(self.patience_s)
            self._socket.sendall(data)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise HubSilent from None
            if isinstance(error, OSError):
                raise (HungUp if stands else HubLost)(str(error)) from None
            raise

    def _connected(self) -> socket.socket:
        for way in self._ways:
            try:
                connection = socket.create_connection(way, timeout=self.patience_s)
            except OSError as error:
                reason = error
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        raise reason
