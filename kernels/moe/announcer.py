"""The first messages of a call: each rank sends its choices to all peers, by pushes or a collective.

And their encoding, and the codes of failures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
import triton.language as tl

from ..agreement.collective import Collective
from ..exchange.flags import ARRIVED, FLAGS, FREE, GIVEN, ROWS_SENT
from ..exchange.push import Pushes
from ..symm import Step, SymmetricMemory, SymmetricTensor

# ROWS_SENT is a rank's tokens * TOPK_SPAN + topk.
TOPK_SPAN = tl.constexpr(64)
MOST_CHOICES = 63  # of a token
MOST_TOKENS = 2**24 - 1  # of a rank: ROWS_SENT stays below GIVEN_UP

# The kinds of failure records, beside `exchange.flags.NOT_PUSHED`, which is 1.
NOT_TOLD = tl.constexpr(2)
OTHER_TOKENS = tl.constexpr(3)
OTHER_TOPK = tl.constexpr(4)
NO_EXPERT = tl.constexpr(5)
NOT_COMPUTED = tl.constexpr(6)
GIVEN_OTHERS = tl.constexpr(7)

ROWS_TOLD = slice(ROWS_SENT.value, GIVEN.value + 1, GIVEN.value - ROWS_SENT.value)  # of flags


class Announcer:
    """Gives permits and tells peers this rank's choices; opening is collective.

    `ids` and `weights` have room for the choices of all ranks, rank p's from `p * capacity * topk` on.
    """

    def __init__(self, pushes: Pushes, capacity: int, max_topk: int) -> None:
        self._pushes, self._capacity = pushes, capacity
        most = pushes.memory.world_size * capacity * max_topk
        self.ids = pushes.memory.allocate((most,), torch.int64)
        self.weights = pushes.memory.allocate((most,), torch.float32)

    def permit(self, *, at_once: bool) -> None:
        """Enqueue permits, and waits for those of the peers, in a call that announces no choices.

        at_once: as in `Pushes.run`.
        """
        pushes = self._pushes
        first, last = pushes.fork(at_once=at_once)
        taking = (step for peer in pushes.before for step in pushes.taking(peer, FREE.value))
        pushes.run("no choices", itertools.chain(first, taking, last), at_once=at_once)
        pushes.owes_parts = True

    def announce(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None, given: int, *, at_once: bool
    ) -> None:
        """Put the choices in their place; enqueue permits and the choices, after the caller's work so far.

        given: this rank's digest of the tokens of all ranks. at_once: see `permit`.
        """
        tokens, topk = topk_ids.shape
        begin = self._pushes.memory.rank * self._capacity * topk
        part, told = slice(begin, begin + tokens * topk), tokens * TOPK_SPAN.value + topk
        given_lists = [(self.ids, topk_ids)]
        if topk_weights is not None:
            given_lists.append((self.weights, topk_weights))
        for held, choices in given_lists:
            held.local[part].copy_(choices.detach().reshape(-1))
        lists = tuple(held for held, _ in given_lists)
        first, last = self._pushes.fork(at_once=at_once)
        steps = self._steps(lists if tokens else (), part, told, given)
        key = "choices", tokens, topk, len(lists), given
        self._pushes.run(key, itertools.chain(first, steps, last), at_once=at_once)
        self._pushes.owes_parts = True

    def _steps(
        self, lists: tuple[SymmetricTensor, ...], part: slice, told: int, given: int
    ) -> Iterator[Step]:
        pushes = self._pushes
        for peer in pushes.before:
            copies = [(each.peers[peer][part], each.local[part]) for each in lists]
            yield from pushes.taking(peer, FREE.value)
            yield from pushes.sending(peer, copies, GIVEN.value, given)
            yield pushes.raising(peer, ROWS_SENT.value, told)


class ChoiceGatherer:
    """Gathers the choices of all ranks by a collective, and puts them where a push would.

    ids, weights: that memory. A rank's message is its digest of all tokens, its ROWS_SENT, and its choices.
    """

    def __init__(self, memory: SymmetricMemory, ids: torch.Tensor, weights: torch.Tensor) -> None:
        self._rank, self._world_size = memory.rank, memory.world_size
        self._ids, self._weights = ids, weights
        shape = (FLAGS, memory.world_size)
        self.flags = memory.hold(torch.zeros(shape, dtype=torch.int32, device=memory.device))
        arrived = torch.zeros((FLAGS, 1), dtype=torch.int32, device=memory.device)
        arrived[[ROWS_SENT.value, ARRIVED.value]] = 1
        self.arrived = memory.hold(arrived)  # for a kernel that takes all chunks for one rank's
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

        room: for the choices of the rank that has most. given: this rank's digest of the tokens of all ranks.
        """
        (tokens, topk), chosen = topk_ids.shape, topk_ids.numel()
        self._messages = self.messages(room, has_weights=topk_weights is not None)
        own = self._messages[self._rank]
        own[:1].fill_(given << 32 | tokens * TOPK_SPAN.value + topk)
        own[1 : 1 + chosen].copy_(topk_ids.reshape(-1))
        if topk_weights is not None:
            own[1 + room :].view(torch.float32)[:chosen].copy_(topk_weights.detach().reshape(-1))
        collective.all_gather(self._messages.view(-1), own)

    def messages(self, room: int, *, has_weights: bool) -> torch.Tensor:
        """Return memory for the messages of all ranks."""
        words = 1 + room + (room + 1) // 2 * has_weights
        return self._ids.new_empty((self._world_size, words))

    def deliver(self, room: int) -> None:
        """Enqueue copies of rank p's choices to their place, from `p * room` on, and of ROWS_SENT."""
        messages, shape = self._messages, (self._world_size, room)
        self._messages = self._ids.new_empty(0)
        self.flags[ROWS_TOLD].copy_(messages.view(torch.int32)[:, :2].T)
        self._ids[: math.prod(shape)].view(shape).copy_(messages[:, 1 : 1 + room])
        if messages.shape[1] > 1 + room:
            weights = messages.view(torch.float32)[:, 2 * (1 + room) :]
            self._weights[: math.prod(shape)].view(shape).copy_(weights[:, :room])
