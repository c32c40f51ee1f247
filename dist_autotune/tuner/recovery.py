"""Keeps the journal of one tuned function, and takes up what an earlier process has left in one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..formatting import counted
from ..launch.rank_context import Local
from ..logs.records import Banned
from ..search.kernel_families import context_name
from ..search.messages import Part, Payload
from ..search.resume import Bans, resume
from ..search.state import Tuning
from ..search.unfinished import Event, Past
from ..storage.journal import Journal, Try
from ..storage.orphans import IDLE, Samples
from . import decisions


class Recovery:
    """This rank's side of it. What ranks must agree on is in the payload that opens a session.

    entry_of: names all that must be equal for samples to be used again: kernel, key, arguments, candidates.
    """

    def __init__(self, journal: Journal, entry_of: Callable[[Local], str]) -> None:
        self.bans: Bans = {}  # for the crash that was found when the session opened
        self.taken_up: list[Event] = []  # what the state of this session began with
        self._journal = journal
        self._entry_of = entry_of
        self._entries: dict[str, str] = {}
        self._samples: Samples = {}
        self._is_trying = False

    # -- opening a session ---------------------------------------------------------------------------------

    def said(self, payload: Payload) -> Payload:
        """Return what this rank says when a session opens, with what an earlier process has left."""
        orphan = self._journal.look()
        if orphan is None:
            return payload
        past = Past.of(orphan.session, payload.rank, orphan.devices, orphan.events)
        crashes = {orphan.session: orphan.crash} if orphan.crash is not None else {}
        return replace(payload, past=past, crashes=crashes)

    def begin(self, session: str, devices: str, merged: Payload, tuning: Tuning) -> list[str]:
        """Begin the journal of a session that has just been opened; return remarks for the log.

        Where the ranks have a past, `tuning` is empty and takes it up. Raises NoValidConfig, on all ranks
        alike, where candidates have crashed until none was left.
        """
        self.bans, self._entries, self._samples, self.taken_up = {}, {}, {}, []
        if merged.past is None:
            standing: list[Event] = [{"open": session}, {"bans": tuning.crash_bans}]
            is_anew = self._journal.is_dropped and tuning.crash_bans
            self._journal.begin(session, devices, standing if is_anew else None)
            return []
        past, orphan = merged.past, self._journal.orphan
        resumed = resume(tuning, past, merged.crashes, devices)
        self.bans, self.taken_up = resumed.bans, resumed.events
        if orphan is not None and (orphan.session != past.session or not resumed.runs):
            orphan.samples, orphan.entries = {}, {}
        if orphan is not None:
            self._samples, self._entries = orphan.samples, dict(orphan.entries)
        self._journal.begin(session, devices, resumed.events)
        own = "" if self._samples or not resumed.runs else "; this rank has no samples of its own from it"
        planned = counted(tuning.planned_runs, "planned run")
        remark = f"resumed {resumed.runs} of {planned} from session {past.session}{own}"
        return [remark, *(f"banned: {text}" for text in self._banned_texts(tuning))]

    def _banned_texts(self, tuning: Tuning) -> Iterator[str]:
        for name, candidates in self.bans.items():
            context = tuning.contexts.get(name)
            title = f"a kernel that was new ({name})" if context is None else context.title
            texts = {} if context is None else dict(zip(context.digests, context.texts, strict=True))
            for candidate, (_, reason) in candidates.items():
                yield f"{title} with {texts.get(candidate, candidate)} {reason}"

    def banned(self, tuning: Tuning) -> Iterator[Banned]:
        """Yield the records of the bans for the crash that was found when the session opened."""
        for name, candidates in self.bans.items():
            if name in tuning.contexts:
                yield from decisions.bans(tuning.runs, tuning.contexts[name], Part(bans=candidates))

    def recall(self, local: Local, tuning: Tuning) -> dict[str, str]:
        """Give a context, at its first launch in this process, what an earlier one knew of it.

        Returns the candidates that it must not launch, with reasons.
        """
        local.entry = self._entry_of(local)
        if self._entries.get(local.name, local.entry) != local.entry:  # other constants, or pruned otherwise
            local.name = context_name(f"{local.kernel}!anew", local.slot)
        local.context = tuning.contexts.get(local.name)
        if local.name in self._samples:
            local.stopwatch.restore(self._samples[local.name])
        if local.context is not None:
            return {}
        known = {candidate for candidate, _ in local.order}
        bans = tuning.crash_bans.get(local.name, {})
        return {candidate: reason for candidate, (_, reason) in bans.items() if candidate in known}

    @property
    def run_samples(self) -> dict[str, list[tuple[float, float]]]:
        """The samples of whole runs that an earlier process took."""
        return self._samples.get("", {})

    # -- one run -------------------------------------------------------------------------------------------

    def run(self, tuning: Tuning) -> None:
        """Say what the next run tries, before it begins."""
        tries = {}
        for name, index in decisions.plan_of(tuning).items():
            context = tuning.contexts[name]
            tries[name] = Try(context.digests[index], f"{context.title}: {context.texts[index]}")
        waits = any(context.waiting for context in tuning.contexts.unsettled)
        is_counted = tuning.on_hold  # the runs between trials are part of what decides when the next may be
        self._is_trying = bool(tries) or waits or tuning.plan_trial is not None or is_counted
        self._journal.run(tuning.runs, tries)

    @contextlib.contextmanager
    def trying(self, local: Local, candidate: str) -> Iterator[None]:
        """Say that a launch on trial is under way while the block runs."""
        self._journal.launching(local.name, self._try(local, candidate))
        try:
            yield
        finally:
            self._journal.launched()

    @contextlib.contextmanager
    def loading(self, local: Local, candidate: str) -> Iterator[None]:
        """Say that a candidate is being loaded while the block runs."""
        with self._journal.aside(local.name, self._try(local, candidate)):
            yield

    @staticmethod
    def _try(local: Local, candidate: str) -> Try:
        return Try(candidate, f"{local.title}: {dict(local.order)[candidate]}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Say that no candidate is running while the block runs."""
        mark = self._journal.mark
        self._journal.ran()
        yield
        if mark != IDLE:
            self._journal.launched()

    def ran(self) -> None:
        """Say that no candidate is running any more."""
        self._journal.ran()

    def failed(self) -> None:
        """Say that this rank leaves the run with an exception."""
        self._journal.failed()

    def agreed(self, merged: Payload, own: dict[str, tuple[str, float, float]], told: list[Local]) -> None:
        """Keep a run, if anything follows from it: what all ranks said, and this rank's samples."""
        is_news = any(part.announcement or part.bans for part in merged.parts.values())
        if not (self._is_trying or is_news):
            return
        entries = {local.name: local.entry for local in told if local.name not in self._entries}
        self._entries.update(entries)
        self._journal.agreed(merged.decisive(), own, entries)

    # -- the end -------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Leave what there is to the next process: in this one the next session starts anew."""
        self._journal.drop()

    def discard(self, tuning: Tuning) -> None:
        """Forget everything: all is settled, or nothing can be."""
        tuning.crash_bans.clear()
        self._journal.discard()
