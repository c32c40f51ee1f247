"""The first messages of a call: permits, then the choices of this rank's tokens, to all peers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..exchange.push import Permits
from ..symm import SideStream, SymmetricMemory, SymmetricTensor
from .flags import AFTER, FREE, GIVEN, TOLD, TOPK_SPAN


@dataclass(frozen=True)
class _Peer:
    """What this rank tells one peer: flags there; views made once."""

    rank: int
    our_told: torch.Tensor
    our_given: torch.Tensor


class Announcer:
    """Gives permits, tells peers this rank's choices, and takes back what a call changed."""

    def __init__(
        self,
        memory: SymmetricMemory,
        stream: SideStream,
        flags: SymmetricTensor,
    ) -> None:
        self._memory, self._stream = memory, stream
        self._permits = Permits(
            *(memory, stream, flags), free=FREE.value, risen=TOLD.value, after=AFTER.value, count=2
        )
        self.finish = self._permits.finish
        rank, world = memory.rank, memory.world_size
        self._peers = []
        for peer in ((rank - step) % world for step in range(1, world)):
            theirs = flags.peers[peer][:, rank]
            self._peers.append(_Peer(peer, theirs[TOLD.value], theirs[GIVEN.value]))
        self._copied = (0, 0, 0)
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self._peers]

    def permit(self) -> None:
        """Enqueue permits, and waits for those of the peers, in a call that has nothing to tell."""
        self._permits.give()
        for peer in self._peers:
            self._permits.take(peer.rank)

    def announce(
        self, lists: tuple[SymmetricTensor, ...], tokens: int, topk: int, stride: int, given: int
    ) -> None:
        """Enqueue permits and choices, behind what the caller has enqueued so far.

        lists: what is told of each choice, an element each, rank by rank; the choices of this rank are in
        their place, at `rank * stride`. given: the digest of the tokens of all ranks, as this one knows them.
        """
        memory, stream = self._memory, self._stream
        if (tokens, topk, len(lists)) != self._copied:
            self._copied = (tokens, topk, len(lists))
            self._copies = self._views(lists, memory.rank * stride, tokens * topk)
        self._permits.give()
        for peer, copies in zip(self._peers, self._copies, strict=True):
            self._permits.take(peer.rank)
            for there, here in copies:
                memory.copy(there, here, stream)
            memory.write_signal(peer.our_given, given, stream)
            memory.write_signal(peer.our_told, tokens * TOPK_SPAN.value + topk, stream)

    def _views(
        self, lists: tuple[SymmetricTensor, ...], begin: int, length: int
    ) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        part = slice(begin, begin + length)
        told = lists if length else ()
        return [[(each.peers[peer.rank][part], each.local[part]) for each in told] for peer in self._peers]
