"""Which candidates leave the function's outputs, bit for bit, as they are with its first configs.

Before anything is timed, plans run twice each: the base plan, then the other candidates beside it, one of
each kernel at once. Where the outputs differ from the base plan's, half of those candidates run, and so on
down to one. Options of the host are compared after the kernels launched so far are tuned, one by one, each
followed by the kernels that it brings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import TuningError
from ..formatting import config_label
from .context import Context
from .messages import Bits, RunReport
from .phase import NEW_KEYS_RUNS, Phase
from .rules import BY_RUN

Plan = dict[str, int]  # context -> candidate

RUNS = 2  # of each plan: the second shows whether it repeats itself
PATIENCE = 3  # runs that do not launch the batch
SHOWN_CONFIGS = 2  # of a plan, in an error
REMEDY = (
    "Have it use the same random numbers in each run, name the state that it changes in preserve=, leave "
    "out of its result what may change, or give it bits='any'."
)


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
        self.open()

    def open(self) -> None:
        """Begin a session: its inputs are others, and so are its digests."""
        self.is_over = True  # nothing is left to compare, for now
        self.remark = ""  # for the log
        self.new_bans: list[tuple[Context, int]] = []  # of the last run
        self._has_given_up = False  # `check`: there is nothing to compare, or it changes by itself
        self._base: Plan = {}
        self._origins: dict[str, Plan] = {}  # the options beside which a context was first launched
        self._beside: Plan = {}  # the options of the next run
        self._batch: Plan = {}  # the candidates compared in it
        self._batches: list[Plan] = []  # halves that come next
        self._digests: list[str] = []  # of the runs of the batch
        self._references: dict[tuple[tuple[str, int], ...], str] = {}  # digest of the base plan, by `beside`
        self._base_runs = self._misses = 0
        self._bringing_runs = 0  # in a row that announced contexts
        self._is_back = True  # the last run was beside the base plan's options
        for context in self._contexts.values():
            context.output_digests = {}
        self.compared: Plan = {}  # in the next run

    def explains_absence(self, context: Context) -> bool:
        """Return whether a context may be launched again though it was not: under other options."""
        return not self.is_over and context.judge == BY_RUN

    @property
    def is_choosing(self) -> bool:
        """Return whether the run under way has an option that may bring kernels."""
        return bool(self._beside) or any(self._contexts[name].is_choice for name in self._batch)

    @property
    def admits(self) -> bool:
        """Return whether a new kernel is tuned: the option that is launched may have brought it."""
        return self.is_choosing and self._bringing_runs <= NEW_KEYS_RUNS

    # -- one run -------------------------------------------------------------------------------------------

    def record(self, merged: RunReport) -> None:
        """Compare the outputs of one run of all ranks. Raises TuningError if `same` cannot be kept."""
        self.remark, self.new_bans = "", []
        is_new = any(part.announcement for part in merged.parts.values())
        self._bringing_runs = self._bringing_runs + 1 if is_new else 0
        self._meet(merged)
        if (bits := merged.bits) is None or self._has_given_up:
            return
        changed = self._changed(merged)
        if not changed:
            self._record_base(merged, bits)
        elif self._batch:
            self._record_batch(changed, bits)
        elif self._needs_base:
            self._miss(changed)
        elif len(changed) == 1:
            ((name, index),) = changed.items()
            known = None if index is None else self._contexts[name].output_digests.get(index)
            if index is not None and known not in (None, bits.digest) and self._origins[name] == self._beside:
                self._ban_unsteady(name, index, bits)

    def _meet(self, merged: RunReport) -> None:
        """Add new contexts to the base plan; set it anew until it has run, or when its candidates fail."""
        if any(index in self._contexts[name].banned for name, index in self._base.items()):
            self._restart()
        for name, context in self._contexts.items():
            if name in merged.parts and name not in self._origins:
                options = {n: i for n, i in self._batch.items() if self._contexts[n].is_choice}
                self._origins[name] = {**self._beside, **options}
            if name not in self._base or not self._references:
                first = [i for i, number in sorted(context.bit_classes.items()) if not number]
                self._base[name] = next((i for i in first if i not in context.banned), context.incumbent)

    def _restart(self) -> None:
        """Compare anew with another base plan: classes against the last one are void."""
        self._references, self._batches, self._base_runs = {}, [], 0
        self._compare({})
        for context in self._contexts.values():
            context.output_digests = {}
            if not context.settled:
                context.bit_classes = {}

    def _changed(self, merged: RunReport) -> dict[str, int | None]:
        """Return the launched candidates that are not of the base plan and its options; None: several."""
        plan, launched = {**self._base, **self._beside}, merged.launched & self._contexts.keys()
        ran = {name: self._contexts[name].index_of(merged.ran(name)) for name in launched}
        return {name: index for name, index in sorted(ran.items()) if index != plan[name]}

    def _record_base(self, merged: RunReport, bits: Bits) -> None:
        if self._batch:
            self._miss({})
        if not bits.tensors and self._needs_base:
            self._give_up(
                "the function returns no tensor: name in outputs= what it writes, or use bits='any'"
            )
            return
        reference = self._references.setdefault(_key(self._beside), bits.digest)
        if reference != bits.digest and self._beside:
            self._ban_unsteady(*list(self._beside.items())[-1], bits)
        elif reference != bits.digest:
            names = sorted(merged.launched & self._base.keys())
            base = [(self._contexts[name], self._base[name]) for name in names[:SHOWN_CONFIGS]]
            configs = "; ".join(
                f"{context.title} {config_label(context.texts[index])}" for context, index in base
            )
            if further := len(names) - len(base):
                configs += f"; and those of {further} more contexts"
            self._give_up(
                f"two runs with the same configs ({configs}) have different bits in {_where(bits)}: the "
                f"function, or one of these configs, does not repeat itself. {REMEDY}"
            )
        else:
            self._base_runs += not self._beside
            for name in merged.launched & self._base.keys():
                context, index = self._contexts[name], self._base[name]
                context.output_digests[index] = bits.digest
                if context.status != "cached" or self._rule == "same":  # else nobody has compared it
                    context.bit_classes[index] = 0

    def _record_batch(self, changed: dict[str, int | None], bits: Bits) -> None:
        if changed != self._batch:
            self._miss(changed)
            return
        self._digests.append(bits.digest)
        if bits.digest != self._references[_key(self._beside)] and len(self._batch) > 1:
            items = list(self._batch.items())
            half = len(items) // 2
            self._batches += [dict(items[half:]), dict(items[:half])]
            self._compare({})
        elif len(self._digests) == RUNS:
            batch, is_steady = self._batch, len(set(self._digests)) == 1
            self._compare({})
            for name, index in batch.items():
                if is_steady:
                    self._classify(name, index, bits)
                else:
                    self._ban_unsteady(name, index, bits)

    def _miss(self, changed: Mapping[str, int | None]) -> None:
        """Repeat the batch without banned candidates; at last without contexts that are not launched."""
        left = {n: i for n, i in self._batch.items() if i not in self._contexts[n].banned}
        self._misses += 1
        if left == self._batch and self._misses >= PATIENCE:
            for name in left.keys() - changed.keys():
                self._contexts[name].settle("starved")
            left = {name: index for name, index in left.items() if name in changed}
            if left == self._batch:  # or both are empty: it was the base plan
                self._give_up(
                    "other configs are launched than those planned, so their bits cannot be compared"
                )
        if left != self._batch:
            self._compare(left)

    def _compare(self, batch: Plan) -> None:
        self._batch, self._digests, self._misses = batch, [], 0

    def _classify(self, name: str, index: int, bits: Bits) -> None:
        context, reference = self._contexts[name], self._references[_key(self._beside)]
        known, digests = context.bit_classes, context.output_digests
        alike = (number for i, number in known.items() if digests.get(i) == bits.digest)
        number = next(alike, max(known.values(), default=0) + 1)
        known[index] = 0 if bits.digest == reference else number
        context.output_digests[index] = bits.digest
        if context.is_choice:
            self._references[_key({**self._beside, name: index})] = bits.digest
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
        self._batches = []
        self._compare({})

    # -- the next run --------------------------------------------------------------------------------------

    def plan_run(self, *, closing: bool) -> None:
        """Plan the next comparison; start the searches of compared kernels. closing: compare nothing."""
        self.is_over = closing
        if closing:
            self._batches, self._beside = [], {}
            self._compare({})
            self._check({})
            return
        if not self._batch:
            batch = self._batches.pop() if self._batches else self._next_batch()
            if batch:
                self._compare(batch)
        waits = bool(self._pending(is_choice=False) or self._pending(is_choice=True))
        if self._batch or self._needs_base:
            self._is_back = not self.is_choosing
            self._check({**self._base, **self._beside, **self._batch})
        elif self._tunes_kernels and (waits or self._beside):
            self._check(self._beside)  # an option stays until the kernels that it brings are tuned
        elif not self._is_back:
            self._is_back = True
            self._check(self._base)  # the next comparison starts from the base plan's contexts
        else:
            self.is_over = True
            self._check({})

    def plan(self) -> Plan:
        """Return what is compared in the next run; other contexts try what they try by themselves."""
        compared = {
            n: i
            for n, i in self.compared.items()
            if n in self._contexts and i not in self._contexts[n].banned
        }
        return {**super().plan(), **compared}

    def _check(self, plan: Plan) -> None:
        self.compared = {name: index for name, index in plan.items() if name in self._contexts}

    @property
    def _needs_base(self) -> bool:
        """Return whether the base plan has still to repeat itself before anything is searched."""
        is_searching = any(not context.settled for context in self._contexts.values())
        return is_searching and self._base_runs < RUNS and not self._has_given_up

    @property
    def _tunes_kernels(self) -> bool:
        return any(context.is_tuned_by_launches for context in self._contexts.values())

    def _next_batch(self) -> Plan:
        """Return a candidate of each kernel that waits, of those first launched beside the same options.

        If none waits, their searches begin; once these are over, return the next option.
        """
        if self._needs_base:
            return {}
        if kernels := self._pending(is_choice=False):
            self._beside = self._origins[next(iter(kernels))]
            return {name: i for name, i in kernels.items() if self._origins[name] == self._beside}
        for context in self._contexts.values():
            if context.is_tuned_by_launches and context.trial is None:
                context.start()  # also if one candidate is left: a result with a time is kept
        if self._tunes_kernels:
            return {}
        choices = self._pending(is_choice=True)
        if not choices:
            self._beside = {}
            return {}
        name = next(iter(choices))
        self._beside = self._origins[name]
        return {name: choices[name]}

    def _pending(self, *, is_choice: bool) -> Plan:
        """Return the next candidate of each context that has some to compare."""
        pending: Plan = {}
        for name, context in self._contexts.items():
            is_known = name in self._origins and not self._has_given_up
            if context.settled or context.is_choice != is_choice or not is_known:
                continue
            if any(i in self._contexts[choice].banned for choice, i in self._origins[name].items()):
                context.settle("starved")  # nothing will launch it
                continue
            known = context.bit_classes.keys() | context.banned.keys() | {self._base[name]}
            left = (index for index in range(len(context.digests)) if index not in known)
            if (index := next(left, None)) is not None:
                pending[name] = index
        return pending

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
            self._give_up("other configs are launched than those planned, so their bits cannot be compared")
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
