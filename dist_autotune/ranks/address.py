"""Where a hub listens, which ranks share its host, and how other hosts are reached."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Address:
    """Where a hub listens. A client shows the first half of `token` and is answered the second."""

    host: str  # as `this_host` names it
    port: int  # for ranks on the same host
    outside: tuple[tuple[str, int], ...]  # (name, port) for ranks on other hosts, once one has asked
    token: str  # twice `TOKEN_BYTES`

    def endpoints(self, from_host: str) -> list[tuple[str, int]]:
        """Return what a rank on a host can connect to; nothing: it has to ask."""
        return [("127.0.0.1", self.port)] if from_host == self.host else list(self.outside)


@functools.cache
def this_host() -> str:
    """Return what is equal for processes that reach each other by the loopback device."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"  # containers have networks of their own
    except OSError:
        return socket.gethostname()


def interface_towards(host: str) -> str:
    """Return the address of this host's interface on the way to another; empty: not known. Sends nothing."""
    if host:
        with contextlib.suppress(OSError):
            for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
    return ""
