"""How a rank reaches the others of its group: the hub, its line to the hub, and the notice board."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .client import Client, LocalClient, SocketClient
from .hosts import interface_towards, this_host
from .hub import Hub
from .store import PATIENCE_S, Store


class Members:
    """The ranks of one process group, as one of them sees them."""

    def __init__(self, group: Any) -> None:
        # Not `self.group = group`: a gloo group that outlives destroy_process_group() can abort the
        # process at exit (its thread then finds no interpreter; torch 2.13).
        self.rank = dist.get_rank()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.position = self.ranks.index(self.rank)
        self.board = Store(group, self.ranks, self.rank)
        self.line: Client | None = None  # to the hub; None: not found yet
        self.hub: Hub | None = None  # on the first rank
        self.is_lost = False  # the hub has gone
        self._has_asked = False  # to be let in, from another host
        self._let_in = 0  # how many have asked and been let in

    def find_hub(self, patience_s: float = PATIENCE_S) -> bool:
        """Connect to the hub if it is there by now, or start it; return whether there is one."""
        if self.line is not None:
            return True
        if self.position == 0:
            self.hub = self.hub or Hub(len(self.ranks))
            self.board.put_address(self.hub.address())
        self.line = self.new_line(patience_s)
        return self.line is not None

    def new_line(self, patience_s: float = PATIENCE_S) -> Client | None:
        """Return one more line to the hub, for another thread; None: the hub is not there yet."""
        if self.hub is not None:
            return LocalClient(self.hub, self.position)
        address = self.board.address(patience_s)
        if address is None:
            return None
        ways = address.ways(this_host())
        if not ways and not self._has_asked:
            store = self.board.host
            self.board.ask_in(interface_towards(store[0]) if store is not None else "")
            self._has_asked = True
        return SocketClient(ways, address.token, self.position) if ways else None

    def let_in(self, patience_s: float) -> None:
        """Let the hub listen for those on other hosts who have asked since the last time."""
        assert self.hub is not None
        for host in self.board.askers(self._let_in, patience_s):
            self._let_in += 1
            self.hub.open_towards(host)
            self.board.put_address(self.hub.address())

    def close(self) -> None:
        """Let go of hub and store: the process group has ended."""
        self.is_lost = True
        for closes in (self.line, self.hub, self.board):
            if closes is not None:
                closes.close()
