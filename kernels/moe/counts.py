"""How many tokens each rank passes: what the hosts tell each other where the caller does not say."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from ..operation import PeerTimeout
from ..symm import SymmetricMemory

EAGER_POLLS = 1000  # before a waiting host starts to sleep between polls
POLL_S = 5e-5
TOKEN_BITS = 32


class TokenBoard:
    """Words of host memory that the hosts of all ranks see; no device and no collective takes part.

    Question q is answered in word q % 2 of each rank, as q << 32 | tokens: one store of 8 bytes, so nobody
    reads half of it. A rank writes a word again for question q + 2, behind the answers of all to q + 1,
    which they gave when they had read those to q.
    """

    def __init__(self, memory: SymmetricMemory, timeout_s: float) -> None:
        words = memory.allocate((2,), torch.int64)
        self._words = [peer.numpy() for peer in words.peers]
        self._rank, self._timeout_s = memory.rank, timeout_s
        self._question = 0

    def ask(self, tokens: int) -> tuple[int, ...]:
        """Return the number of tokens of each rank; to be called on all of them."""
        self._question += 1
        slot = self._question % 2
        self._words[self._rank][slot] = self._question << TOKEN_BITS | tokens
        deadline = time.monotonic() + self._timeout_s
        polls = 0
        while missing := self._missing(slot):
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"{_ranks(missing)} did not tell rank {self._rank} within {self._timeout_s:g} s how many "
                    f"tokens it passes in a call without tokens=; pass it on all ranks or on none"
                )
            polls += 1
            if polls < EAGER_POLLS:
                os.sched_yield()
            else:
                time.sleep(POLL_S)
        return tuple(int(words[slot]) % 2**TOKEN_BITS for words in self._words)

    def _missing(self, slot: int) -> list[int]:
        return [
            rank for rank, words in enumerate(self._words) if int(words[slot]) >> TOKEN_BITS != self._question
        ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
