"""One context on this rank: its configs, what failed, and what the run under way launches of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from triton.runtime.autotuner import Autotuner

from ..errors import NoValidConfig
from ..formatting import config_label, context_label
from ..search.context import Context
from ..search.expectation.flow import order_of
from ..search.expectation.keys import by_distance
from ..search.expectation.model import Told
from ..search.expectation.order import best_start
from ..search.messages import Claim, Part, Upgrade
from ..search.rules import BY_LAUNCH
from ..timing.samples import Samples
from ..triton_api.identity import KernelIdentity, value_text
from ..triton_api.launch import Key

SETTLED_FAILURES = 3  # in a row, of a settled config: then it is no longer tried, and the ranks are asked
FORMS = 8  # of a context: the candidates are compiled for so many; further ones by their launches
NONE_FAILED: Mapping[str, str] = {}


@dataclass(eq=False)
class Binding:
    """One context as launched through one Autotuner object: its configs by candidate digest."""

    tuner: Callable[[], Autotuner | None]  # a weak reference; of a `tunable` to nothing
    key: Key
    configs: dict[str, Any]  # or the options of a `tunable`
    rank_context: RankContext
    loaded: dict[tuple[str, int], Any] = field(default_factory=dict)  # (candidate, device) -> kernel


@dataclass(eq=False)
class RankContext:
    """What this rank knows of one context."""

    name: str
    kernel: str  # identity of the kernel
    source: KernelIdentity
    key: Key
    key_text: str
    texts: dict[str, str]  # of the candidates, by digest, in the order of the configs
    samples: Samples
    rank: int
    slot: str  # unique among the contexts of the kernel
    constants: str
    key_names: tuple[str, ...] = ()  # of the values of the key; of a `tunable` there are none
    is_choice: bool = False  # of a `tunable`
    is_joint: bool = False  # of one whose ranks take the same option in every run
    claim: Claim | None = None  # a result that it had when this rank first launched it
    holds_claim_back: bool = False  # the peers may not have it: it is reported, not launched
    like: str = ""  # the nearest tuned key; "": none
    # What this context begins with: an old winner, that key's, or what is expected to be the fastest.
    first: str = ""
    upgrade: Upgrade | None = None  # what is raced after an upgrade, as this rank's disk has it
    expected: str = ""  # the candidate expected to be the fastest ...
    expected_from: Mapping[str, int] = field(default_factory=dict)  # ... from so many times of other keys
    unlikely: Collection[str] = ()  # candidates that the search leaves out, as other keys expect them slower
    search: Context | None = None  # the state all ranks share, once one of them has announced it
    announced: bool = False  # by this rank
    bindings: list[Binding] = field(default_factory=list)
    bans: dict[str, str] = field(default_factory=dict)  # digest -> reason, found here
    reported_bans: set[str] = field(default_factory=set)
    # Of settled launches here, by digest: how often in a row a candidate has failed, and why the last time.
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    choice: str | None = None  # of the run under way
    ran: set[str] = field(default_factory=set)  # in the run under way
    launches: int = 0
    shares: dict[str, int] = field(default_factory=dict)  # candidate -> thousandths of the SMs that it holds
    is_preflighted: bool = False  # its candidates are compiled, or a backlog has them
    compiling: int = 0  # candidates that a backlog has still to compile or load
    forms: set[Any] = field(default_factory=set)  # met until all is compiled; see `keep_form`
    is_varied: bool = False  # it was launched in several forms
    launches_per_run: int = 0  # in the last run that launched it before it was settled
    is_published: bool = False  # its result, to where launches outside the function find it
    is_recorded: bool = False  # on disk, as one that waits for a result
    report: Part | None = None  # of the run under way, to the peers
    default: str = ""  # the candidate that is launched untuned, by digest

    def __post_init__(self) -> None:
        self.default = next(iter(self.texts), "")

    @property
    def title(self) -> str:
        return context_label(self.source.short_name, self.key_text)

    @property
    def named_key(self) -> str:
        """Return the key with the names of its values, as in `M=4096, a.dtype='torch.float16'`."""
        if not self.key_names:
            return self.key_text
        named = zip(self.key_names, self.key, strict=True)
        return ", ".join(f"{name}={value_text(value)}" for name, value in named)

    @property
    def is_settled(self) -> bool:
        """Return whether its result stands in this process."""
        return self.search is not None and self.search.stands

    @property
    def tuned(self) -> str | None:
        """Return the winner of a search, or the only candidate; None: not tuned."""
        if len(self.texts) == 1:
            return next(iter(self.texts))
        if self.search is None:
            return None if self.claim is None else self.claim[1]
        has_result = self.search.winner is not None and not self.search.provisional and self.search.settled
        return self.search.digests[self.search.incumbent] if has_result else None

    @property
    def measures(self) -> bool:
        """Return whether launches of this run are samples."""
        if self.search is None:
            return self.claim is None and not self.is_choice
        return self.search.judge == BY_LAUNCH and self.search.is_on_trial

    @property
    def checks_form(self) -> bool:
        """Return whether a sample may be of a form that is not compiled yet."""
        return self.measures and (self.is_varied or self.search is None)

    @property
    def is_to_preflight(self) -> bool:
        """Return whether its candidates are to be compiled before they are tried, in more forms too."""
        if self.is_preflighted and not self.compiling:
            return False
        return self.claim is None if self.search is None else self.search.is_tuned_by_launches

    def keep_form(self, form: Any) -> bool:
        """Return whether a form is new and the candidates are compiled for it: the first FORMS of them.

        form: the kernel that a launch has run; launches of one config that need other binaries run others.
        """
        if form in self.forms or len(self.forms) > FORMS:
            return False
        self.is_varied |= bool(self.forms)
        self.forms.add(form)  # one more than `FORMS` tells that there were more
        return len(self.forms) <= FORMS

    @property
    def forms_remark(self) -> str:
        return f"forms after the first {FORMS} left to their launches" if len(self.forms) > FORMS else ""

    @property
    def failing(self) -> dict[str, str]:
        """Return the candidates that have failed in each of the last settled launches, with reasons."""
        return {c: reason for c, (times, reason) in self.failures.items() if times >= SETTLED_FAILURES}

    def tries(self, candidate: str) -> bool:
        """Return whether a launch of this candidate, now, is a trial."""
        if len(self.texts) == 1 or candidate not in self.texts:
            return False
        if self.search is None:
            return self.claim is None
        return self.search.is_on_trial and self.search.digests[self.search.planned] == candidate

    def begin_with(
        self, winners: Mapping[str, str], told: Told, upgrade: Upgrade | None, *, tries_few: bool
    ) -> None:
        """Begin with the winner from before an upgrade, else with what is known of other keys.

        That is the candidate expected from their times, or the winner of the nearest one.

        winners: digests by tuned key. told: times by key and text. Both the same on all ranks, so that all
        begin with the same config. tries_few: the search tries what other keys let expect to be fast.
        """
        if (upgrade := upgrade or self.upgrade) is not None:
            self.upgrade, self.like, self.first = upgrade, "", upgrade[2][0]
            return
        usable = {key: winner for key, winner in winners.items() if winner in self.texts}
        self.like = next(iter(by_distance(self.key_text, usable)), "")
        self.first = usable.get(self.like, "")
        sizes = {key: len(times) for key, times in told.items()}
        is_new, self.expected_from = self.expected_from != sizes, sizes
        if is_new:
            text = best_start(self.key_text, self.texts.values(), told)
            self.expected = next((each for each, known in self.texts.items() if text and known == text), "")
        if self.expected and self.expected != self.first:
            self.like, self.first = "", self.expected
        if is_new and tries_few:
            candidates = self.candidates
            order = order_of(self.key_text, [*candidates.values()], told)
            likely = range(len(candidates)) if order is None else order.likely
            self.unlikely = {each for index, each in enumerate(candidates) if index not in likely}

    @property
    def candidates(self) -> dict[str, str]:
        """Return the texts of the candidates by digest, first the one that the context begins with."""
        return {self.first: self.texts[self.first], **self.texts} if self.first else self.texts

    @property
    def outside_race(self) -> set[str]:
        """Return the candidates that are not to be tried: others were, or are expected to be, better."""
        if self.search is not None:
            return {*self.search.digests[self.search.raced :], *self.unlikely}
        return {*self.unlikely} if self.upgrade is None else self.texts.keys() - set(self.upgrade[2])

    def report_earlier_runs(self) -> Part | None:
        """Return the statistic so far of the candidate on trial, if only other runs launched it here."""
        if self.search is None or self.search.trial is None or self.search.judge != BY_LAUNCH:
            return None
        return self.samples.report_earlier_runs(self.search.digests[self.search.trial])

    def footprint(self, ran: str | None) -> tuple[int, int]:
        """Return what a report tells of launches that still judge: their share of the SMs, and how many."""
        judges = self.search is None or self.search.is_tuned_by_launches
        if ran is None or not judges or ran not in self.shares:
            return 0, 1
        return self.shares[ran], max(self.launches, 1)

    def begin_run(self) -> None:
        """Forget the last run; the first launch chooses anew."""
        self.choice, self.launches, self.report = None, 0, None
        self.ran.clear()
        self.samples.begin_run()

    def chosen(self, binding: Binding, failed: Mapping[str, str] = NONE_FAILED) -> str:
        """Return the candidate of this run; another one where it `failed`, or the Autotuner has pruned it."""
        if self.choice is None:
            planned = "" if self.search is None else self.search.digests[self.search.planned]
            is_usable = planned in self.texts and planned not in self.bans
            self.choice = planned if is_usable else self.stand_in()
        if self.choice in binding.configs and self.choice not in failed:
            return self.choice
        return self.stand_in(binding.configs, failed)

    def stand_in(self, among: Collection[str] | None = None, failed: Mapping[str, str] = NONE_FAILED) -> str:
        """Return the incumbent, or the first candidate that has not failed; raises NoValidConfig.

        among: the candidates that an Autotuner has left; None: all that this rank has met the context with.
        failed: those that have failed in this launch, with reasons.
        """
        candidates = self.candidates
        known = candidates if among is None else among
        banned = set(self.bans)
        if self.search is not None:
            incumbent = self.search.digests[self.search.incumbent]
            banned |= {self.search.digests[index] for index in self.search.banned}
        elif self.claim is None or self.holds_claim_back:
            incumbent = next(iter(candidates))
        else:
            incumbent = self.claim[1]
        for candidate in (incumbent, *candidates, *known):
            if candidate not in banned and candidate not in failed and candidate in known:
                return candidate
        reasons = " ".join(self._reasons(failed))
        raise NoValidConfig(f"{self.title}: all {len(self.texts)} configs failed on some rank. {reasons}")

    def _reasons(self, failed: Mapping[str, str]) -> Iterator[str]:
        own = {**failed, **self.bans}
        for candidate, text in self.texts.items():
            if candidate in own:
                yield f"Rank {self.rank}, {config_label(text)}: {own[candidate].rstrip('.')}."
            elif self.search is not None and candidate in self.search.digests:
                index = self.search.digests.index(candidate)
                rank, reason = self.search.banned.get(index, (self.rank, "pruned away"))
                yield f"Rank {rank}, {config_label(text)}: {reason.rstrip('.')}."

    def config_of(self, candidate: str) -> Any:
        """Return the config of a candidate, or the option of a `tunable`; None where this rank has none."""
        holders = (binding.configs for binding in self.bindings if candidate in binding.configs)
        return next(holders, {}).get(candidate)
