"""The first messages of a call: permits, then the choices of this rank's tokens, to all peers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..symm import SideStream, SymmetricMemory, SymmetricTensor
from .words import AFTER, ARRIVED, FREE, GIVEN, TOLD, TOPK_SPAN


@dataclass(frozen=True)
class _Peer:
    """The words between this rank and one peer; views made once."""

    free: torch.Tensor  # here, set by the peer
    our_free: torch.Tensor  # there
    our_told: torch.Tensor  # there
    our_given: torch.Tensor  # there


class Announcer:
    """Gives permits, tells peers this rank's choices, and takes back what a call changed.

    `lists` are what is told of each choice: tensors of one element a choice, rank by rank.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        stream: SideStream,
        words: SymmetricTensor,
        lists: tuple[SymmetricTensor, ...],
    ) -> None:
        self._memory, self._stream, self._lists = memory, stream, lists
        local = words.local
        self._risen = local[TOLD.value : ARRIVED.value + 1]
        self._after = local[AFTER.value : AFTER.value + 2]
        rank, world = memory.rank, memory.world_size
        self._peers = []
        for step in range(1, world):
            peer = (rank - step) % world
            theirs = words.peers[peer][:, rank]
            self._peers.append(
                _Peer(local[FREE.value, peer], theirs[FREE.value], theirs[TOLD.value], theirs[GIVEN.value])
            )
        self._copied = (0, 0)
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self._peers]

    def announce(self, tokens: int, topk: int, stride: int, given: int) -> None:
        """Enqueue permits and choices, behind what the caller has enqueued so far.

        The choices of this rank are in their place, at `rank * stride` of each list; `given` is the digest of
        the tokens of all ranks, as this one knows them.
        """
        memory, stream = self._memory, self._stream
        if (tokens, topk) != self._copied:
            self._copied = (tokens, topk)
            self._copies = self._views(memory.rank * stride, tokens * topk)
        stream.fork()
        for peer in self._peers:
            memory.write_signal(peer.our_free, 1, stream)
        for peer, copies in zip(self._peers, self._copies, strict=True):
            memory.wait_signal(peer.free, 1, stream)
            memory.write_signal(peer.free, 0, stream)
            for there, here in copies:
                memory.copy(there, here, stream)
            memory.write_signal(peer.our_given, given, stream)
            memory.write_signal(peer.our_told, tokens * TOPK_SPAN.value + topk, stream)

    def finish(self) -> None:
        """Enqueue what follows the kernels of a call, and order what the caller does next behind it."""
        self._stream.fork()
        self._memory.copy(self._risen, self._after, self._stream)
        self._stream.join()

    def _views(self, begin: int, length: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        rank, world = self._memory.rank, self._memory.world_size
        part = slice(begin, begin + length)
        lists = self._lists if length else ()
        return [
            [(each.peers[(rank - step) % world][part], each.local[part]) for each in lists]
            for step in range(1, world)
        ]
