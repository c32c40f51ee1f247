"""All contexts of this rank: what it reports of a run to its peers, and what follows from their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..search.context import Context, Outcome
from ..search.messages import MIXED, Announcement, Part
from ..search.rules import BY_LAUNCH
from .kernel_names import KernelNames
from .rank_context import RankContext


class RankContexts:
    """The contexts that this rank has launched, by name."""

    def __init__(
        self, names: KernelNames, agree: str, on_ban: Callable[[RankContext, str, str], None]
    ) -> None:
        self.by_name: dict[str, RankContext] = {}
        self.has_news = False  # the ranks have agreed on something since the last run began
        self._names = names
        self._agree = agree
        self._on_ban = on_ban

    def find(self, kernel: str, key_text: str) -> tuple[RankContext | None, str]:
        """Return the context of a kernel's key, if there is one, and its slot among those of the kernel.

        That is the key, or with `agree="ordinal"` its order among those launched here.
        """
        own = [context for context in self.by_name.values() if context.kernel == kernel]
        for context in own:
            if context.key_text == key_text:
                return context, context.slot
        if self._agree == "key":
            return None, key_text
        taken = {context.slot for context in own}
        return None, next(slot for n in range(len(own) + 1) if (slot := f"@{n}") not in taken)

    def ban(self, context: RankContext, bans: Mapping[str, str]) -> None:
        """Keep which candidates failed here, and why; the peers hear of it at the end of the run."""
        for candidate, reason in bans.items():
            context.bans[candidate] = reason
            self._on_ban(context, candidate, reason)

    def rename(self, names: Mapping[str, str]) -> None:
        """Call contexts as the peers do: their kernels are one, though their candidates differ."""
        for old, new in names.items():
            context = self.by_name.pop(old, None)
            if context is not None:
                context.name = new
                self.by_name[new] = context

    def forget(self, names: Iterable[str]) -> None:
        self.has_news = True
        for name in names:
            self.by_name.pop(name, None)

    # -- one run -------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Forget the last run."""
        self.has_news = False
        for context in self.by_name.values():
            context.begin_run()

    def abandon_run(self) -> None:
        """Drop what the run under way has measured: it raised."""
        for context in self.by_name.values():
            context.samples.abandon_run()
            context.begin_run()

    def launched(self) -> list[str]:
        """Return what this run has launched, as `kernel[key] with config`; any thread may ask.

        Only what runs on the device at this moment, or is being launched, where the clock can tell; else only
        what is on trial, if anything is.
        """
        chosen = []
        for context in list(self.by_name.values()):
            report = context.samples.report  # of the run that is waited for, which may be an earlier one
            candidate = report.ran if report is not None and report.pending else context.choice
            if candidate is not None:
                text = context.texts.get(candidate, "several configs")
                chosen.append((context, f"{context.title} with {text}"))
        running = [text for context, text in chosen if context.samples.is_running]
        trials = [text for context, text in chosen if context.search is None or context.search.is_on_trial]
        return running or trials or [text for _, text in chosen]

    def report_run(self, *, waits: bool) -> dict[str, Part]:
        """Return what to tell the peers of this run. `waits`: read every clock now; see `Samples`."""
        reports = {}
        for place, context in enumerate(self.by_name.values()):
            earlier = context.report_earlier_runs()
            bans = {
                c: (context.rank, why) for c, why in context.bans.items() if c not in context.reported_bans
            }
            is_told_again = context.samples.report is not None
            if not (context.ran or is_told_again or bans or earlier is not None):
                continue
            if is_told_again or (context.ran and not context.is_waiting):
                ran = None if not context.ran else MIXED if len(context.ran) > 1 else next(iter(context.ran))
                part = context.samples.report_run(ran, waits=waits)
            else:
                part = earlier or Part()
            announcement = None if context.announced else self._announcement(context, place)
            context.report = reports[context.name] = replace(part, bans=bans, announcement=announcement)
        return reports

    def _announcement(self, context: RankContext, place: int) -> Announcement:
        claim = context.claim
        return Announcement(
            rank=context.rank,
            kernel=context.source.short_name,
            key=context.key_text,
            order=tuple(context.texts.items()),
            shared=tuple(sorted(context.texts)),
            is_choice=context.is_choice,
            kernel_id=self._names.alias(context.kernel),
            family=context.family,
            siblings=self._names.siblings(context.kernel),
            place=place,
            slot=context.slot,
            claim=None if claim is None else (claim.rank, claim.candidate, claim.ms),
        )

    def reported(self) -> list[RankContext]:
        """Return the contexts of which the peers hear at the end of this run."""
        return [context for context in self.by_name.values() if context.report is not None]

    def announced_now(self) -> list[RankContext]:
        """Return the contexts that this run announces to the peers."""
        return [context for context in self.reported() if context.report and context.report.announcement]

    def new_sources(self) -> dict[str, str]:
        """Return the source digests of the functions in the kernels that this run announces, by name."""
        new = {name for context in self.announced_now() for name, _ in context.source.texts}
        texts: dict[str, set[str]] = {}
        for context in self.by_name.values():
            for name, text in context.source.texts:
                texts.setdefault(name, set()).add(text)
        return {name: " ".join(sorted(digests)) for name, digests in texts.items() if name in new}

    def apply_outcomes(
        self, searches: Mapping[str, Context], outcomes: Mapping[str, Outcome], *, late_ms: float
    ) -> None:
        """Keep or drop the samples of the reported run; `late_ms`: see `Samples.apply_outcome`."""
        self.has_news = True
        for context in self.by_name.values():
            if context.report is None:
                # Met in a settled call and not launched since: peers may have announced it meanwhile.
                context.search = context.search or searches.get(context.name)
                continue
            search, outcome = searches[context.name], outcomes[context.name]
            context.search, context.announced = search, True
            context.reported_bans.update(context.report.bans)
            counts = outcome.kind == "sample" and outcome.judge == BY_LAUNCH
            context.samples.apply_outcome(waiting=search.waiting, counts=counts, late_ms=late_ms)
