"""Questions about one settled call: do all ranks open a session in it?

A settled call sends nothing. A rank that met a new key in call n of a function asks about that call at its
end; after `retune()` it asks before call n. A question has one outcome, written once by `compare_set`: "yes"
by the last rank that asks the same; else the first reason, by a rank that made the call without asking, or by
one that asked and waited for `ANSWER_S`. So all ranks open a session, or none.

On ranks that ask nothing a thread answers, by the number of calls they have made. Its mailbox in the store is
a *bell*, for which it waits, and the numbered letters of each rank that writes. The question about call 7
after session s has these keys: `s/7` is its outcome, `s/7/asked` counts the ranks that ask, `s/7/at/3` is the
number of calls of rank 3, `s/7/late` counts on while a rank is inside the call, `s/7/left` counts the ranks
that need it no more; the last one deletes all. A rank that asks counts itself out, whenever its thread reads
the letter; for one that does not ask, the thread does.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from msgspec import Struct, msgpack

from .courier import Connections, Courier, StoreLost, await_values, connections, pauses, peek

if TYPE_CHECKING:
    from .watchdog import Watch, Watchdog

ANSWER_S = 2.0  # a rank waits so long for an answer
LATEST_S = 10.0  # and so long where a peer was inside the call that is asked about, which may compile
INSIDE_S = 1.0  # then a rank that counts on no more has left the call
FAILURES = 20  # of operations, after which a store is lost
FORGOTTEN_S = 60.0  # then no rank reads a question any more
EARLY_S = 5.0  # how long a question about an unknown session is kept: this rank may be about to end it
PAUSE_S = 0.5e-3  # between looks at the store, at first
_DONE = object()


class Letter(Struct, frozen=True, omit_defaults=True):
    """A question about a call, or word that a rank has raised in it."""

    session: str
    call: int
    rank: int
    ranks: tuple[int, ...]  # of the group
    begins: bool = False  # asked before the call
    error: str = ""  # what the rank has raised

    def key(self, part: str = "") -> str:
        """Return a key of the question; "" is its outcome."""
        return f"dist_autotune/questions/{self.session}/{self.call}{'b' if self.begins else ''}{part}"

    def arrive(self, store: Any, ended: int) -> int:
        """Ask, after so many calls; return how many ranks have asked."""
        store.set(self.key(f"/at/{self.rank}"), f"{ended} asks")
        arrived: int = store.add(self.key("/asked"), 1)
        if arrived == len(self.ranks):
            store.compare_set(self.key(), "", "yes")
        return arrived

    def give_up(self, store: Any) -> str:
        """Write that ranks gave no answer; return the outcome, which may be another one."""
        told = self.calls_told(store)
        missing = [rank for rank in self.ranks if "asks" not in told.get(rank, "")]
        names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        text = f"late {names} gave no answer within {ANSWER_S:g} s"
        return bytes(store.compare_set(self.key(), "", text)).decode()

    def leave(self, store: Any) -> None:
        """Count this rank out; the last one deletes all."""
        if store.add(self.key("/left"), 1) == len(self.ranks):
            self.delete(store)

    def delete(self, store: Any) -> None:
        for part in ("", "/asked", "/late", "/left", *(f"/at/{rank}" for rank in self.ranks)):
            store.delete_key(self.key(part))

    def calls_told(self, store: Any) -> dict[int, str]:
        """Return the number of calls of each rank that has told it."""
        told = {rank: peek(store, self.key(f"/at/{rank}")).decode() for rank in self.ranks}
        return {rank: calls for rank, calls in told.items() if calls}


_to_bytes, _read_letter = msgpack.Encoder().encode, msgpack.Decoder(Letter).decode


@dataclass(frozen=True)
class Answer:
    """The outcome of a question. calls: how many each rank had made, of those that have told."""

    opens: bool
    reason: str = ""
    is_late: bool = False  # some rank gave no answer in time
    calls: Mapping[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class CallCount:
    """The calls of one function on this rank since its last session, all of them settled.

    Calls write it, on any number of threads, and the listener reads it. watch: how a call is watched in which
    a peer has raised.
    """

    questions: Questions
    session: str
    ranks: Sequence[int]
    rank: int
    watch: Watch
    watchdog: Watchdog
    begun: int = 0
    under_way: dict[int, int] = field(default_factory=dict)  # thread -> its call
    # (call, begins) of each question that this rank is to ask: there before the call is begun, or has ended.
    asks: dict[tuple[int, bool], None] = field(default_factory=dict)
    is_called: bool = False  # a peer is to tune anew: this rank asks before its next call
    has_opened: bool = False  # a session that this rank was interrupted before

    def begin(self, *, asks: bool) -> int:
        """Begin a call of this thread; return its number. asks: this rank asks before it."""
        thread = get_ident()
        call = self.begun + 1  # no function is called before it is written: no other thread has this number
        if asks:
            self.is_called = False
            self.asks[call, True] = None
        self.under_way[thread] = call
        self.begun = call
        return call

    def end(self) -> None:
        """End the call of this thread."""
        self.under_way.pop(get_ident(), None)

    @property
    def ended(self) -> int:
        """The latest call that has ended with all before it."""
        return min([self.begun + 1, *self.under_way.values()]) - 1

    def ask(self, call: int, *, begins: bool = False) -> Answer:
        """Ask about a call, after it or before it; return the outcome.

        A store that is lost is an answer, too.
        """
        letter = Letter(self.session, call, self.rank, tuple(self.ranks), begins)
        try:
            return self.questions.answer(letter, self.ended)
        except StoreLost as error:
            return Answer(False, str(error), is_late=True)
        except BaseException:  # Ctrl-C: the peers must not wait, and may have opened a session
            with contextlib.suppress(StoreLost):
                text = f"no rank {self.rank} was interrupted"
                end = self.questions.do(lambda store: store.compare_set(letter.key(), "", text))
                self.has_opened = bytes(end) == b"yes"
            raise
        finally:
            self.asks.pop((call, begins), None)

    def tell(self, error: str) -> None:
        """Tell the peers that this thread has raised in the call that it ends: they may wait for it there."""
        call = self.under_way.get(get_ident(), 0)
        letter = Letter(self.session, call, self.rank, tuple(self.ranks), error=error)
        with contextlib.suppress(StoreLost):
            self.questions.do(lambda store: self.questions.post(store, letter))

    def is_in(self, call: int) -> bool:
        """Return whether some thread has begun this call, and not ended it."""
        return call in [*self.under_way.values()]


class Questions:
    """Asks peers about settled calls, and answers their questions."""

    def __init__(self, to_store: Connections) -> None:
        self.do = to_store.scout.do
        self._connections = to_store
        self._counts: weakref.WeakValueDictionary[str, CallCount] = weakref.WeakValueDictionary()
        self._asked: dict[str, tuple[float, Letter | None]] = {}  # own questions: when, and the letter posted
        self._posted: collections.Counter[int] = collections.Counter()  # letters, by reader
        self._listener: Courier | None = None

    def count(self, made: CallCount) -> CallCount:
        """Answer questions about these calls from now on."""
        self._counts[made.session] = made
        if self._listener is None:
            listener = _Listener(self._counts, self._asked, made.rank)
            self._listener = self._connections.take()
            self._listener.release = lambda: listener.close(self._connections.scout)
            self._listener.start(listener.listen)
        return made

    def post(self, store: Any, letter: Letter) -> None:
        for reader in letter.ranks:
            if reader != letter.rank:
                number, self._posted[reader] = self._posted[reader], self._posted[reader] + 1
                store.set(_slot(reader, letter.rank, number), _to_bytes(letter))
                store.set(_bell(reader), b"")  # after the letter

    def answer(self, letter: Letter, ended: int) -> Answer:
        """Return the outcome of a question that this rank asks; raises StoreLost."""
        began, late = time.monotonic(), 0
        deadline = began + ANSWER_S

        def look(store: Any) -> str:
            """Return the outcome; after the deadline write it, unless a rank has been inside the call."""
            nonlocal deadline, late
            outcome = peek(store, letter.key()).decode()
            if (now := time.monotonic()) < deadline or outcome:
                return outcome
            before, late = late, store.add(letter.key("/late"), 0)
            deadline = now + INSIDE_S
            return "" if late != before and now < began + LATEST_S else letter.give_up(store)

        def arrive(store: Any) -> None:
            if letter.arrive(store, ended) == 1:
                self._asked[letter.key()] = began, letter
                self.post(store, letter)

        self._forget(began - FORGOTTEN_S)
        self._asked[letter.key()] = began, None
        self.do(arrive)
        for pause_s in pauses(PAUSE_S):
            if outcome := self.do(look):
                break
            time.sleep(pause_s)
        calls = {rank: int(at.split()[0]) for rank, at in self.do(letter.calls_told).items()}
        self._connections.scout.start(letter.leave)
        kind, _, reason = outcome.partition(" ")
        return Answer(kind == "yes", reason, kind == "late", calls)

    def _forget(self, before: float) -> None:
        """Forget own old questions. Where a rank has died, nobody was the last: delete them here."""
        for key, (asked_at, letter) in tuple(self._asked.items()):
            if asked_at < before:
                self._asked.pop(key, None)
                if letter is not None:
                    self.do(letter.delete)


class _Listener:
    """Answers the questions of peers, on a thread with a connection of its own."""

    def __init__(self, counts: Mapping[str, CallCount], asked: Container[str], rank: int) -> None:
        self._counts, self._asked, self._rank = counts, asked, rank
        self._read: collections.Counter[int] = collections.Counter()  # letters, by writer
        self._is_closed = False
        self._open: list[Iterator[None]] = []  # letters that are being answered

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
            self._open = [letter for letter in self._open if next(letter, _DONE) is not _DONE]
            if self._is_closed or not self._open:
                return
            time.sleep(pause_s)

    def _read_letters(self, store: Any) -> None:
        if not store.check([_bell(self._rank)]):
            return
        store.delete_key(_bell(self._rank))  # before the letters: a later one rings again
        for peer in range(dist.get_world_size()):
            while store.check([slot := _slot(self._rank, peer, self._read[peer])]):
                letter = _read_letter(bytes(store.get(slot)))
                store.delete_key(slot)
                self._read[peer] += 1
                self._open.append(self._answered(store, letter))

    def _answered(self, store: Any, letter: Letter) -> Iterator[None]:
        """Answer a letter; yield while this rank has not gone far enough."""
        early, latest = time.monotonic() + EARLY_S, time.monotonic() + FORGOTTEN_S
        while (count := self._counts.get(letter.session)) is None:
            if letter.key() in self._asked and not letter.error:
                return  # and has opened a session since
            if time.monotonic() > early:  # the session has failed here, or another one began
                if not letter.error:
                    letter.leave(store)
                return
            yield
        if letter.error:
            yield from _followed(letter, count, early)
            return
        count.is_called |= letter.begins
        if not self._asks(count, letter):
            store.set(letter.key(f"/at/{self._rank}"), str(count.ended))
        while True:
            is_past = (count.begun if letter.begins else count.ended) >= letter.call
            if self._asks(count, letter):  # told before it is past the call: to be read after that
                return
            if is_past or time.monotonic() > latest:
                break
            if not letter.begins and count.is_in(letter.call) and not store.check([letter.key()]):
                store.add(letter.key("/late"), 1)
            yield
        if is_past:
            store.set(letter.key(f"/at/{self._rank}"), str(count.ended))
            done = "is in call" if letter.begins else "has not met it in call"
            store.compare_set(letter.key(), "", f"no rank {self._rank} {done} {letter.call}")
        letter.leave(store)

    def _asks(self, count: CallCount, letter: Letter) -> bool:
        """Return whether this rank asks the same, or has; then it counts itself out."""
        # In this order: it may go on to a later call meanwhile.
        return (letter.call, letter.begins) in count.asks or letter.key() in self._asked


def _followed(letter: Letter, count: CallCount, until: float) -> Iterator[None]:
    """Report this rank if it stays in the call in which a peer has raised, or in an earlier one."""
    followed, reason = 0, f"rank {letter.rank} has failed ({letter.error})"
    while max(followed, count.ended) < letter.call and time.monotonic() < until:
        call = count.begun
        if count.is_in(call) and followed < call <= letter.call:
            followed = call
            count.watchdog.follow(count.watch, reason, functools.partial(count.is_in, call))
        yield


def _bell(rank: int) -> str:
    return f"dist_autotune/letters/{rank}/bell"


def _slot(reader: int, writer: int, number: int) -> str:
    return f"dist_autotune/letters/{reader}/{writer}/{number}"


_questions: weakref.WeakKeyDictionary[Any, Questions] = weakref.WeakKeyDictionary()


def questions() -> Questions:
    """Return the questions of this process in the default process group."""
    world = dist.group.WORLD
    if (known := _questions.get(world)) is None:  # another thread may make them meanwhile
        known = _questions.setdefault(world, Questions(connections()))
    return known
