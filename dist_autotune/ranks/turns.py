"""Turns: of the functions that all ranks of a group ask to tune, the deciding rank starts one at a time.

A rank asks with an exchange of the function's own. When all have asked, the deciding rank waits for the turn
in its own process, and the others then say whether their process is free. One that is busy, with another
group's session, says "later": all give their turns back and ask again. So nobody waits in a circle, neither
where ranks begin two functions in different order, nor where groups overlap.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Protocol

from . import exchange
from .exchange import Exchanges, FailedExchange

START, WITHOUT, LATER = b"start", b"without", b"later"
PAUSES_S = 0.01, 0.05  # between two asks, drawn anew


class LocalTurn(Protocol):
    """The turn of sessions in this process."""

    def acquire(self, waiting: Callable[[], None]) -> bool: ...  # False: the call is to go on without it
    def try_acquire(self) -> bool: ...
    def is_overdue(self) -> bool: ...  # the session that has it may wait for this call
    def release(self) -> None: ...


class Turns:
    """Asks for the turn of one function on one rank of a group.

    name: of the function. fail_session: tells peers that have a session open of an exception here.
    """

    def __init__(
        self, name: str, exchanges: Exchanges, *, leads: bool, fail_session: Callable[[BaseException], None]
    ) -> None:
        self.name = name
        self._exchanges, self._leads, self._fail_session = exchanges, leads, fail_session

    def take(
        self, turn: LocalTurn, timeout_s: float, what: str, patience_s: float = math.inf
    ) -> FailedExchange | bool:
        """Take the turn on all ranks; False: no session is opened; FailedExchange: a rank is missing."""
        take_part = self._exchanges.exchange
        while True:
            beat = self._beats(self._exchanges.number)

            def start(reports: dict[int, bytes], beat: Callable[[], None] = beat) -> bytes:
                return START if turn.acquire(beat) else WITHOUT

            order = take_part(b"", start, timeout_s, what, patience_s)
            if order == START:
                word = self._word(turn)
                order = take_part(word, _agreed, timeout_s, what, fail_later=self._fail_session)
            if isinstance(order, FailedExchange):
                return order
            if order != LATER:
                self._exchanges.leave()
                return order == START
            turn.release()
            time.sleep(random.uniform(*PAUSES_S))

    def _word(self, turn: LocalTurn) -> bytes:
        """Return what this rank says when the deciding rank starts the function."""
        if self._leads or turn.try_acquire():
            return START
        return WITHOUT if turn.is_overdue() else LATER

    def _beats(self, number: int) -> Callable[[], None]:
        """Return what keeps the others waiting while the deciding rank waits for its process."""
        latest = time.monotonic()

        def beat() -> None:
            nonlocal latest
            if time.monotonic() - latest > exchange.HEARTBEAT_S:
                latest = time.monotonic()
                self._exchanges.beat_in(number)

        return beat


def _agreed(words: dict[int, bytes]) -> bytes:
    said = set(words.values())
    return WITHOUT if WITHOUT in said else LATER if LATER in said else START
