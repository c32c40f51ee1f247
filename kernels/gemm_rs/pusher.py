"""The side of `GemmReduceScatter` that hands over: it pushes sums to the ranks they are for and says so."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..symm import SymmetricMemory, SymmetricTensor
from .kernel import AFTER, ARRIVED, DONE, FREE


@dataclass(frozen=True)
class _Peer:
    """The way of our sums to one peer, and the words between it and this rank; views made once."""

    sums: torch.Tensor  # here
    slot: torch.Tensor  # there
    free: torch.Tensor  # here, set by the peer
    done: torch.Tensor  # here, set by the GEMM
    our_free: torch.Tensor  # there
    our_arrived: torch.Tensor  # there


class SumPusher:
    """Pushes sums to the peers they are for, rank + 1 first, and takes back what a call changed."""

    def __init__(
        self, memory: SymmetricMemory, partial: torch.Tensor, staged: SymmetricTensor, words: SymmetricTensor
    ) -> None:
        self._memory = memory
        self._stream = memory.side_stream()
        self._arrived, self._after = words.local[ARRIVED.value], words.local[AFTER.value]
        rank, world = memory.rank, memory.world_size
        self._peers = []
        for step in range(1, world):
            peer = (rank + step) % world
            theirs = words.peers[peer][:, rank]
            self._peers.append(
                _Peer(
                    sums=partial[step - 1],
                    slot=staged.peers[peer][world - step - 1],  # this rank is `world - step` behind the peer
                    free=words.local[FREE.value, peer],
                    done=words.local[DONE.value, peer],
                    our_free=theirs[FREE.value],
                    our_arrived=theirs[ARRIVED.value],
                )
            )
        # A driver that sets up something at the first copy to a peer must not do so while a GEMM spins.
        for each in self._peers:
            memory.copy(each.slot[:1], each.sums[:1], self._stream)  # zeros; read behind ARRIVED only
        self._stream.join()

    def permit(self) -> None:
        """Let the peers write their slots here, behind what the caller has enqueued so far."""
        self._stream.fork()
        for peer in self._peers:
            self._memory.write_signal(peer.our_free, 1, self._stream)

    def push(self, rows: int) -> None:
        """Enqueue the pushes of one call; to be called behind the launch of the GEMM that they wait for."""
        memory, stream = self._memory, self._stream
        for peer in self._peers:
            for word in (peer.free, peer.done):
                memory.wait_signal(word, 1, stream)
                memory.write_signal(word, 0, stream)
            memory.copy(peer.slot[:rows], peer.sums[:rows], stream)
            memory.write_signal(peer.our_arrived, rows, stream)

    def push_one(self, step: int, rows: int) -> None:
        """Enqueue the push to rank + 1 + step behind all that the caller has enqueued, and wait for nothing.

        That is the launch which computes the sums and takes the permit of that peer.
        """
        peer = self._peers[step]
        self._stream.fork()
        self._memory.copy(peer.slot[:rows], peer.sums[:rows], self._stream)
        self._memory.write_signal(peer.our_arrived, rows, self._stream)

    def finish(self) -> None:
        """Enqueue what follows the GEMM, and order what the caller does next behind it."""
        self._stream.fork()
        self._memory.copy(self._arrived, self._after, self._stream)
        self._stream.join()
