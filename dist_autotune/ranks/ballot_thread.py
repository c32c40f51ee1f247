"""A rank's thread for ballots: receives the hub's letters, and posts the words that it asks for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from .ballots import ROUNDS, Ballot
from .client import Client, HubLost, HubSilent
from .store import StoreLost
from .watchdog import Watchdog
from .wire import HubMessage

LISTENS_S = 0.5  # between two looks whether it is to end, or is asked for a word
LOOKS_S, LEAST_LOOKS_S = 20e-3, 1e-3  # the same while the hub waits for a word; the second: at first
RETRY_S = 0.5  # after the hub was lost
CONNECTIONS = 2  # how often a word is sent where the hub hangs up


class BallotThread:
    """Listens to the hub for the ballots of one rank. Starts with the first ballot; ends with `close`."""

    def __init__(self, new_client: Callable[[], Client | None], watchdog: Watchdog) -> None:
        self._new_client, self._watchdog = new_client, watchdog
        self._ballots: dict[str, Ballot] = {}
        self._early: dict[str, list[HubMessage]] = {}  # of ballots that this rank has not begun yet
        self._sender: Client | None = None  # of the calls
        self._own: Client | None = None  # of the thread
        self._read = 0  # letters
        self._missed: list[None] = []  # openings of sessions that this rank has not come to
        self._lock, self._sending = threading.Lock(), threading.Lock()  # the second: of `_sender`
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def ballot(self, name: str, timeout_s: float, last: Ballot | None) -> Ballot:
        """Return a new ballot. last: of the same function; it has ended."""
        if last is not None:
            self._ballots.pop(last.name, None)
        ballot = Ballot(name, self._post, timeout_s, lambda: self._missed.append(None))
        with self._lock:
            for letter in self._early.pop(name, []):  # before the thread brings it later ones
                ballot.take(letter)
            self._ballots[name] = ballot
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="dist_autotune ballots", daemon=True)
            self._thread.start()
        return ballot

    def take_missed(self) -> int:
        """Return how many openings of sessions this rank has missed since this was last asked."""
        count = len(self._missed)  # the thread may add one meanwhile
        del self._missed[:count]
        return count

    def close(self) -> None:
        """End the thread at its next look. Takes no lock: a garbage collector may call it, on any thread."""
        self._is_closed = True

    def _post(self, op: str, ballot: str, call: int, *, waits: bool, error: str = "") -> bool:
        """Send a word; return whether that worked. On the thread itself: raise if it did not."""
        word = {"ballot": ballot, "call": call, "waits": waits, "error": error}
        if threading.current_thread() is self._thread:
            assert self._own is not None
            self._own.notify(op, 0, **word)
            return True
        with self._sending:
            for _ in range(CONNECTIONS):
                with contextlib.suppress(HubLost):  # it may take another connection
                    try:
                        self._sender = self._sender or self._new_client()
                        if self._sender is not None:
                            self._sender.notify(op, 0, **word)
                        return self._sender is not None
                    except (StoreLost, HubSilent):
                        return False
        return False

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                self._own = self._own or self._new_client()
                if self._own is None:  # the hub is not there yet
                    time.sleep(LOOKS_S)
                else:
                    self._listen(self._own)
            except (StoreLost, HubLost, HubSilent):
                self._own = None
                time.sleep(RETRY_S)
        for client in (self._own, self._sender):
            if client is not None:
                client.close()

    def _listen(self, client: Client) -> None:
        """Wait for letters and take them in."""
        request, pause_s = client.send("listen", 0, ballot="", call=self._read), LEAST_LOOKS_S
        while not self._is_closed:
            ballots = list(self._ballots.values())
            for ballot in ballots:
                self._follow_peer_failure(ballot)
            asked = [ballot for ballot in ballots if ballot.is_asked]
            pause_s = min(1.5 * pause_s, LOOKS_S) if asked else LEAST_LOOKS_S
            reply = client.receive(request, pause_s if asked else LISTENS_S)
            for ballot in asked:
                ballot.tell()
            if reply is not None:
                letters = reply["letters"]
                for self._read, letter in enumerate(letters, int(reply["read"]) - len(letters) + 1):
                    self._take(letter)
                return

    def _take(self, letter: HubMessage) -> None:
        with self._lock:
            ballot = self._ballots.get(letter["ballot"])
            if ballot is None:
                self._early.setdefault(letter["ballot"], []).append(letter)
                while len(self._early) > ROUNDS:
                    del self._early[next(iter(self._early))]
                return
        ballot.take(letter)
        ballot.tell()

    def _follow_peer_failure(self, ballot: Ballot) -> None:
        """Report this rank if it stays in a call in which a peer has raised: it may wait for that peer."""
        if (found := ballot.peer_failure()) is not None and (watch := ballot.watch) is not None:
            call, reason = found
            self._watchdog.follow(watch, reason, lambda: ballot.is_in(call))
