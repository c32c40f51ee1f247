"""This rank's side of all its contexts: what it tells its peers of a run, and takes in of their answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from ..search.context_search import Context, Outcome
from ..search.messages import MIXED, Part
from ..search.rules import BY_LAUNCH
from .kernel_ids import KernelNames
from .rank_context import Local


class LocalContexts:
    """The contexts that this rank has launched, by name."""

    def __init__(
        self, names: KernelNames, agree: str, rank: int, on_ban: Callable[[Local, str, str], None]
    ) -> None:
        self.by_name: dict[str, Local] = {}
        self.has_news = False  # the ranks have agreed on something since the last run began
        self._names = names
        self._agree = agree
        self._rank = rank
        self._on_ban = on_ban

    def find(self, kernel: str, key_text: str) -> tuple[Local | None, str]:
        """Return the context of a kernel's key, if there is one, and what tells it from others of the kernel.

        That is the key, or with `agree="ordinal"` its order among those launched here.
        """
        own = [local for local in self.by_name.values() if local.kernel == kernel]
        for local in own:
            if local.key_text == key_text:
                return local, local.slot
        if self._agree == "key":
            return None, key_text
        taken = {local.slot for local in own}
        return None, next(slot for n in range(len(own) + 1) if (slot := f"@{n}") not in taken)

    def ban(self, local: Local, candidate: str, reason: str) -> None:
        """Keep that a candidate failed here; the peers are told at the end of the run."""
        local.bans[candidate] = reason
        self._on_ban(local, candidate, reason)

    def rename(self, names: Mapping[str, str]) -> None:
        """Call contexts as the peers do: their kernels are one, though their candidates differ."""
        for old, new in names.items():
            local = self.by_name.pop(old, None)
            if local is not None:
                local.name = new
                self.by_name[new] = local

    def forget(self, names: Iterable[str]) -> None:
        gone = set(names)
        self.has_news = True
        self.by_name = {name: local for name, local in self.by_name.items() if name not in gone}

    # -- one run -------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Forget the last run."""
        self.has_news = False
        for local in self.by_name.values():
            local.begin_run()

    def abandon_run(self) -> None:
        """Drop what the run under way has measured: it raised."""
        for local in self.by_name.values():
            local.stopwatch.abandon()
            local.begin_run()

    def launched(self) -> list[str]:
        """Return what this run has launched, as `kernel[key] with config`; any thread may ask.

        Only what runs on the device at this moment, or is being launched, where the clock can tell; else only
        what is on trial, if anything is.
        """
        chosen = []
        for local in list(self.by_name.values()):
            told = local.stopwatch.report  # of the run that is waited for, which may be an earlier one
            candidate = told.ran if told is not None and told.pending else local.choice
            if candidate is not None:
                chosen.append((local, dict(local.order).get(candidate, "several configs")))
        running = [(local, text) for local, text in chosen if local.stopwatch.is_running]
        trials = [
            (local, text) for local, text in chosen if local.context is None or local.context.is_on_trial
        ]
        return [f"{local.title} with {text}" for local, text in running or trials or chosen]

    def tell(self, *, waits: bool) -> dict[str, Part]:
        """Return what is to be told the peers of this run.

        `waits`: read every clock now; otherwise those whose device work is done, or due.
        """
        return {local.name: self._tell(local, waits) for local in list(self._to_tell())}

    def new_sources(self) -> dict[str, str]:
        """Return the source digests of the functions in the kernels that this run announces, by name."""
        locals_ = self.by_name.values()
        new = {
            local.source
            for local in locals_
            if local.told is not None and local.told.announcement is not None
        }
        told = {name for source in new for name, _ in source.texts}
        texts: dict[str, set[str]] = {}
        for name, text in (pair for local in locals_ for pair in local.source.texts):
            if name in told:
                texts.setdefault(name, set()).add(text)
        return {name: " ".join(sorted(digests)) for name, digests in texts.items()}

    def take(
        self, contexts: Mapping[str, Context], outcomes: Mapping[str, Outcome], *, late_ms: float
    ) -> None:
        """Take in what the ranks agreed of the run that was told; `late_ms`: see `Stopwatch.take`."""
        self.has_news = True
        for local in self.by_name.values():
            if local.told is None:
                # Met in a settled call and not launched since: peers may have announced it meanwhile.
                local.context = local.context or contexts.get(local.name)
                continue
            context = local.context = contexts[local.name]
            local.announced = True
            local.told_bans.update(local.told.bans)
            by_launch = outcomes[local.name].judge == BY_LAUNCH
            counts = outcomes[local.name].kind == "sample" and by_launch
            local.stopwatch.take(waiting=context.waiting, counts=counts, late_ms=late_ms)

    def _to_tell(self) -> Iterator[Local]:
        for local in self.by_name.values():
            has_run = local.ran or local.stopwatch.report is not None
            if has_run or local.bans.keys() - local.told_bans or local.retold() is not None:
                yield local

    def _tell(self, local: Local, waits: bool) -> Part:
        ran = None if not local.ran else next(iter(local.ran)) if len(local.ran) == 1 else MIXED
        is_trial = bool(local.ran) and not local.is_waiting  # else the run told is an earlier one
        if is_trial or local.stopwatch.report is not None:
            report = local.stopwatch.tell(ran, waits=waits)
        else:
            report = local.retold() or Part()
        untold = {c: (self._rank, reason) for c, reason in local.bans.items() if c not in local.told_bans}
        kernel_id = self._names.alias(local.kernel) if local.family else ""
        siblings = self._names.siblings(local.kernel)
        announcement = None
        if not local.announced:
            place = list(self.by_name).index(local.name)
            announcement = local.announcement(kernel_id, siblings, place)
        local.told = replace(report, bans=untold, announcement=announcement)
        return local.told
