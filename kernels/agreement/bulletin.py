"""What ranks tell each other's hosts about calls that failed: a page of each rank, which its peers map.

    BELL      1 once a peer has told something, as long as it may concern this rank's calls. A call asks for
              nothing else
    BROKEN    the call in which the operation broke on this rank, 0: none; its cause follows
    REFUSED   how many calls this rank has refused. The last KEPT follow, each with its number and reason

A rank writes its page before it rings; a reader lowers its bell before it reads, and rings it again if there
is something left to raise. So nothing is missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..symm import SymmetricMemory, SymmetricMemoryError
from . import ballots

BELL, BROKEN, REFUSED, CAUSE = 0, 1, 2, 3  # places on a page
TEXT_WORDS = 96  # of 8 bytes
KEPT = 8  # refusals: a rank waits for its peers in each, on the device or by ballots
PAGE_WORDS = CAUSE + TEXT_WORDS + KEPT * (1 + TEXT_WORDS)


class Bulletin:
    """The pages of one operation, and what this rank has read of them so far."""

    def __init__(self, rank: int, pages: Sequence[torch.Tensor]) -> None:
        self._rank, self._pages = rank, [page.numpy() for page in pages]
        # Where hosts share no memory nobody else rings, and the device tells what it can.
        self.bell: memoryview[int] | list[int] = self._pages[rank].data if pages else [0]
        self._read = [0] * len(pages)  # refusals of each rank
        self._broken: tuple[int, str] | None = None  # the first call of a peer that broke, and why
        self._refused: dict[int, dict[int, str]] = {}  # by call and rank
        self._settled: set[int] = set()  # refused calls that this rank has raised

    @classmethod
    def open(cls, memory: SymmetricMemory) -> Bulletin:
        """Return the pages of all ranks; none where there are no peers, or no memory that hosts share."""
        if memory.world_size == 1:
            return cls(memory.rank, ())
        if memory.device.type == "cpu":
            return cls(memory.rank, memory.allocate((PAGE_WORDS,), torch.int64).peers)
        try:
            _, pages = ballots.host_words(memory.group, PAGE_WORDS, memory.timeout_s)
        except SymmetricMemoryError:  # on all ranks
            pages = ()
        return cls(memory.rank, pages if len(pages) == memory.world_size else ())

    # ---- telling

    def tell_broken(self, call: int, cause: str) -> None:
        """Tell all peers in which call the operation broke here."""
        if self._pages:
            self._write(CAUSE, cause)
            self._pages[self._rank][BROKEN] = call
            self._ring()

    def tell_refused(self, call: int, reason: str) -> None:
        """Tell all peers that this rank's arguments of a call were wrong."""
        self.settle(call)
        if self._pages:
            own = self._pages[self._rank]
            place = _place_of(int(own[REFUSED]))
            self._write(place + 1, reason)
            own[place] = call
            own[REFUSED] += 1
            self._ring()

    def _ring(self) -> None:
        for peer, page in enumerate(self._pages):
            if peer != self._rank:
                page[BELL] = 1

    def _write(self, place: int, text: str) -> None:
        size = 8 * TEXT_WORDS
        text_bytes = text.encode()[:size].ljust(size, b"\0")
        self._pages[self._rank][place : place + TEXT_WORDS].view("u1").data[:] = text_bytes

    # ---- hearing

    def hear(self) -> None:
        """Read what peers have told since the last time."""
        self.bell[BELL] = 0
        for peer, page in enumerate(self._pages):
            if peer == self._rank:
                continue
            if page[BROKEN] and (self._broken is None or page[BROKEN] < self._broken[0]):
                call = int(page[BROKEN])
                self._broken = call, f"call {call} failed on rank {peer}: {_text(page, CAUSE)}"
            told = int(page[REFUSED])  # read once: the peer may tell more meanwhile, and rings again
            for refusal in range(self._read[peer], told):
                place = _place_of(refusal)
                self.note_refused(int(page[place]), peer, _text(page, place + 1))
            self._read[peer] = told
        self._see_news()

    def note_refused(self, call: int, peer: int, reason: str) -> None:
        """Note that a peer has refused a call."""
        if call not in self._settled:
            self._refused.setdefault(call, {}).setdefault(peer, reason)
            self._see_news()

    def _see_news(self) -> None:
        if self._broken is not None or self._refused:
            self.bell[BELL] = 1

    @property
    def is_shared(self) -> bool:
        """Return whether peers can be told, and tell, anything here."""
        return bool(self._pages)

    def broken_by(self, call: float) -> str:
        """Return why a peer carries out no call from that number on; "" if none has broken before."""
        return self._broken[1] if self._broken is not None and self._broken[0] <= call else ""

    def take_refused(self, last: int) -> str:
        """Return which calls up to that number peers have refused, and why, once; "" if none."""
        calls = sorted(call for call in self._refused if call <= last)
        texts = []
        for call in calls:
            reasons = self._refused.pop(call)
            self.settle(call)
            texts += [
                f"rank {peer} refused its arguments of call {call}: {why}" for peer, why in reasons.items()
            ]
        return "; ".join(texts)

    def settle(self, call: int) -> None:
        """Raise a refused call no more: this rank has refused it, too, or raised it."""
        self._settled.add(call)
        self._refused.pop(call, None)


def _place_of(refusal: int) -> int:
    return CAUSE + TEXT_WORDS + refusal % KEPT * (1 + TEXT_WORDS)


def _text(page: Any, place: int) -> str:
    return bytes(page[place : place + TEXT_WORDS]).rstrip(b"\0").decode(errors="replace")
