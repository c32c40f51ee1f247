"""The vote of settled calls, which nobody waits for: when do all ranks take up a new key?

Each rank counts the settled calls of a function since its last session, which names the ballot. A call
without a new key sends nothing: its word is the count, which a thread of the rank tells when asked.

1. A rank that meets a new key in call n tells the hub, which asks all ranks for their words of call n, and
   waits for them. A rank answers once it has finished that call, however late. A rank that is to tune anew
   asks before it makes call n, and is answered by ranks that have begun it.
2. All words have come. If all ranks have met a new key, or are to tune anew, and wait, they do it in call n.
3. Else nobody waits any more. The hub asks each rank to stop: a rank that has begun c calls promises not to
   begin call c + 2 before it knows the outcome, and tells that number.
4. The largest of these numbers is the call in which all ranks open a session. No rank is past it, and the
   outcome comes while they make the calls before it.

So all ranks open a session in one call, or none does. What can go wrong delays learning, and raises nothing:

* A rank is late in call n: step 2 comes later. Who waits for its word goes on after `timeout_s`.
* A rank raises in call n: its word is that it has finished the call, and does not wait. Peers that stay in
  that call are reported: they may wait for it in a collective.
* A rank stops for good: its words are missing, nothing is taken up. If it stops between steps 3 and 4, who
  has promised to stop goes on after `timeout_s`; if behind step 4, so does who waits at the opening. Who
  went on, and had asked to tune anew, asks again.
* A rank meets another new key while a round is under way: it does not wait for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .wire import HubMessage, Reply

if TYPE_CHECKING:
    from .watchdog import Watch

STOPS_AFTER = 2  # calls, counted from the last one begun
ROUNDS = 256  # that a hub remembers: of functions, the latest ones


@dataclass
class _BallotRound:
    """The words of the ranks about one call of a function, and the outcome."""

    call: int
    words: dict[int, bool] = field(default_factory=dict)  # rank -> it has met a new key, and waits
    stops: dict[int, int] = field(default_factory=dict)  # rank -> the call that it does not begin before
    is_begun_enough: bool = False  # to answer: who asks has not made the call
    is_asked_to_stop: bool = False
    opens_at: int | None = None


class BallotBox:
    """The hub's side: receives the words of the ranks and writes a letter to each rank."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._rounds: dict[str, _BallotRound] = {}  # by ballot
        self._letters: dict[int, list[HubMessage]] = {rank: [] for rank in ranks}  # not known to be read
        self._sent = dict.fromkeys(ranks, 0)  # letters to each rank
        self._listening: dict[int, tuple[int, Reply]] = {}

    def handle(self, message: HubMessage, reply: Reply) -> None:
        rank, ballot = int(message["rank"]), message["ballot"]
        if message["op"] == "listen":
            self._listen(rank, message, reply)
            return
        call, known = int(message["call"]), self._rounds.get(ballot)
        match message["op"]:
            case "raised":
                self._write(self._ranks, "raised", ballot, call, rank=rank, error=message["error"])
            case "met":
                self._met(rank, ballot, call, waits=bool(message["waits"]), begins=False)
            case "begins":
                self._met(rank, ballot, call, waits=True, begins=True)
            case "finished" if known is not None and known.call == call and not known.is_asked_to_stop:
                if known.words.get(rank):  # it has waited until now
                    self._write([rank], "words", ballot, call, all=False)
                known.words[rank] = False
                self._count(ballot, known)
            case "stops" if (
                known is not None and known.opens_at is None and len(known.words) == len(self._ranks)
            ):
                known.stops[rank] = call
                if len(known.stops) == len(self._ranks):
                    known.opens_at = max(known.stops.values())
                    self._write(self._ranks, "opens", ballot, known.opens_at)

    def _met(self, rank: int, ballot: str, call: int, *, waits: bool, begins: bool) -> None:
        known = self._rounds.get(ballot)
        if known is None or (known.opens_at is not None and call > known.opens_at):
            known = self._rounds[ballot] = _BallotRound(call)
            while len(self._rounds) > ROUNDS:
                del self._rounds[next(iter(self._rounds))]
            self._ask(ballot, known, begins=begins)
        elif begins and call == known.call and not known.is_begun_enough:
            self._ask(ballot, known, begins=True)
        said = known.words.get(rank) if call == known.call else False
        if said is None:
            known.words[rank] = waits
            self._count(ballot, known)
        elif not (said and waits) or known.is_asked_to_stop:  # else it waits, and has only said so twice
            self._write([rank], "words", ballot, call, all=False)

    def _ask(self, ballot: str, known: _BallotRound, *, begins: bool) -> None:
        known.is_begun_enough = begins
        self._write(self._ranks, "asked", ballot, known.call, is_begun_enough=begins)

    def _count(self, ballot: str, known: _BallotRound) -> None:
        """End the wait for words if all have come."""
        if len(known.words) < len(self._ranks) or known.is_asked_to_stop:
            return
        is_all = all(known.words.values())
        self._write(self._ranks, "words", ballot, known.call, all=is_all)
        if is_all:
            del self._rounds[ballot]  # the session has another ballot
        else:
            known.is_asked_to_stop = True
            self._write(self._ranks, "stop", ballot, known.call)

    def _write(self, ranks: Sequence[int], about: str, ballot: str, call: int, **fields: Any) -> None:
        """Write a letter to each of these ranks; a rank that listens gets it at once."""
        letter = {"ballot": ballot, "about": about, "call": call, **fields}
        for rank in ranks:
            self._letters[rank].append(letter)
            self._sent[rank] += 1
            if rank in self._listening:
                request, reply = self._listening.pop(rank)
                self._deliver(rank, request, reply)

    def _listen(self, rank: int, message: HubMessage, reply: Reply) -> None:
        """Answer with the letters that the rank has not read; now, or when there are some."""
        letters, read = self._letters[rank], int(message["call"])
        del letters[: max(len(letters) - (self._sent[rank] - read), 0)]
        self._listening.pop(rank, None)
        if letters:
            self._deliver(rank, message["id"], reply)
        else:
            self._listening[rank] = message["id"], reply

    def _deliver(self, rank: int, request: int, reply: Reply) -> None:
        reply({"id": request, "letters": list(self._letters[rank]), "read": self._sent[rank]})


class Ballot:
    """One rank's side: `begin` and `end` around each settled call; its other methods are its thread's.

    post: sends a word to the hub, (op, ballot, call, waits=). If that fails, the thread tells the hub that
    this rank does not wait, as soon as the hub asks. skip: called where the peers come to an opening in a
    call that this rank has made.
    """

    def __init__(
        self,
        name: str,
        post: Callable[..., bool],
        timeout_s: float,
        skip: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self._post, self._timeout_s, self._skip = name, post, timeout_s, skip
        self.watch: Watch | None = None  # where a peer has raised in the call that this rank is in
        self.begun = self.ended = 0  # calls
        self.has_missed_opening = False  # since this rank has last asked to tune anew
        self._limit = math.inf  # the call that is not begun before `_opens_at` is known
        self._opens_at: int | None = None
        self._asked: HubMessage | None = None  # the hub's letter that this rank has not answered
        self._is_unheard = False  # the hub could not be told that this rank is to tune anew
        self._posted_in = 0  # the latest call whose word this rank posts itself
        self._interrupted_in = 0  # the latest call at whose end a Ctrl-C ended the wait for words
        self._answers: dict[int, bool] = {}  # call -> all ranks have met a new key in it
        self._failures: dict[int, HubMessage] = {}  # rank -> the latest call in which it has raised
        self._warned_in = 0  # the latest call for which `peer_failure` returned one
        self._changed = threading.Condition()

    # -- settled calls -------------------------------------------------------------------------------------

    def begin(self, *, asks: bool = False) -> bool:
        """Begin a call; return whether all ranks open a session in it. asks: this rank is to tune anew.

        Where a Ctrl-C ended the wait behind the call before, all words may have come: peers wait at the
        opening for this rank.
        """
        before, self._interrupted_in = self._interrupted_in, 0
        if before == self.begun > 0 and self._answer(before, min(self._timeout_s, 1.0)):
            self.begun += 1
            return True
        if asks:
            self.has_missed_opening = False
            self._posted_in = self.begun + 1  # before the thread sees that the call has begun
        call = self.begun = self.begun + 1
        try:
            return (call >= self._limit and self._opens(call)) or (asks and self._ask("begins", call))
        except BaseException:  # Ctrl-C while it waits: the call is not made, and peers do not count it
            self.begun -= 1
            raise

    def end(self, *, has_new_key: bool, waits: bool = True) -> bool:
        """End a call; return whether all ranks have met a new key in it. Only a rank that has waits."""
        call = self.begun
        if has_new_key:
            self._posted_in = call  # before the thread sees that the call has ended
        self.ended = call
        return has_new_key and self._ask("met", call, waits=waits)

    def _ask(self, op: str, call: int, *, waits: bool = True) -> bool:
        """Tell the hub, and wait for the words of all; return whether all open a session in this call."""
        if self._answers.get(call):  # a Ctrl-C ended its first wait, and peers are in the session
            return True
        is_over = False  # the hub knows that this rank does not wait
        try:
            is_sent = self._post(op, self.name, call, waits=waits)
            self._is_unheard |= op == "begins" and not is_sent
            if not (is_sent and waits):
                is_over = is_sent
                return False
            answer = self._answer(call, self._timeout_s)
            if answer is None and self._post("finished", self.name, call, waits=False):
                answer = self._answer(call, min(self._timeout_s, 1.0))
            is_over = answer is not None
            return bool(answer)
        except BaseException:
            self._interrupted_in = call if op == "met" else 0
            raise
        finally:
            if not is_over:
                self._leave_to_thread(call)

    def _leave_to_thread(self, call: int) -> None:
        """Let the thread tell the hub that this rank does not wait for the words of a call."""
        with self._changed:
            self._posted_in = 0
            known = self._asked
            if known is None or (known["about"], known["call"]) == ("asked", call):
                self._asked = {"about": "left", "call": call}

    def report(self, error: str) -> None:
        """Tell the peers that this rank has raised in the call that it ends."""
        self._post("raised", self.name, self.begun, waits=False, error=error)

    def is_in(self, call: int) -> bool:
        """Return whether this rank has begun this call as its latest one, and not ended it."""
        return self.ended < self.begun == call

    def _answer(self, call: int, timeout_s: float) -> bool | None:
        with self._changed:
            self._changed.wait_for(lambda: call in self._answers, timeout_s)
            return self._answers.get(call)

    def _opens(self, call: int) -> bool:
        """Wait for the call in which all open a session; return whether it is this one."""
        with self._changed:
            # The second: a call on another thread has been told.
            self._changed.wait_for(lambda: self._opens_at is not None or call < self._limit, self._timeout_s)
            if call < self._limit:
                return False
            opens = self._opens_at == call
            self.has_missed_opening |= self._opens_at is None
            if opens or self._opens_at is None:  # or its time is up
                self._limit, self._opens_at = math.inf, None
            return opens

    # -- the thread of the rank ----------------------------------------------------------------------------

    def take(self, letter: HubMessage) -> None:
        """Take in a message of the hub."""
        about, call = letter["about"], int(letter["call"])
        with self._changed:
            if about in ("asked", "stop"):
                self._asked = letter
            elif about == "words":
                self._answers[call] = bool(letter["all"]) or self._answers.get(call, False)
                self._answers.pop(call - ROUNDS, None)
            elif about == "opens" and (self.begun < call or self._limit <= call):
                self._limit = self._opens_at = call  # the second: whoever has begun the call waits there
            elif about == "opens":
                self._limit, self.has_missed_opening = math.inf, True  # it has gone on without: too late
                self._skip()
            elif about == "raised":
                self._failures[letter["rank"]] = letter
            self._changed.notify_all()

    @property
    def is_asked(self) -> bool:
        return self._asked is not None

    def tell(self) -> None:
        """Post the word that the hub waits for, if the call has gone far enough."""
        letter = self._asked
        if letter is None or not self._has_reached(letter):
            return
        call = int(letter["call"])
        if letter["about"] == "stop":
            is_sent = self._post("stops", self.name, self._stop(), waits=False)
        else:
            is_sent = call == self._posted_in or self._post("finished", self.name, call, waits=False)
        with self._changed:
            if is_sent and self._asked is letter:
                self._asked = None
            if is_sent and self._is_unheard:
                self._is_unheard, self.has_missed_opening = False, True

    def _has_reached(self, letter: HubMessage) -> bool:
        """Return whether this rank has gone far enough to answer a letter."""
        if letter["about"] in ("stop", "left"):
            return True
        return bool((self.begun if letter["is_begun_enough"] else self.ended) >= letter["call"])

    def peer_failure(self) -> tuple[int, str] | None:
        """Return (call, reason) once for the call that this rank is in, if a peer has raised in it or later.

        This rank may hear of a failure before it begins the call in which the peer has raised.
        """
        call = self.begun
        if not self.is_in(call) or call == self._warned_in:
            return None
        letters = [letter for letter in self._failures.values() if letter["call"] >= call]
        if not letters:
            return None
        self._warned_in, first = call, min(letters, key=lambda letter: int(letter["call"]))
        return call, f"rank {first['rank']} has failed ({first['error']})"

    def _stop(self) -> int:
        """Promise not to begin a call before the outcome is known; return which."""
        self._opens_at = None
        while True:
            limit = self.begun + STOPS_AFTER
            self._limit = limit
            if self.begun < limit:  # else another call was begun between these lines
                return limit
