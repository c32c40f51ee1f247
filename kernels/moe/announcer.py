"""The first messages of a call: permits, then the choices of this rank's tokens, to all peers."""

from __future__ import annotations

import torch

from ..exchange.peers import FREE, GIVEN, TOLD
from ..exchange.push import Pushes
from ..symm import SymmetricTensor
from .flags import TOPK_SPAN


class Announcer:
    """Gives permits and tells peers this rank's choices."""

    def __init__(self, pushes: Pushes) -> None:
        self._pushes = pushes
        self._copied = (0, 0, 0)
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in pushes.before]

    def permit(self) -> None:
        """Enqueue permits, and waits for those of the peers, in a call that has nothing to tell."""
        self._pushes.give_permits()
        for peer in self._pushes.before:
            self._pushes.take(peer, FREE.value)

    def announce(
        self, lists: tuple[SymmetricTensor, ...], tokens: int, topk: int, stride: int, given: int
    ) -> None:
        """Enqueue permits and choices, behind what the caller has enqueued so far.

        lists: what is told of each choice, an element each, rank by rank; the choices of this rank are in
        their place, at `rank * stride`. given: the digest of the tokens of all ranks, as this one knows them.
        """
        pushes = self._pushes
        if (tokens, topk, len(lists)) != self._copied:
            self._copied = (tokens, topk, len(lists))
            self._copies = self._views(lists, pushes.memory.rank * stride, tokens * topk)
        pushes.give_permits()
        for peer, copies in zip(pushes.before, self._copies, strict=True):
            pushes.take(peer, FREE.value)
            pushes.send(peer, copies, GIVEN.value, given)
            pushes.raise_flag(peer, TOLD.value, tokens * TOPK_SPAN.value + topk)

    def _views(
        self, lists: tuple[SymmetricTensor, ...], begin: int, length: int
    ) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        part = slice(begin, begin + length)
        told = lists if length else ()
        return [[(each.peers[peer][part], each.local[part]) for each in told] for peer in self._pushes.before]
