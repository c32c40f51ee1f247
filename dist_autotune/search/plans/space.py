"""The space of plans: of each context the candidates that could win in the step, alone or together.

A candidate takes time and holds a share of the device. One that is slower by its launches can make the run
faster only by what it leaves to others, so a context keeps the front of both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

Plan: TypeAlias = dict[str, int]  # context -> candidate; other contexts launch their incumbents
Launched: TypeAlias = Mapping[tuple[str, int], frozenset[str]]  # (choice, option) -> contexts seen with it

SLOWEST = 3.0  # times the fastest by launches: what is slower is not judged by the run
SHARE_STEP = 1 / 256  # of the device: shares nearer than that are equal
FEWEST, NEAR = 4, 1.15  # of a context with a short front: the next fastest within so much of the fastest
MOST_CANDIDATES = 16  # of a context
MOST_ROOMS = 8  # that all kernels leave
MOST_COST = 0.5  # of its time, that one kernel's launches may tell of leaving room
PROMISED = 0.03  # of all launches, that leaving room must gain by their times for kernels to want it


@dataclass(frozen=True)
class KernelLevels:
    """A kernel's candidates that are judged by the run, the incumbent first."""

    name: str
    ms: Mapping[int, float]  # by launches
    share: Mapping[int, float] = field(default_factory=dict)  # of the device; of all candidates, or none
    launches: int = 1  # in a run
    usable: Mapping[int, float] = field(default_factory=dict)  # ms of all that beside some option may win

    @property
    def incumbent(self) -> int:
        return next(iter(self.ms))

    @property
    def front(self) -> list[int]:
        """Return the fastest candidate of each share.

        Those that are slower than one of a smaller share stay: beside another option they may be faster.
        """
        fastest: dict[int, int] = {}
        for index in sorted(self.ms, key=lambda each: (self.ms[each], each)):
            fastest.setdefault(round(self.share[index] / SHARE_STEP), index)
        return list(fastest.values())

    @property
    def leaves_room(self) -> bool:
        """Return whether its candidates take different shares of the device."""
        return len({round(share / SHARE_STEP) for share in self.share.values()}) > 1

    def thinned(self, most: int) -> list[int]:
        """Return at most so many candidates, the incumbent first: spread over the shares, or the fastest."""
        others = [index for index in self.ms if index != self.incumbent]
        if self.leaves_room:
            others = spread(sorted(others, key=lambda index: -self.share[index]), most - 1)
        return [self.incumbent, *others][:most]

    @property
    def fullest(self) -> int:
        """Return the fastest candidate of the largest share."""
        return self.fullest_within(math.inf)

    @property
    def room_costs(self) -> float:
        """Return the part of its time that leaving room costs it, by launches."""
        full = round(self.share[self.fullest] / SHARE_STEP)
        with_room = (ms for index, ms in self.ms.items() if round(self.share[index] / SHARE_STEP) < full)
        return min(with_room) / self.ms[self.fullest] - 1

    @property
    def next_fastest(self) -> int:
        """Return the fastest candidate beside the incumbent, of several."""
        return min([*self.ms][1:], key=self.ms.__getitem__)

    def slower_ms(self, index: int) -> float:
        """Return the ms that its launches take longer with a candidate than with the incumbent."""
        return self.launches * (self.ms[index] - self.ms[self.incumbent])

    def fullest_within(self, share: float) -> int:
        """Return the candidate that takes most of the device, at most this share; else that with least."""
        steps = {
            i: -round(each / SHARE_STEP) for i, each in self.share.items() if each <= share + SHARE_STEP / 2
        }
        if steps:
            return min(steps, key=lambda index: (steps[index], self.ms[index], index))
        return min(self.share, key=lambda index: (self.share[index], self.ms[index]))


def levels_of(
    name: str, ms: Mapping[int, float], share: Mapping[int, float], incumbent: int, launches: int = 1
) -> KernelLevels:
    """Return the candidates of a context that the run judges, from their `ms` by launches.

    If all shares are known: the front, with the next fastest if it is short; else the fastest.
    """
    fastest = min(ms.values(), default=math.inf)
    usable = [index for index in ms if index == incumbent or ms[index] <= SLOWEST * fastest]
    usable.sort(key=lambda index: (index != incumbent, ms[index], index))
    every = KernelLevels(name, {i: ms[i] for i in usable} or {incumbent: fastest})
    if all(index in share for index in every.ms):
        every = replace(every, share={index: share[index] for index in every.ms})
        near = [index for index in usable if ms[index] <= NEAR * fastest][:FEWEST]
        kept = {incumbent, *every.front, *near}
        usable = [index for index in usable if index in kept]
    kept_most = usable[:MOST_CANDIDATES] or [incumbent]
    may_win = list(dict.fromkeys([*kept_most, *every.ms]))
    return replace(
        every,
        ms={index: every.ms[index] for index in kept_most},
        share={index: each for index, each in every.share.items() if index in kept_most},
        launches=launches,
        usable={index: every.ms[index] for index in may_win[:MOST_CANDIDATES]},
    )


def spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the values, evenly spread, the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[math.ceil((number + 1) * len(values) / most) - 1] for number in range(most)]


class PlanSpace:
    """All plans that one search may race.

    choices: options by choice, the incumbent first. texts: of options and configs, by index.
    """

    def __init__(
        self,
        kernels: Sequence[KernelLevels],
        choices: Mapping[str, Sequence[int]],
        launched: Launched,
        texts: Mapping[str, Sequence[str]],
    ) -> None:
        self.kernels, self.choices = list(kernels), {name: list(each) for name, each in choices.items()}
        self.texts = texts
        self._launched = launched

    @property
    def incumbents(self) -> dict[str, int]:
        options = {name: each[0] for name, each in self.choices.items()}
        return self.with_kernels(options, {})

    def with_incumbents(self) -> PlanSpace:
        """Return the space in which kernels have their incumbents only."""
        kernels = [replace(k, ms={k.incumbent: k.ms[k.incumbent]}, share={}) for k in self.kernels]
        return PlanSpace(kernels, self.choices, self._launched, self.texts)

    def launched_by(self, options: Plan) -> list[KernelLevels]:
        return [kernel for kernel in self.kernels if self._is_launched(kernel.name, options)]

    def with_kernels(self, options: Plan, candidates: Plan) -> dict[str, int]:
        """Return the plan of these options, with the candidates, or incumbents, of their kernels."""
        asked = self._asked(options)
        return {**asked, **{k.name: candidates.get(k.name, k.incumbent) for k in self.launched_by(asked)}}

    def all_plans(self, candidates: Callable[[KernelLevels], Sequence[int]]) -> Iterator[dict[str, int]]:
        """Yield all plans with these candidates of each kernel, that of the incumbents first, each once."""
        known: list[Plan] = []
        for places in itertools.product(*self.choices.values()):
            options = self._asked(dict(zip(self.choices, places, strict=True)))
            if options in known:
                continue
            known.append(options)
            kernels = self.launched_by(options)
            for indices in itertools.product(*map(candidates, kernels)):
                yield {**options, **{k.name: i for k, i in zip(kernels, indices, strict=True)}}

    @property
    def kinds(self) -> list[list[str]]:
        """The choices, those with the same options together."""
        of_kind: dict[tuple[str, ...], list[str]] = {}
        for name in self.choices:
            of_kind.setdefault((*self.texts[name],), []).append(name)
        return [*of_kind.values()]

    def joint_options(self, most: int) -> list[dict[str, int]]:
        """Return the first options, then combinations in which choices of one kind take the same one.

        Of more than `most` first those in which one kind of choices takes another: so each option is there.
        """
        own, kinds = {name: options[0] for name, options in self.choices.items()}, self.kinds
        firsts = [self.choices[names[0]] for names in kinds]
        together = (
            {name: index for names, index in zip(kinds, indices, strict=True) for name in names}
            for indices in itertools.product(*firsts)
        )
        found = [own, *(each for each in itertools.islice(together, most + 1) if each != own)]
        if len(found) <= most:
            return found
        alone = [
            own | dict.fromkeys(names, index)
            for names, options in zip(kinds, firsts, strict=True)
            for index in options[1:]
        ]
        return [own, *alone, *(each for each in found[1:] if each not in alone)]

    def leaving_room(self) -> list[list[KernelLevels]]:
        """Return groups of kernels that may leave room: all that can, that want it, these with neighbours.

        A kernel wants to leave room if it and its neighbours are faster by launches with room; a neighbour
        that leaves none delays the work beside them. If that promises little, only the first group counts:
        a few samples of single kernels may be spikes.
        """
        able = [kernel for kernel in self.kernels if kernel.leaves_room]
        costs = [min(max(kernel.room_costs, -MOST_COST), MOST_COST) for kernel in able]
        wanting = [
            place
            for place, kernel in enumerate(able)
            if math.fsum(cost * 0.5 ** abs(place - other) for other, cost in enumerate(costs)) < 0
        ]
        gain_ms = -math.fsum(
            able[i].launches * able[i].room_costs * able[i].ms[able[i].fullest] for i in wanting
        )
        all_ms = math.fsum(kernel.launches * kernel.ms[kernel.incumbent] for kernel in self.kernels)
        if gain_ms <= PROMISED * all_ms:
            return [able]
        wide = [place for place in range(len(able)) if {place - 1, place, place + 1} & {*wanting}]
        return [able, [able[place] for place in wanting], [able[place] for place in wide]]

    def rooms(self) -> list[float]:
        """Return the shares of the device that kernels may keep to, the largest first."""
        able = [kernel for kernel in self.kernels if kernel.leaves_room]
        shares = {round(kernel.share[i] / SHARE_STEP) for kernel in able for i in kernel.ms}
        ordered = sorted(shares, reverse=True)[1:]  # the largest leaves no room
        places = spread(range(len(ordered)), MOST_ROOMS)
        return [ordered[place] * SHARE_STEP for place in places]

    def _asked(self, options: Plan) -> dict[str, int]:
        """Return the options of those choices that a run with them asks for."""
        asked = dict(options)
        while unasked := [name for name in asked if not self._is_launched(name, asked)]:
            for name in unasked:
                del asked[name]
        return asked

    def _is_launched(self, name: str, asked: Plan) -> bool:
        """Return whether all choices that matter to a context launch it; one that is not asked does not."""
        for choice in self.choices:
            seen = {i: name in launched for (c, i), launched in self._launched.items() if c == choice}
            if choice != name and len(set(seen.values())) > 1 and not seen.get(asked.get(choice, -1), False):
                return False
        return True
