"""The first messages of a call: permits, then the choices of this rank's tokens, to all peers."""

from __future__ import annotations

import torch

from ..exchange.peers import FREE, GIVEN, TOLD
from ..exchange.push import Pushes
from ..symm import SymmetricTensor
from .flags import TOPK_SPAN


class Announcer:
    """Gives permits and tells peers this rank's choices.

    `lists` are what is told of each choice: tensors of one element a choice, rank by rank.
    """

    def __init__(self, pushes: Pushes, lists: tuple[SymmetricTensor, ...]) -> None:
        self._pushes, self._lists = pushes, lists
        self._copied = (0, 0)
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in pushes.before]

    def announce(self, tokens: int, topk: int, stride: int, given: int) -> None:
        """Enqueue permits and choices, behind what the caller has enqueued so far.

        The choices of this rank are in their place, at `rank * stride` of each list; `given` is the digest of
        the tokens of all ranks, as this one knows them.
        """
        pushes = self._pushes
        if (tokens, topk) != self._copied:
            self._copied = (tokens, topk)
            self._copies = self._views(pushes.memory.rank * stride, tokens * topk)
        pushes.give_permits()
        for peer, copies in zip(pushes.before, self._copies, strict=True):
            pushes.take(peer, FREE.value)
            pushes.send(peer, copies, GIVEN.value, given)
            pushes.raise_flag(peer, TOLD.value, tokens * TOPK_SPAN.value + topk)

    def _views(self, begin: int, length: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        part = slice(begin, begin + length)
        lists = self._lists if length else ()
        return [
            [(each.peers[peer][part], each.local[part]) for each in lists] for peer in self._pushes.before
        ]
