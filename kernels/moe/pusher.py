"""The side of `MoEReduceScatter` that hands over: it pushes sums to the ranks they are for and says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..symm import SideStream, SymmetricMemory, SymmetricTensor
from .words import ARRIVED, DONE


@dataclass(frozen=True)
class _Peer:
    """The way of our sums to one peer, and the words of it; views made once."""

    rank: int
    sums: torch.Tensor  # here
    slot: torch.Tensor  # there
    done: torch.Tensor  # here, set by the kernel
    our_arrived: torch.Tensor  # there


class SumPusher:
    """Pushes sums to the peers they are for, rank + 1 first, whose permits the announcement has taken."""

    def __init__(
        self,
        memory: SymmetricMemory,
        stream: SideStream,
        partial: torch.Tensor,
        staged: SymmetricTensor,
        words: SymmetricTensor,
    ) -> None:
        self._memory, self._stream = memory, stream
        rank, world = memory.rank, memory.world_size
        self._peers = []
        for step in range(1, world):
            peer = (rank + step) % world
            self._peers.append(
                _Peer(
                    rank=peer,
                    sums=partial[step - 1],
                    slot=staged.peers[peer][world - step - 1],  # this rank is `world - step` behind the peer
                    done=words.local[DONE.value, peer],
                    our_arrived=words.peers[peer][ARRIVED.value, rank],
                )
            )
        # A driver that sets up something at the first copy to a peer must not do so while a kernel spins.
        for each in self._peers:
            memory.copy(each.slot[:1], each.sums[:1], stream)  # zeros; read behind ARRIVED only
        stream.join()

    def push(self, tokens: Sequence[int]) -> None:
        """Enqueue the pushes of one call; to be called behind the launch of the kernel that they wait for."""
        memory, stream = self._memory, self._stream
        for peer in self._peers:
            memory.wait_signal(peer.done, 1, stream)
            memory.write_signal(peer.done, 0, stream)
            if count := tokens[peer.rank]:
                memory.copy(peer.slot[:count], peer.sums[:count], stream)
            memory.write_signal(peer.our_arrived, 1, stream)

    def push_one(self, step: int, tokens: Sequence[int]) -> None:
        """Enqueue the push to rank + 1 + step, behind all that the caller has enqueued, without a wait."""
        peer = self._peers[step]
        self._stream.fork()
        if count := tokens[peer.rank]:
            self._memory.copy(peer.slot[:count], peer.sums[:count], self._stream)
        self._memory.write_signal(peer.our_arrived, 1, self._stream)
