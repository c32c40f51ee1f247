"""The hub: a thread of a group's first rank, through which the ranks of the group exchange messages.

torch's TCPStore is not used for this: its operations can be neither interrupted nor bounded in time,
waiting on it means polling, and it asks the name server about everybody who connects (which takes 5 s
where the answer is lost; torch 2.13). What the hub loses with its process is on the `board`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator

from .board import Address
from .hub_exchanges import Exchanges
from .hub_messages import LENGTH, Message, Reply, pack, unpack

STRANGERS_BYTES = 1024  # the longest message of a connection that has not shown the token
TICK_S = 0.5
SEND_S = 5.0  # a rank that takes nothing in for so long is dropped


class Hub:
    """Serves `Exchanges` to the other ranks on a thread, and to its own rank by `handle`."""

    def __init__(self, size: int, fan_out: int) -> None:
        self.exchanges = Exchanges(size, fan_out)
        self._token = os.urandom(16).hex()
        self._lock = threading.Lock()
        self._is_closed = False
        self._was_away = False
        self._ticked_at = time.monotonic()
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=dual)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="dist_autotune hub", daemon=True).start()

    def address(self, peer: tuple[str, int] | None) -> Address:
        """Return where this hub is, as seen from hosts that know `peer`."""
        return Address(socket.gethostname(), _ip_towards(peer), self._server.getsockname()[1], self._token)

    def handle(self, message: Message, reply: Reply) -> None:
        with self._lock:
            self.exchanges.handle(message, reply)

    def close(self) -> None:
        self._is_closed = True

    def was_away(self) -> bool:
        """Return, once, whether this process has been stopped: peers may have gone on without it."""
        away, self._was_away = self._was_away, False
        return away or time.monotonic() - self._ticked_at > 2 * TICK_S

    def _serve(self) -> None:
        while not self._is_closed:
            events = self._selector.select(timeout=TICK_S)
            now = time.monotonic()
            self._was_away |= now - self._ticked_at > 2 * TICK_S
            self._ticked_at = now
            for key, _ in events:
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection = _Connection(self._server.accept()[0])
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            for message in connection.receive():
                if connection.is_known:
                    self.handle(message, connection.reply)
                else:
                    connection.is_known = hmac.compare_digest(str(message.get("token")), self._token)
        except (OSError, ValueError, KeyError, TypeError):  # closed, or no rank of ours
            self._selector.unregister(connection.socket)
            connection.socket.close()
            with self._lock:
                self.exchanges.forget(connection.reply)


class _Connection:
    """A rank at the other end, as the hub sees it."""

    def __init__(self, socket_: socket.socket) -> None:
        self.socket = socket_
        self.socket.settimeout(SEND_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_known = False
        self.reply: Reply = self._send  # one object, by which requests of this connection are told
        self._buffer = bytearray()

    def receive(self) -> Iterator[Message]:
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionResetError
        self._buffer += data
        if not self.is_known and int.from_bytes(self._buffer[: LENGTH.size]) > STRANGERS_BYTES:
            raise ValueError("no rank of ours")
        return unpack(self._buffer)

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the reading side finds out
            self.socket.sendall(pack(message))


def _ip_towards(peer: tuple[str, int] | None) -> str:
    """Return the address of this host on the way to `peer`; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer or (socket.gethostname(), 9))
        return str(probe.getsockname()[0])
    return ""
