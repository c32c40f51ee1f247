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

from .exchange import Decide, Exchanges, FailedExchange, failure_of

START, WITHOUT, LATER = b"start", b"without", b"later"
PAUSES_S = 0.01, 0.05  # between two asks, drawn anew


class LocalTurn(Protocol):
    """The turn of sessions in this process."""

    def acquire(self, waiting: Callable[[], None]) -> bool: ...  # False: the call is to go on without it
    def try_acquire(self) -> bool: ...
    def is_overdue(self) -> bool: ...  # the session that has it may wait for this call
    def release(self) -> None: ...


class Turns:
    """Asks for the turn of one function on one rank of a group."""

    def __init__(
        self,
        exchanges: Exchanges,
        rank: int,
        leader: int,
        heartbeat_s: float,
        name: str,
        fail_session: Callable[[BaseException], None],
    ) -> None:
        self.name = name  # of the function
        self._exchanges, self._rank, self._leads = exchanges, rank, rank == leader
        self._heartbeat_s, self._fail_session = heartbeat_s, fail_session
        self._number = 0  # of the next exchange

    def take(
        self, turn: LocalTurn, timeout_s: float, what: str, patience_s: float = math.inf
    ) -> FailedExchange | bool:
        """Take the turn on all ranks; False: no session is opened; FailedExchange: a rank is missing."""
        while True:
            number = self._number

            def start(reports: dict[int, bytes], number: int = number) -> bytes:
                return START if turn.acquire(self._beats(number)) else WITHOUT

            order = self._exchange(b"", start, timeout_s, what, self._fail_next, patience_s)
            if order == START:
                order = self._exchange(self._word(turn), _agreed, timeout_s, what, self._fail_session)
            if isinstance(order, FailedExchange):
                return order
            if order != LATER:
                self._exchanges.leave(self._number - 1, has_order=True)
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
            if time.monotonic() - latest > self._heartbeat_s:
                latest = time.monotonic()
                self._exchanges.beat(number)

        return beat

    def _fail_next(self, error: BaseException) -> None:
        number, self._number = self._number, self._number + 1
        self._exchanges.fail(number, failure_of(self._rank, error))

    def _exchange(
        self,
        report: bytes,
        decide: Decide,
        timeout_s: float,
        what: str,
        fail_later: Callable[[BaseException], None],
        patience_s: float = math.inf,
    ) -> bytes | FailedExchange:
        number, self._number = self._number, self._number + 1
        try:
            return self._exchanges.take_part(number, report, decide, timeout_s, what, patience_s)
        except BaseException as error:  # Ctrl-C: the peers must learn of it
            if not self._exchanges.fail(number, failure_of(self._rank, error)):
                fail_later(error)  # the others have gone on
            raise


def _agreed(words: dict[int, bytes]) -> bytes:
    said = set(words.values())
    return WITHOUT if WITHOUT in said else LATER if LATER in said else START
