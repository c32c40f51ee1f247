"""How a rank reaches the others of its group: the hub, its client of the hub, and the store."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .client import Client
from .hub import Hub, interface_towards, this_host
from .store import OPERATION_S, Store


class Rendezvous:
    """What one rank needs to reach the others of its process group."""

    def __init__(self, group: Any) -> None:
        # Not `self.group = group`: a gloo group that outlives destroy_process_group() can abort the
        # process at exit (its thread then finds no interpreter; torch 2.13).
        self.rank = dist.get_rank()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.store = Store(group, self.ranks, self.rank)
        self.client: Client | None = None  # of the hub; None: not found yet
        self.hub: Hub | None = None  # on the first rank
        self.is_lost = False  # the hub has gone

    def find_client(self, limit_s: float = OPERATION_S) -> Client | None:
        """Return the client of the hub, which the first rank starts; None: it is not there yet."""
        if self.client is None:
            if self.rank == self.ranks[0]:
                self.hub = self.hub or Hub(self.ranks)
                self.store.publish_address(self.hub.address())
            self.client = self.new_client(limit_s)
        return self.client

    def new_client(self, limit_s: float = OPERATION_S) -> Client | None:
        """Return one more client, for another thread; None: the hub is not there yet."""
        address = self.store.read_address(limit_s) if self.hub is None else self.hub.address()
        if address is None:
            return None
        if endpoint := address.endpoint(this_host()):
            return Client(endpoint, address.token, self.rank)
        # All that ask reach the store's host: the interface towards one of them is one for all.
        self.store.request_access(interface_towards(self.store.host))
        return None

    def admit_hosts(self, hub: Hub, limit_s: float) -> None:
        """Let the hub listen for ranks of other hosts, if one has asked."""
        if (host := self.store.requested_access(limit_s)) is not None:
            hub.open_towards(host)
            self.store.publish_address(hub.address())

    def close(self) -> None:
        """Let go of hub and store: the process group has ended."""
        self.is_lost = True
        for closes in (self.client, self.hub, self.store):
            if closes is not None:
                closes.close()
