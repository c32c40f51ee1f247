"""Which candidates leave the function's outputs, bit for bit, as they are with its first configs.

Before anything is timed, plans run twice each: the base plan, then the other candidates beside it, one of
each kernel at once. Where the outputs differ from the base plan's, half of those candidates run, and so on
down to one. Options of the host are compared after the kernels launched so far are tuned, one by one, each
followed by the kernels that it brings.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ..errors import TuningError
from ..formatting import config_label
from .context import Context, Status
from .messages import Bits, RunReport
from .phase import NEW_KEYS_RUNS, Phase
from .plans.space import Plan
from .rules import BY_RUN

RUNS = 2  # of each plan: the second shows whether it repeats itself
PATIENCE = 3  # runs that do not launch the batch
SHOWN_CONFIGS = 2  # of a plan, in an error
REMEDY = (
    "Have it use the same random numbers in each run, name the state that it changes in preserve=, leave "
    "out of its result what may change, or give it bits='any'."
)
UNPLANNED = "other configs are launched than those planned, so their bits cannot be compared"


@dataclass(frozen=True)
class Compared:
    """What a run compares: a batch of candidates, beside options of the host and the rest of the base plan.

    is_free: contexts try what they try by themselves; only the options are planned.
    """

    options: Plan = field(default_factory=dict)
    batch: Plan = field(default_factory=dict)
    is_free: bool = False


NOTHING = Compared(is_free=True)  # is left to compare, for now


@dataclass(frozen=True)
class Ran:
    """What a run launched unlike base plan and options (None: several candidates), and its outputs."""

    changed: Mapping[str, int | None]
    bits: Bits


Comparison: TypeAlias = Generator[Compared, Ran, None]  # it is sent the last run, of whatever phase


def runs_at_most(candidates: Iterable[int]) -> int:
    """Return how many runs the comparison takes at most, for so many candidates of each context."""
    return RUNS * (1 + 2 * sum(count - 1 for count in candidates)) + 1


class CompareBits(Phase):
    """Sorts candidates into classes of equal outputs; class 0 is that of the base plan's candidate.

    The base plan has each context's first viable candidate, or the result that it came with.
    """

    def __init__(self, contexts: Mapping[str, Context], rule: str) -> None:
        super().__init__(contexts)
        self._rule = rule
        self._base: Plan = {}
        self._origins: dict[str, Plan] = {}  # the options beside which a context was first launched
        self._halves: list[Plan] = []  # of batches that change outputs, still to compare; the last one first
        self.open()

    def open(self) -> None:
        """Begin a session, which goes on where the last one was cut short."""
        self.remark = ""  # for the log
        self.new_bans: list[tuple[Context, int]] = []  # of the last run
        self._has_given_up = False  # `check`: there is nothing to compare, or it changes by itself
        self._bringing_runs = 0  # in a row that announced contexts
        known = self._contexts.keys()
        self._origins = {name: each for name, each in self._origins.items() if known >= {name, *each}}
        self._begin()
        self._asked = Compared() if self._needs_base else NOTHING

    def _begin(self) -> None:
        """Compare with another base plan, or in another session: its inputs and digests are others."""
        self._asked = NOTHING  # of the next run
        self._base = {n: i for n, i in self._base.items() if n in self._contexts and self._works(n, i)}
        self._references: dict[tuple[tuple[str, int], ...], str] = {}  # digest of the base plan, by options
        self._base_runs = 0
        for context in self._contexts.values():
            context.output_digests = {}
        self._comparison = self._compared()
        next(self._comparison)

    @property
    def is_over(self) -> bool:
        return self._asked is NOTHING

    @property
    def compared(self) -> Plan:
        """Return what the next run compares; contexts try by themselves what is not in it."""
        base = {} if self._asked.is_free else self._base
        plan = {**base, **self._asked.options, **self._asked.batch}
        return {name: i for name, i in plan.items() if name in self._contexts and self._works(name, i)}

    def plan(self) -> Plan:
        return {**super().plan(), **self.compared}

    def explains_absence(self, context: Context) -> bool:
        """Return whether a context may be launched again though it was not: under other options."""
        if self.is_over or context.name in self._asked.batch:
            return False
        return context.judge == BY_RUN or self._origins.get(context.name, {}) != self._asked.options

    @property
    def admits(self) -> bool:
        """Return whether a new kernel is tuned: the option that is launched may have brought it."""
        return bool(self._options) and self._bringing_runs <= NEW_KEYS_RUNS

    @property
    def _options(self) -> Plan:
        """Return the options of the next run, those of its batch too, that are not the base plan's."""
        batch = {name: i for name, i in self._asked.batch.items() if self._contexts[name].is_choice}
        return {**self._asked.options, **batch}

    def _works(self, name: str, index: int) -> bool:
        return index not in self._contexts[name].banned

    # -- what a run has told -------------------------------------------------------------------------------

    def record(self, merged: RunReport, *, closing: bool) -> None:
        """Compare the outputs of one run of all ranks, and plan the next one; closing: compare nothing.

        Raises TuningError if `same` cannot be kept.
        """
        self.remark, self.new_bans = "", []
        is_new = any(part.announcement for part in merged.parts.values())
        self._bringing_runs = self._bringing_runs + 1 if is_new else 0
        self._meet(merged)
        if (bits := merged.bits) is not None:
            changed = self._changed(merged)
            if not self._has_given_up:
                self._record_repeated(changed, merged, bits)
            if not (closing and self.is_over):
                self._asked = self._comparison.send(Ran(changed, bits))
        self._asked = NOTHING if closing else self._asked

    def _meet(self, merged: RunReport) -> None:
        """Add new contexts to the base plan; set it anew until it has run, or when its candidates fail."""
        if not all(self._works(name, index) for name, index in self._base.items()):
            self._begin()
            for context in self._contexts.values():
                context.bit_classes = context.bit_classes if context.settled else {}
        for name, context in self._contexts.items():
            if name in merged.parts and name not in self._origins:
                self._origins[name] = self._options
            if name not in self._base or not self._references:
                known = self._base.get(name, context.incumbent)
                first = [i for i, number in sorted(context.bit_classes.items()) if not number]
                self._base[name] = next((i for i in first if self._works(name, i)), known)

    def _changed(self, merged: RunReport) -> dict[str, int | None]:
        """Return the launched candidates that are not of the base plan and its options; None: several."""
        plan, launched = {**self._base, **self._asked.options}, merged.launched & self._contexts.keys()
        ran = {name: self._contexts[name].index_of(merged.ran(name)) for name in launched}
        return {name: index for name, index in sorted(ran.items()) if index != plan[name]}

    def _record_repeated(self, changed: Mapping[str, int | None], merged: RunReport, bits: Bits) -> None:
        """Compare with earlier runs of the base plan, or of it with one other candidate."""
        if not changed:
            self._record_base(merged, bits)
            return
        (name, index), *others = changed.items()
        if index is None or others or self._origins[name] != self._asked.options:
            return
        if self._contexts[name].output_digests.get(index, bits.digest) != bits.digest:
            self._ban_unsteady(name, index, bits)

    def _record_base(self, merged: RunReport, bits: Bits) -> None:
        if not bits.tensors and self._needs_base:
            self._give_up(
                "the function returns no tensor: name in outputs= what it writes, or use bits='any'"
            )
            return
        reference = self._references.setdefault(_key(self._asked.options), bits.digest)
        if reference == bits.digest:
            self._base_runs += not self._asked.options
            for name in merged.launched & self._base.keys():
                context, index = self._contexts[name], self._base[name]
                context.output_digests[index] = bits.digest
                if context.status is not Status.CACHED or self._rule == "same":  # else nobody has compared it
                    context.bit_classes[index] = 0
        elif self._asked.options:
            self._ban_unsteady(*list(self._asked.options.items())[-1], bits)
        else:
            self._give_up(
                f"two runs with the same configs ({self._shown_base(merged)}) have different bits in "
                f"{_where(bits)}: the function, or one of these configs, does not repeat itself. {REMEDY}"
            )

    def _shown_base(self, merged: RunReport) -> str:
        names = sorted(merged.launched & self._base.keys())
        contexts = [self._contexts[name] for name in names[:SHOWN_CONFIGS]]
        configs = "; ".join(f"{c.title} {config_label(c.texts[self._base[c.name]])}" for c in contexts)
        further = len(names) - len(contexts)
        return configs + (f"; and those of {further} more contexts" if further else "")

    # -- the comparison ------------------------------------------------------------------------------------

    def _compared(self) -> Comparison:
        """Compare the base plan with itself, then kernels and options with it, as they come."""
        options: Plan = {}
        is_away = False  # other options than the base plan's have been launched since that was
        yield NOTHING
        while True:
            if self._needs_base:
                yield from self._repeat_base({})
            elif kernels := self._pending(is_choice=False):
                kernels = self._half_of(kernels)
                options = self._origins[next(iter(kernels))]
                batch = {name: i for name, i in kernels.items() if self._origins[name] == options}
                is_away |= bool(options)
                yield from self._sort(options, batch)
            elif (name := self._start_searches()) is not None:
                # An option stays until the kernels that it brings are tuned.
                options = self._origins.get(name, {})
                is_away |= bool(options)
                is_waiting = bool(options or self._pending(is_choice=True))
                yield Compared(options, is_free=True) if is_waiting else NOTHING
            elif choices := self._pending(is_choice=True):
                name = next(iter(choices))
                options, is_away = self._origins[name], True
                yield from self._sort(options, {name: choices[name]})
            else:
                # What comes next starts from the base plan's contexts.
                yield Compared() if is_away else NOTHING
                options, is_away = {}, False

    @property
    def _needs_base(self) -> bool:
        """Return whether the base plan has still to repeat itself before anything is searched."""
        is_searching = any(not context.settled for context in self._contexts.values())
        return is_searching and self._base_runs < RUNS and not self._has_given_up

    def _start_searches(self) -> str | None:
        """Let compared kernels be tuned by their launches; return the first that is under way."""
        tuned = [context for context in self._contexts.values() if context.is_tuned_by_launches]
        for context in tuned:
            if context.trial is None:
                context.start()  # also if one candidate is left: a result with a time is kept
        return next((context.name for context in tuned if context.is_tuned_by_launches), None)

    def _pending(self, *, is_choice: bool) -> Plan:
        """Return the next candidate of each context that has some to compare."""
        pending: Plan = {}
        for name, context in self._contexts.items():
            is_known = name in self._origins and not self._has_given_up
            if context.settled or context.is_choice != is_choice or not is_known:
                continue
            if not all(self._works(choice, i) for choice, i in self._origins[name].items()):
                context.settle(Status.STARVED)  # nothing will launch it
                continue
            known = context.bit_classes.keys() | context.banned.keys() | {self._base[name]}
            left = (index for index in range(len(context.digests)) if index not in known)
            if (index := next(left, None)) is not None:
                pending[name] = index
        return pending

    def _repeat_base(self, options: Plan) -> Comparison:
        """Run the base plan, beside options, until its outputs are known."""
        while not self._has_given_up and (self._needs_base or _key(options) not in self._references):
            yield from self._outputs_of(options, {})

    def _half_of(self, kernels: Plan) -> Plan:
        """Return what is pending of the half to compare next; all if there is none."""
        while self._halves:
            if half := {n: i for n, i in self._halves[-1].items() if kernels.get(n) == i}:
                return half
            self._halves.pop()
        return kernels

    def _sort(self, options: Plan, batch: Plan) -> Comparison:
        """Run a batch twice; where outputs change, each half of it, down to what changes them."""
        yield from self._repeat_base(options)
        found: list[Bits] = []
        while len(found) < RUNS:
            bits = yield from self._outputs_of(options, batch)
            if bits is None:
                return  # what is left of it is still pending
            found.append(bits)
            if bits.digest != self._references[_key(options)] and len(batch) > 1:
                items, middle = list(batch.items()), len(batch) // 2
                self._halves += [dict(items[middle:]), dict(items[:middle])]
                return
        for name, index in batch.items():
            if found[0].digest == found[1].digest:
                self._classify(options, name, index, found[1])
            else:
                self._ban_unsteady(name, index, found[1])

    def _outputs_of(self, options: Plan, batch: Plan) -> Generator[Compared, Ran, Bits | None]:
        """Return the outputs of a run of the batch; None: some of it fails, or is not launched any more."""
        for _ in range(PATIENCE):
            ran = yield Compared(options, batch)
            if ran.changed == batch:
                return ran.bits
            if any(self._contexts[name].settled or not self._works(name, i) for name, i in batch.items()):
                return None
        self._give_up(UNPLANNED)
        return None

    def _classify(self, options: Plan, name: str, index: int, bits: Bits) -> None:
        context, reference = self._contexts[name], self._references[_key(options)]
        known, digests = context.bit_classes, context.output_digests
        alike = (number for i, number in known.items() if digests.get(i) == bits.digest)
        number = next(alike, max(known.values(), default=0) + 1)
        known[index] = 0 if bits.digest == reference else number
        context.output_digests[index] = bits.digest
        if context.is_choice:
            self._references[_key({**options, name: index})] = bits.digest
        if bits.digest != reference and self._rule == "same":
            self._ban(name, index, bits, "other bits than with the first config")

    def _ban_unsteady(self, name: str, index: int, bits: Bits) -> None:
        self._ban(name, index, bits, "does not repeat itself: other bits in another run")

    def _ban(self, name: str, index: int, bits: Bits, reason: str) -> None:
        context = self._contexts[name]
        if index not in context.banned:
            self.new_bans.append((context, index))
            rank, path = bits.differs or (0, "the outputs")
            context.ban_after_run(index, rank, f"{reason}, in {path}")

    def _give_up(self, why: str) -> None:
        if self._rule == "same":
            raise TuningError(f"bits='same': {why}")
        self._has_given_up, self.remark = True, f"bits='check': {why}"

    # -- the end -------------------------------------------------------------------------------------------

    def accepts(self, merged: RunReport, *, closing: bool) -> bool:
        """Return whether a run with all winners may be the last: under `same`, with the base plan's bits.

        Candidates that change nothing each may do so together. Then the context that loses least by it goes
        back to the base plan; when the session must close, all of them.
        """
        reference, bits = self._references.get(()), merged.bits
        if self._rule != "same" or bits is None or reference in (None, bits.digest):
            return True
        contexts = [self._contexts[name] for name in self._changed(merged)]
        contexts = [c for c in contexts if c.incumbent != self._base[c.name]]
        if self.new_bans:  # that was why
            return False
        if not contexts:
            self._give_up(UNPLANNED)
        contexts.sort(key=lambda c: (c.times.ratio(self._base[c.name], c.incumbent), c.name))
        given_up = contexts if closing else contexts[:1]
        for context in given_up:
            context.settle(context.status, self._base[context.name])
        titles = ", ".join(context.title for context in given_up)
        self.remark = f"the winners together change {_where(bits)}: {titles} keeps its first config"
        return False


def _key(plan: Plan) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(plan.items()))


def _where(bits: Bits) -> str:
    """Return `the result[0] on rank 1`."""
    return "the outputs" if bits.differs is None else f"{bits.differs[1]} on rank {bits.differs[0]}"
