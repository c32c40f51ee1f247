"""The first messages of a call: choices of this rank's tokens, to all peers, by pushes or a collective."""

from __future__ import annotations

import math

import torch

from ..exchange.collective import Collective
from ..exchange.flags import FLAGS, FREE, GIVEN, TOLD
from ..exchange.push import Pushes
from ..symm import SymmetricMemory, SymmetricTensor
from .flags import TOPK_SPAN

ROWS_TOLD = slice(TOLD.value, GIVEN.value + 1, GIVEN.value - TOLD.value)  # of flags


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


class ChoiceGatherer:
    """Gathers the choices of all ranks by a collective, to where sorting looks for those that are pushed.

    ids, weights: there. A rank's message is its digest of all tokens, what TOLD says, and its choices.
    """

    def __init__(self, memory: SymmetricMemory, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._rank, self._world_size = memory.rank, memory.world_size
        self._ids, self._weights = ids, weights
        shape = (FLAGS, memory.world_size)
        self.flags = memory.hold(torch.zeros(shape, dtype=torch.int32, device=memory.device))
        self._messages = ids.new_empty(0)

    def gather(
        self,
        collective: Collective,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        room: int,
        given: int,
    ) -> None:
        """Enqueue the collective.

        room: for the choices of the rank that has most. given: the digest of the tokens of all ranks, as this
        one knows them.
        """
        (tokens, topk), chosen = topk_ids.shape, topk_ids.numel()
        words = 1 + room + (0 if topk_weights is None else (room + 1) // 2)
        self._messages = self._ids.new_empty((self._world_size, words))
        own = self._messages[self._rank]
        own[:1].fill_(given << 32 | tokens * TOPK_SPAN.value + topk)
        own[1 : 1 + chosen].copy_(topk_ids.reshape(-1))
        if topk_weights is not None:
            own[1 + room :].view(torch.float32)[:chosen].copy_(topk_weights.detach().reshape(-1))
        collective.all_gather(self._messages.view(-1), own)

    def deliver(self, room: int) -> None:
        """Enqueue that rank p's choices are at `p * room` from here on, and that `flags` say how many."""
        messages, shape = self._messages, (self._world_size, room)
        self._messages = self._ids.new_empty(0)
        self.flags[ROWS_TOLD].copy_(messages.view(torch.int32)[:, :2].T)
        self._ids[: math.prod(shape)].view(shape).copy_(messages[:, 1 : 1 + room])
        if messages.shape[1] > 1 + room:
            weights = messages.view(torch.float32)[:, 2 * (1 + room) :]
            self._weights[: math.prod(shape)].view(shape).copy_(weights[:, :room])
