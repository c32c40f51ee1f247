"""Questions about one settled call: do all ranks open a session in it?

A settled call sends nothing. A rank that has met something new in call n of a function asks about that call
at its end; one that is to tune anew asks before it makes call n. A question has one outcome, written once by
`compare_set`: "yes" by the last rank that asks the same; else the first reason, by a rank that has made the
call without asking, or by one that has asked and waited for `ANSWER_S`. So all ranks open a session, or none.

Ranks that ask nothing answer by a thread, which reads how many calls they have made. Its mailbox in the store
is a *bell*, for which it waits, and a letter of each rank that writes. The question about call 7 behind
session s has these keys: `s/7` is its outcome, `s/7/asked` counts the ranks that ask, `s/7/at/3` says how far
rank 3 is, `s/7/late` counts on while a rank is inside the call, `s/7/left` counts the ranks that need it no
more; the last deletes all.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from msgspec import Struct, msgpack

from .courier import Connections, Courier, StoreLost, await_values, connections, pauses

if TYPE_CHECKING:
    from .watchdog import Watch, Watchdog

ANSWER_S = 2.0  # a rank waits so long for an answer
LATEST_S = 10.0  # and so long where a peer was inside the call that is asked about, which may compile
BEAT_S = 0.25
FAILURES = 20  # of operations, after which a store is lost
FORGOTTEN_S = 60.0  # then no rank reads a question any more
EARLY_S = 5.0  # how long a question about an unknown session is kept: this rank may be about to end it
PAUSE_S = 0.5e-3  # between looks at the store, at first


@dataclass(eq=False)
class CallCount:
    """The calls of one function on this rank since its last session, all of them settled.

    Calls write it, and the listener reads it. watch: how a call is watched in which a peer has raised.
    """

    questions: Questions
    session: str
    ranks: Sequence[int]
    rank: int
    watch: Watch
    watchdog: Watchdog
    begun: int = 0
    ended: int = 0
    asks_behind: int = 0  # the latest call at whose end this rank asks; set before the call has ended
    asks_before: int = 0  # the latest call before which it asks
    is_asking: bool = False
    is_called: bool = False  # a peer is to tune anew: this rank asks before its next call
    has_opened: bool = False  # a session that this rank was interrupted before

    def ask(self, *, begins: bool = False) -> Answer:
        """Ask about the latest call, behind it or before it; return the outcome."""
        return self.questions.ask(self, begins=begins)

    def tell(self, error: str) -> None:
        """Tell the peers that this rank has raised in the call that it ends: they may wait for it there."""
        letter = Letter(self.session, self.begun, self.rank, error=error)
        with contextlib.suppress(StoreLost):
            self.questions.scout.do(lambda store: letter.post(store, self.ranks))

    def is_in(self, call: int) -> bool:
        """Return whether this rank has begun this call as its latest one, and not ended it."""
        return self.ended < self.begun == call


@dataclass(frozen=True)
class Answer:
    """The outcome of a question. calls: how many each rank had made, of those that have told."""

    opens: bool
    reason: str = ""
    is_late: bool = False  # some rank gave no answer in time
    calls: Mapping[int, int] = field(default_factory=dict)


class Letter(Struct, frozen=True, omit_defaults=True):
    """A question about a call, or word that a rank has raised in it."""

    session: str
    call: int
    rank: int
    begins: bool = False  # asked before the call
    error: str = ""  # what the rank has raised

    def key(self, part: str = "") -> str:
        """Return a key of the question; "" is its outcome."""
        return f"dist_autotune/questions/{self.session}/{self.call}{'b' if self.begins else ''}{part}"

    def post(self, store: Any, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank != self.rank:
                store.set(_slot(rank, self.rank), _to_bytes(self))
                store.set(_bell(rank), b"")  # behind the letter

    def leave(self, store: Any, ranks: Sequence[int]) -> None:
        """Count this rank out; the last one deletes all."""
        if store.add(self.key("/left"), 1) == len(ranks):
            self.delete(store, ranks)

    def delete(self, store: Any, ranks: Sequence[int]) -> None:
        for part in ("", "/asked", "/late", "/left", *(f"/at/{rank}" for rank in ranks)):
            store.delete_key(self.key(part))


_to_bytes, _read_letter = msgpack.Encoder().encode, msgpack.Decoder(Letter).decode


class Questions:
    """What this process asks its peers about settled calls, and answers them."""

    def __init__(self, to_store: Connections) -> None:
        self.scout = to_store.scout
        self._connections = to_store
        self._counts: weakref.WeakValueDictionary[str, CallCount] = weakref.WeakValueDictionary()
        self._asking = threading.Lock()  # a rank asks one question at a time: it has one letter to each peer
        self._asked: list[tuple[float, Letter, Sequence[int]]] = []  # own questions, and when
        self._listener: Courier | None = None

    def count(self, made: CallCount) -> CallCount:
        """Answer questions about these calls from now on."""
        self._counts[made.session] = made
        if self._listener is None:
            self._listener, listener = self._connections.take(), _Listener(self._counts, made.rank)
            self._listener.release = lambda: listener.close(self.scout)
            self._listener.start(listener.listen)
        return made

    def ask(self, count: CallCount, *, begins: bool) -> Answer:
        """Ask about the call that is made; return the outcome. A store that is lost is an answer, too."""
        letter, is_over = Letter(count.session, count.begun, count.rank, begins), False
        with self._asking:
            count.is_asking = True
            try:
                answer = self._answer(count, letter)
                is_over = True
                return answer
            except StoreLost as error:
                return Answer(False, str(error), is_late=True)
            finally:
                count.is_asking = False
                if not is_over:  # Ctrl-C: the peers must not wait, and may have opened a session
                    with contextlib.suppress(StoreLost):
                        text = f"no rank {count.rank} was interrupted"
                        end = self.scout.do(lambda store: store.compare_set(letter.key(), "", text))
                        count.has_opened = bytes(end) == b"yes"

    def _answer(self, count: CallCount, letter: Letter) -> Answer:
        ranks, began = count.ranks, time.monotonic()

        def arrive(store: Any) -> bool:
            while self._asked and self._asked[0][0] < began - FORGOTTEN_S:
                _, old, of = self._asked.pop(0)
                old.delete(store, of)  # where a rank has died, nobody is the last
            store.set(letter.key(f"/at/{count.rank}"), f"{count.ended} asks")
            arrived = store.add(letter.key("/asked"), 1)
            if arrived == len(ranks):
                store.compare_set(letter.key(), "", "yes")
            elif arrived == 1:
                letter.post(store, ranks)
            return bool(arrived == 1)

        if is_first := self.scout.do(arrive):
            self._asked.append((began, letter, ranks))
        self._await_outcome(letter, ranks, began)

        def read(store: Any) -> Answer:
            kind, _, reason = bytes(store.get(letter.key())).decode().partition(" ")
            calls = {rank: int(word.split()[0]) for rank, word in _words(store, letter, ranks).items()}
            if is_first:
                letter.leave(store, ranks)
            return Answer(kind == "yes", reason, kind == "late", calls)

        return self.scout.do(read)

    def _await_outcome(self, letter: Letter, ranks: Sequence[int], began: float) -> None:
        """Wait for the outcome, at most `ANSWER_S`, or `LATEST_S` while some rank is inside the call."""
        deadline, beats = began + ANSWER_S, 0
        for pause_s in pauses(PAUSE_S):
            if self.scout.do(lambda store: store.check([letter.key()])):
                return
            if (now := time.monotonic()) > deadline:
                late = self.scout.do(lambda store: store.add(letter.key("/late"), 0))
                if late == beats or now > began + LATEST_S:
                    self.scout.do(lambda store: _give_up(store, letter, ranks))
                    return
                beats, deadline = late, now + 4 * BEAT_S
            time.sleep(pause_s)


def _words(store: Any, letter: Letter, ranks: Sequence[int]) -> dict[int, bytes]:
    """Return how far ranks are, of those that have told."""
    keys = {rank: letter.key(f"/at/{rank}") for rank in ranks}
    return {rank: bytes(store.get(key)) for rank, key in keys.items() if store.check([key])}


def _give_up(store: Any, letter: Letter, ranks: Sequence[int]) -> None:
    told = _words(store, letter, ranks)
    missing = [rank for rank in ranks if b"asks" not in told.get(rank, b"")]
    names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
    store.compare_set(letter.key(), "", f"late {names} gave no answer within {ANSWER_S:g} s")


class _Listener:
    """Answers the questions of peers, on a thread with a connection of its own."""

    def __init__(self, counts: Mapping[str, CallCount], rank: int) -> None:
        self._counts, self._rank = counts, rank
        self._is_closed = False
        self._open: list[_Open] = []

    def close(self, scout: Courier) -> None:
        self._is_closed = True
        scout.start(lambda store: store.set(_bell(self._rank), b""))

    def listen(self, store: Any) -> None:
        """Answer until closed, or until the store has gone."""
        for _ in range(FAILURES):
            try:
                while not self._is_closed:
                    self._answer(store)
                return
            except dist.DistNetworkError:  # a trace on stderr for each operation on it
                return
            except (dist.DistError, RuntimeError):
                time.sleep(10 * PAUSE_S)

    def _answer(self, store: Any) -> None:
        """Wait for letters, and answer all that have come."""
        await_values(store, [_bell(self._rank)])
        for pause_s in pauses(PAUSE_S):
            self._read_letters(store)
            self._open = [each for each in self._open if not each.is_answered(store)]
            if self._is_closed or not self._open:
                return
            time.sleep(pause_s)

    def _read_letters(self, store: Any) -> None:
        if not store.check([_bell(self._rank)]):
            return
        store.delete_key(_bell(self._rank))  # before the letters: a later one rings again
        for slot in (_slot(self._rank, peer) for peer in range(dist.get_world_size())):
            if store.check([slot]):
                letter = _read_letter(bytes(store.get(slot)))
                store.delete_key(slot)
                self._open.append(_Open(letter, self._counts, self._rank))


class _Open:
    """A letter of a peer that is not answered yet."""

    def __init__(self, letter: Letter, counts: Mapping[str, CallCount], rank: int) -> None:
        self._letter, self._counts, self._rank = letter, counts, rank
        self._until = time.monotonic() + EARLY_S
        self._count: CallCount | None = None
        self._was_inside, self._beat_at = False, 0.0
        self._followed = 0  # the latest call that is followed

    def is_answered(self, store: Any) -> bool:
        """Answer the question if this rank has gone far enough; return whether nothing is left to do."""
        letter, is_late = self._letter, time.monotonic() > self._until
        if self._count is None:
            self._count = self._counts.get(letter.session)
            if self._count is None:
                return is_late  # the session has failed here, or another one began
            self._take(store, self._count)
        count = self._count
        if letter.error:
            return self._is_followed(count, is_late=is_late)
        if self._asks(count):
            if count.is_asking or not store.check([letter.key()]):
                return is_late and not count.is_asking
        elif (count.begun if letter.begins else count.ended) >= letter.call:
            done = "is in call" if letter.begins else "has not met it in call"
            store.compare_set(letter.key(), "", f"no rank {self._rank} {done} {letter.call}")
        elif not store.check([letter.key()]):
            if self._was_inside and count.is_in(letter.call) and time.monotonic() > self._beat_at:
                self._beat_at = time.monotonic() + BEAT_S
                store.add(letter.key("/late"), 1)
            return False
        letter.leave(store, count.ranks)
        return True

    def _asks(self, count: CallCount) -> bool:
        """Return whether this rank asks the same."""
        return (count.asks_before if self._letter.begins else count.asks_behind) == self._letter.call

    def _take(self, store: Any, count: CallCount) -> None:
        letter = self._letter
        if letter.error:
            return
        self._was_inside = not letter.begins and count.is_in(letter.call)
        count.is_called |= letter.begins
        if not self._asks(count):
            store.set(letter.key(f"/at/{self._rank}"), str(count.ended))

    def _is_followed(self, count: CallCount, *, is_late: bool) -> bool:
        """Report this rank if it stays in the call in which a peer has raised, or in an earlier one."""
        letter, call = self._letter, count.begun
        if count.is_in(call) and self._followed < call <= letter.call:
            self._followed = call
            reason = f"rank {letter.rank} has failed ({letter.error})"
            count.watchdog.follow(count.watch, reason, lambda: count.is_in(call))
        return is_late or max(self._followed, count.ended) >= letter.call


def _bell(rank: int) -> str:
    return f"dist_autotune/letters/{rank}/bell"


def _slot(reader: int, writer: int) -> str:
    return f"dist_autotune/letters/{reader}/{writer}"


_questions: weakref.WeakKeyDictionary[Any, Questions] = weakref.WeakKeyDictionary()


def questions() -> Questions:
    """Return the questions of this process in the default process group."""
    world = dist.group.WORLD
    if (known := _questions.get(world)) is None:  # another thread may make them meanwhile
        known = _questions.setdefault(world, Questions(connections()))
    return known
