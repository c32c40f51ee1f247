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

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from msgspec import Struct, msgpack

from .courier import Connections, Courier, StoreLost, await_values, connections

if TYPE_CHECKING:
    from .watchdog import Watch, Watchdog

T = TypeVar("T")

ANSWER_S = 2.0  # a rank waits so long for an answer
LATEST_S = 10.0  # and so long where a peer was inside the call that is asked about, which may compile
OPERATION_S = 5.0  # a store that does not answer for so long is lost
BEAT_S = 0.25
FAILURES = 20  # of operations, after which a store is lost
EXIT_S = 2.0  # the process waits so long for its listener
FORGOTTEN_S = 60.0  # then no rank reads a question any more
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5e-3, 10e-3  # between looks at the store
EARLY_S = 5.0  # how long a question about an unknown session is kept: this rank may be about to end it


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
        """Tell the peers that this rank has raised in its latest call."""
        self.questions.tell(self, error)

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


_to_bytes, _read_letter = msgpack.Encoder().encode, msgpack.Decoder(Letter).decode


class _Keys:
    """The keys of one question."""

    def __init__(self, letter: Letter) -> None:
        self.end = f"dist_autotune/questions/{letter.session}/{letter.call}{'b' if letter.begins else ''}"
        self.asked, self.late, self.left = f"{self.end}/asked", f"{self.end}/late", f"{self.end}/left"

    def at(self, rank: int) -> str:
        return f"{self.end}/at/{rank}"

    def leave(self, store: Any, ranks: Sequence[int]) -> None:
        """Count this rank out; the last one deletes all."""
        if store.add(self.left, 1) == len(ranks):
            self.delete(store, ranks)

    def delete(self, store: Any, ranks: Sequence[int]) -> None:
        for key in (self.end, self.asked, self.late, self.left, *map(self.at, ranks)):
            store.delete_key(key)


class Questions:
    """What this process asks its peers about settled calls, and answers them."""

    def __init__(self, to_store: Connections) -> None:
        self._connections = to_store
        self._counts: weakref.WeakValueDictionary[str, CallCount] = weakref.WeakValueDictionary()
        self._asking = threading.Lock()  # a rank asks one question at a time: it has one letter to each peer
        self._asked: list[tuple[float, _Keys, Sequence[int]]] = []  # own questions, and when
        self._listener: Courier | None = None
        self._rank = -1
        self._is_closed = False

    def count(self, made: CallCount) -> CallCount:
        """Answer questions about these calls from now on."""
        self._counts[made.session], self._rank = made, made.rank
        if self._listener is None:
            self._listener = self._connections.take()
            listen = _Listener(self._counts, made.rank, lambda: self._is_closed).listen
            self._listener.start(listen)
        return made

    def close(self) -> None:
        """End the listener. Takes no lock: a garbage collector may call it."""
        self._is_closed = True
        if self._listener is not None:
            bell = _bell(self._rank)
            self._connections.scout.start(lambda store: store.set(bell, b""))

    def close_at_exit(self) -> None:
        """End the listener before the interpreter ends: a thread in torch's code would abort the process."""
        self.close()
        if self._listener is not None:
            self._listener.start(lambda store: None).wait(EXIT_S)  # behind the listening

    # -- asking --------------------------------------------------------------------------------------------

    def ask(self, count: CallCount, *, begins: bool) -> Answer:
        """Ask about the call that is made; return the outcome. A store that is lost is an answer, too."""
        letter = Letter(count.session, count.begun, count.rank, begins)
        keys, is_over = _Keys(letter), False
        with self._asking:
            count.is_asking = True
            try:
                answer = self._answer(count, letter, keys)
                is_over = True
                return answer
            except StoreLost as error:
                return Answer(False, str(error), is_late=True)
            finally:
                count.is_asking = False
                if not is_over:  # Ctrl-C: the peers must not wait, and may have opened a session
                    with contextlib.suppress(StoreLost):
                        text = f"no rank {count.rank} was interrupted"
                        end = self._do(lambda store: store.compare_set(keys.end, "", text))
                        count.has_opened = bytes(end) == b"yes"

    def _answer(self, count: CallCount, letter: Letter, keys: _Keys) -> Answer:
        ranks, began = count.ranks, time.monotonic()

        def arrive(store: Any) -> bool:
            while self._asked and self._asked[0][0] < began - FORGOTTEN_S:
                _, old, of = self._asked.pop(0)
                old.delete(store, of)  # where a rank has died, nobody is the last
            store.set(keys.at(count.rank), f"{count.ended} asks")
            arrived = store.add(keys.asked, 1)
            if arrived == len(ranks):
                store.compare_set(keys.end, "", "yes")
            return bool(arrived == 1)

        if is_first := self._do(arrive):
            self._asked.append((began, keys, ranks))
            self._write(letter, ranks)
        deadline, beats, pauses = began + ANSWER_S, 0, _pauses()
        while not self._do(lambda store: store.check([keys.end])):
            if (now := time.monotonic()) > deadline:
                late = self._do(lambda store: store.add(keys.late, 0))
                if late == beats or now > began + LATEST_S:
                    self._do(lambda store: self._give_up(store, keys, ranks))
                    break
                beats, deadline = late, now + 4 * BEAT_S
            time.sleep(next(pauses))

        def read(store: Any) -> tuple[str, dict[int, int]]:
            end = bytes(store.get(keys.end)).decode()
            told = [rank for rank in ranks if store.check([keys.at(rank)])]
            calls = {rank: int(bytes(store.get(keys.at(rank))).split()[0]) for rank in told}
            if is_first:
                keys.leave(store, ranks)
            return end, calls

        end, calls = self._do(read)
        kind, _, reason = end.partition(" ")
        return Answer(kind == "yes", reason, kind == "late", calls)

    @staticmethod
    def _give_up(store: Any, keys: _Keys, ranks: Sequence[int]) -> None:
        told = {rank: bytes(store.get(keys.at(rank))) for rank in ranks if store.check([keys.at(rank)])}
        missing = [rank for rank in ranks if b"asks" not in told.get(rank, b"")]
        names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        store.compare_set(keys.end, "", f"late {names} gave no answer within {ANSWER_S:g} s")

    def tell(self, count: CallCount, error: str) -> None:
        """Tell the peers that this rank has raised in the call that it ends: they may wait for it there."""
        with contextlib.suppress(StoreLost):
            self._write(Letter(count.session, count.begun, count.rank, error=error), count.ranks)

    def _write(self, letter: Letter, ranks: Sequence[int]) -> None:
        packed = _to_bytes(letter)

        def write(store: Any) -> None:
            for rank in ranks:
                if rank != letter.rank:
                    store.set(_slot(rank, letter.rank), packed)
                    store.set(_bell(rank), b"")  # behind the letter

        self._do(write)

    def _do(self, operation: Callable[[Any], T]) -> T:
        return self._connections.scout.do(operation, OPERATION_S)


class _Listener:
    """Answers the questions of peers, on a thread with a connection of its own."""

    def __init__(self, counts: Mapping[str, CallCount], rank: int, is_closed: Callable[[], bool]) -> None:
        self._counts, self._rank, self._is_closed = counts, rank, is_closed
        self._slots = [_slot(rank, peer) for peer in range(dist.get_world_size())]
        self._open: list[_Open] = []

    def listen(self, store: Any) -> None:
        """Answer until closed, or until the store has gone."""
        for _ in range(FAILURES):
            try:
                while not self._is_closed():
                    self._answer(store)
                return
            except dist.DistNetworkError:  # a trace on stderr for each operation on it
                return
            except (dist.DistError, RuntimeError):
                time.sleep(LAST_PAUSE_S)

    def _answer(self, store: Any) -> None:
        """Wait for letters, and answer all that have come."""
        await_values(store, [_bell(self._rank)])
        pauses = _pauses()
        while not self._is_closed():
            self._read_letters(store)
            self._open = [each for each in self._open if not each.is_answered(store)]
            if not self._open:
                return
            time.sleep(next(pauses))

    def _read_letters(self, store: Any) -> None:
        if not store.check([_bell(self._rank)]):
            return
        store.delete_key(_bell(self._rank))  # before the letters: a later one rings again
        for slot in self._slots:
            if store.check([slot]):
                letter = _read_letter(bytes(store.get(slot)))
                store.delete_key(slot)
                self._open.append(_Open(letter, self._counts, self._rank))


class _Open:
    """A letter of a peer that is not answered yet."""

    def __init__(self, letter: Letter, counts: Mapping[str, CallCount], rank: int) -> None:
        self._letter, self._keys, self._counts, self._rank = letter, _Keys(letter), counts, rank
        self._until = time.monotonic() + EARLY_S
        self._count: CallCount | None = None
        self._was_inside, self._beat_at = False, 0.0
        self._followed = 0  # the latest call that is followed

    def is_answered(self, store: Any) -> bool:
        """Answer the question if this rank has gone far enough; return whether nothing is left to do."""
        letter, keys = self._letter, self._keys
        if self._count is None:
            self._count = self._counts.get(letter.session)
            if self._count is None:
                return time.monotonic() > self._until  # the session has failed here, or another one began
            self._take(store, self._count)
        count = self._count
        asks = count.asks_before if letter.begins else count.asks_behind
        if letter.error:
            return self._is_followed(count)
        if asks == letter.call:
            if count.is_asking or not store.check([keys.end]):
                return not count.is_asking and time.monotonic() > self._until
        elif (count.begun if letter.begins else count.ended) >= letter.call:
            done = "is in call" if letter.begins else "has not met it in call"
            store.compare_set(keys.end, "", f"no rank {self._rank} {done} {letter.call}")
        elif not store.check([keys.end]):
            if self._was_inside and count.is_in(letter.call) and time.monotonic() > self._beat_at:
                self._beat_at = time.monotonic() + BEAT_S
                store.add(keys.late, 1)
            return False
        keys.leave(store, count.ranks)
        return True

    def _is_followed(self, count: CallCount) -> bool:
        """Report this rank if it stays in the call in which a peer has raised, or in an earlier one."""
        letter, call = self._letter, count.begun
        if count.is_in(call) and self._followed < call <= letter.call:
            self._followed = call
            reason = f"rank {letter.rank} has failed ({letter.error})"
            count.watchdog.follow(count.watch, reason, lambda: count.is_in(call))
        return max(self._followed, count.ended) >= letter.call or time.monotonic() > self._until

    def _take(self, store: Any, count: CallCount) -> None:
        letter, keys = self._letter, self._keys
        if letter.error:
            return
        self._was_inside = not letter.begins and count.is_in(letter.call)
        count.is_called |= letter.begins
        if (count.asks_before if letter.begins else count.asks_behind) != letter.call:
            store.set(keys.at(self._rank), str(count.ended))


def _bell(rank: int) -> str:
    return f"dist_autotune/letters/{rank}/bell"


def _slot(reader: int, writer: int) -> str:
    return f"dist_autotune/letters/{reader}/{writer}"


def _pauses() -> Iterator[float]:
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(1.3 * pause_s, LAST_PAUSE_S)


_questions: weakref.WeakKeyDictionary[Any, Questions] = weakref.WeakKeyDictionary()


def questions() -> Questions:
    """Return the questions of this process in the default process group."""
    world = dist.group.WORLD
    if (known := _questions.get(world)) is None:
        made = Questions(connections())
        known = _questions.setdefault(world, made)  # another thread may have made them meanwhile
        if known is made:
            weakref.finalize(world, made.close).atexit = False
            atexit.register(_close_at_exit, weakref.ref(made))
    return known


def _close_at_exit(known: weakref.ref[Questions]) -> None:
    if (of_world := known()) is not None:
        of_world.close_at_exit()
