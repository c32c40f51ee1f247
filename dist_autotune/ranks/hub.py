"""The hub: a thread of a group's first rank, through which the ranks of the group exchange messages.

torch's TCPStore is not used for this: its operations can be neither interrupted nor bounded in time,
waiting on it means polling, and it asks the name server about everybody who connects (which takes 5 s
where the answer is lost; torch 2.13).

It listens on the loopback device, and on the interface towards another host once a rank there asks for it.
Whoever connects shows a token of fixed size before anything is parsed, and is shown one in return.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator

from .address import Address, interface_towards, this_host
from .hub_state import HubState
from .messages import TOKEN_BYTES, Message, Reply, pack, unpack

TICK_S = 0.5
SEND_S = 5.0  # a rank that takes nothing in for so long is shut out; it may connect anew
STRANGERS = 256  # connections at once that have not shown the token; the oldest makes room for the next
STRANGERS_S = 10.0  # how long one may take to show it
QUEUE = 1024  # connections that wait to be accepted
_FULL_S = 0.05  # a pause when there is no room for another connection
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger("dist_autotune")


class Hub:
    """Serves a `HubState` to the other ranks on a thread, and to its own rank by `handle`."""

    def __init__(self, size: int) -> None:
        self.state = HubState(size)
        self._size = size
        self._token, self._answer = (os.urandom(TOKEN_BYTES // 2).hex() for _ in range(2))
        self._lock = threading.Lock()  # of the state, and of what is sent
        self._positions: set[int] = set()  # that have sent something
        self._backlogged: set[_Connection] = set()  # that have not taken in all that was sent to them
        self._held: list[Callable[[], None]] = []  # replies to this rank
        self._is_closed = False
        self._was_away = False
        self._ticked_at = time.monotonic()
        # The thread's own, but for `_new_listeners`.
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[_Connection, float] = {}  # when they came; the oldest first
        self._listeners: dict[str, socket.socket] = {}  # by interface
        self._new_listeners: list[socket.socket] = []
        self._outside: tuple[tuple[str, int], ...] = ()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._port = self._listen("loopback", "127.0.0.1")
        threading.Thread(target=self._serve, name="dist_autotune hub", daemon=True).start()

    @property
    def has_met_all(self) -> bool:
        """Return whether every rank of the group has found the way here."""
        return len(self._positions) == self._size

    def address(self) -> Address:
        return Address(this_host(), self._port, self._outside, self._token + self._answer)

    def open_towards(self, host: str) -> None:
        """Listen on the interface towards another host too; on all of them if that is not known."""
        interface = interface_towards(host)
        if interface not in self._listeners:
            port = self._listen(interface, interface)
            self._outside = (*self._outside, (interface or socket.gethostname(), port))

    def handle(self, message: Message, reply: Reply) -> None:
        with self._lock:
            self._positions.add(int(message["position"]))
            self.state.handle(message, reply)
            self._release()

    def reply_locally(self, reply: Reply, message: Message) -> None:
        """Reply to this rank, from within `handle`: with a result last, as it may then end its process."""
        if "merged" in (message.get("end") or {}):
            self._held.append(functools.partial(reply, message))
        else:
            reply(message)

    def close(self) -> None:
        """End the thread. Takes no lock: it may be called by the garbage collector, on any thread."""
        self._is_closed = True
        self._wake_up()

    def was_away(self) -> bool:
        """Return, once, whether this process has been stopped: peers may have gone on without it."""
        away, self._was_away = self._was_away, False
        return away or time.monotonic() - self._ticked_at > 2 * TICK_S

    def _listen(self, name: str, interface: str) -> int:
        """Listen on an interface, on all if it is "", and return the port."""
        every = not interface and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if every or ":" in interface else socket.AF_INET
        listener = socket.create_server((interface, 0), family=family, backlog=QUEUE, dualstack_ipv6=every)
        listener.setblocking(False)
        self._listeners[name] = listener
        self._new_listeners.append(listener)
        self._wake_up()
        return int(listener.getsockname()[1])

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is about to wake up anyway, or has ended
            self._waker.send(b"!")

    def _release(self) -> None:
        """Reply to this rank, if all others have what was sent to them."""
        if self._held and not self._backlogged:
            held, self._held = self._held, []
            for reply in held:
                reply()

    # -- the thread ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                self._turn()
            except Exception:  # nothing that comes in may end it while ranks live
                logger.warning("The hub of this group goes on after an error.", exc_info=True)
                time.sleep(TICK_S)  # if the error comes again at once
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
        for left in (*self._new_listeners, self._waker):
            left.close()
        self._selector.close()

    def _turn(self) -> None:
        """Wait for what comes next, and see to it."""
        events = self._selector.select(timeout=TICK_S)
        now = time.monotonic()
        self._was_away |= now - self._ticked_at > 2 * TICK_S
        self._ticked_at = now
        ready = []
        for key, mask in events:
            if key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(1 << 12)
            elif isinstance(key.data, _Connection):
                self._serve_connection(key.data, mask)
            else:
                ready.append(key.fileobj)
        for listener in ready:  # last: who has come shows its token before another takes its place
            self._accept(listener)  # type: ignore[arg-type]  # a socket
        while self._new_listeners:
            self._selector.register(self._new_listeners.pop(), selectors.EVENT_READ)
        self._check_backlogs(now)
        for stranger in [each for each, came_at in self._strangers.items() if now - came_at > STRANGERS_S]:
            self._drop(stranger)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection = _Connection(listener.accept()[0], self._add_backlogged)
        except OSError as error:  # it has gone again, or there is no room
            if error.errno in _NO_ROOM:
                for stranger in list(self._strangers):
                    self._drop(stranger)
                time.sleep(_FULL_S)  # the listener stays ready: without a pause this would be a loop
            return
        if len(self._strangers) >= STRANGERS:
            self._drop(next(iter(self._strangers)))
        self._strangers[connection] = time.monotonic()
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._serve_connection(connection, selectors.EVENT_READ)  # its token is mostly there

    def _serve_connection(self, connection: _Connection, mask: int) -> None:
        """Take in what a connection has sent, and send what it takes in; drop it whatever goes wrong."""
        try:
            if mask & selectors.EVENT_WRITE:
                with self._lock:
                    connection.flush()
            if not mask & selectors.EVENT_READ:
                return
            if connection in self._strangers:
                if not connection.has_shown(self._token):
                    return
                del self._strangers[connection]
                with self._lock:
                    connection.send(self._answer.encode())
            for message in connection.receive():
                self.handle(message, connection.reply)
        except BlockingIOError:
            return
        except Exception as error:
            if not (isinstance(error, OSError) or connection in self._strangers):  # closed, or foreign
                logger.warning("The hub of this group has closed a connection.", exc_info=True)
            self._drop(connection)

    def _check_backlogs(self, now: float) -> None:
        """Wait until slow ranks take in more; shut out those that have taken nothing for too long."""
        with self._lock:
            stuck = [each for each in self._backlogged if each.unsent and now - each.took_at > SEND_S]
        for connection in stuck:
            self._drop(connection)
        with self._lock:
            for connection in list(self._backlogged):
                mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
                self._selector.modify(connection.socket, mask, connection)
                if not connection.unsent:
                    self._backlogged.discard(connection)
            self._release()

    def _add_backlogged(self, connection: _Connection) -> None:
        self._backlogged.add(connection)
        self._wake_up()

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        is_stranger = self._strangers.pop(connection, None) is not None
        with self._lock:
            connection.socket.close()
            self._backlogged.discard(connection)
            if not is_stranger:  # which has asked for nothing
                self.state.forget(connection.reply)


class _Connection:
    """The hub's end of a rank's connection. The hub's lock is held while something is sent."""

    def __init__(self, socket_: socket.socket, on_backlog: Callable[[_Connection], None]) -> None:
        self.socket = socket_
        self.socket.setblocking(False)  # a rank that is stopped must not stop the hub
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reply: Reply = lambda message: self.send(pack(message))  # one object: requests are known by it
        self.unsent = bytearray()
        self.took_at = 0.0  # when the rank last took something in, or had nothing to take
        self._on_backlog = on_backlog
        self._received = bytearray()

    def has_shown(self, token: str) -> bool:
        """Take in no more than a token, and return whether it is whole; PermissionError: it is not ours."""
        self._receive(TOKEN_BYTES - len(self._received))
        if len(self._received) < TOKEN_BYTES:
            return False
        shown, self._received = bytes(self._received), bytearray()
        if not hmac.compare_digest(shown, token.encode()):
            raise PermissionError("no rank of ours")
        return True

    def receive(self) -> Iterator[Message]:
        self._receive(1 << 18)
        return unpack(self._received)

    def send(self, data: bytes) -> None:
        """Send what the rank takes in now, and keep the rest."""
        had_backlog = bool(self.unsent)
        self.unsent += data
        if not had_backlog:
            self.took_at = time.monotonic()
            self.flush()
            if self.unsent:
                self._on_backlog(self)

    def flush(self) -> None:
        try:
            sent = self.socket.send(self.unsent)
        except BlockingIOError:
            return
        except OSError:  # the reading side finds out
            sent = len(self.unsent)
        self.took_at = time.monotonic()
        del self.unsent[:sent]

    def _receive(self, most_bytes: int) -> None:
        data = self.socket.recv(most_bytes)
        if not data:
            raise ConnectionResetError
        self._received += data
