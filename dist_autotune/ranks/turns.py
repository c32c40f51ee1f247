"""Turns of functions: the deciding rank starts one at a time of those that all ranks of a group ask to tune.

A rank asks by an exchange that belongs to the function. When all have asked, the deciding rank waits for the
turn of its process; then the others say whether their process is free. A process that is busy with another
group's session answers "later": all give their turns back and ask again. So no ranks wait in a circle, even
when they begin two functions in different order or when groups overlap.

A session of mode="online" has one turn for all its trials: ranks that tune on one thread make them in one
order. When a rank says that it tunes on several threads, all ask for each trial from then on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from . import exchange
from .exchange import Exchanges, ExchangeWait

START, ON_THREADS, WITHOUT, LATER = b"start", b"start on threads", b"without", b"later"
PAUSES_S = 0.01, 0.05  # between two asks, drawn anew


class LocalTurn(Protocol):
    """The turn of sessions in this process."""

    def acquire(self, waiting: Callable[[], None]) -> bool: ...  # False: the call is to go on without it
    def try_acquire(self) -> bool: ...
    def is_overdue(self) -> bool: ...  # the session that has it may wait for this call
    def release(self) -> None: ...


@dataclass(eq=False)
class Turns:
    """Asks for the turn of one function on one rank of a group.

    fail_session: tells peers that have a session open of an exception here.
    """

    name: str  # of the function; where several have one name, with its number
    exchanges: Exchanges
    leads: bool
    fail_session: Callable[[BaseException], None]
    are_on_threads: bool = False  # some rank has said that it tunes on several threads

    def take(self, turn: LocalTurn, wait: ExchangeWait, *, on_threads: bool) -> bool:
        """Take the turn on all ranks; False: no session is opened. Raises as `Exchanges.exchange`."""
        exchanges, told_at = self.exchanges, time.monotonic()

        def beat() -> None:
            """Keep the others waiting while the deciding rank waits for its process."""
            nonlocal told_at
            if time.monotonic() - told_at > exchange.HEARTBEAT_S:
                told_at = time.monotonic()
                exchanges.heartbeat(exchanges.number - 1)

        def start(reports: dict[int, bytes]) -> bytes:
            return START if turn.acquire(beat) else WITHOUT

        while True:
            order = exchanges.exchange(b"", start, wait)
            if order == START:
                free = self.leads or turn.try_acquire()
                word = WITHOUT if turn.is_overdue() else LATER
                if free:
                    word = ON_THREADS if on_threads else START
                order = exchanges.exchange(word, _agreed, wait, fail_later=self.fail_session)
            if order != LATER:
                exchanges.leave()
                self.are_on_threads |= order == ON_THREADS
                return order != WITHOUT
            turn.release()
            time.sleep(random.uniform(*PAUSES_S))


def _agreed(words: dict[int, bytes]) -> bytes:
    return next(word for word in (WITHOUT, LATER, ON_THREADS, START) if word in words.values())
