"""Random sessions with `bits="same"` of 1 to 3 virtual ranks, whose outputs depend on configs and options.

Each launch leaves a mark in its rank's output: none for most BLOCKs, one of a class for others, another one
in each run for racy ones; and some pairs of BLOCKs leave one where both are launched in a run. So do some
options of the host.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from protocol_invariants import Witness
from random_programs import (
    BLOCKS,
    OF_THE_PACKAGE,
    SPREAD,
    Choice,
    Kernel,
    Program,
    Under,
    draw_choice,
    draw_kernel,
    draw_under,
    having,
    viable_blocks,
)
from virtual_ranks import VirtualAgreement, VirtualGroup
from virtual_tuners import FUNCTIONS, HERE, VirtualRank, virtual_world

from dist_autotune.triton_api.interception import INTERCEPTION

Launched = list[tuple[int, int, int]]  # kernel's place, n, BLOCK
MOST_OPTIONS = 6  # every one is compared, in each of three calls
PLACES = 8  # of one kernel's marks in the output


@dataclass(frozen=True)
class Outputs:
    """What configs do to the output; each key is (rank, kernel's place, BLOCK)."""

    classes: dict[tuple[int, int, int], int]
    racy: frozenset[tuple[int, int, int]]  # in every run
    seldom: frozenset[tuple[int, int, int]]  # in one of three runs
    pairs: frozenset[tuple[tuple[int, int], tuple[int, int]]]  # of (kernel's place, BLOCK), on all ranks
    options: frozenset[tuple[int, int]]  # (number of a choice, its option modulo SPREAD), on all ranks

    def of_run(self, rank: int, run: int, launched: Launched, taken: dict[int, int]) -> torch.Tensor:
        """Return the output of one run that took these options of choices."""
        y = torch.arange(64, dtype=torch.float32).neg()
        bits = y.view(torch.int32)
        for place, n, block in sorted(set(launched)):
            here, at = (rank, place, block), PLACES * place + n // 16 % PLACES
            bits[at] ^= self.classes.get(here, 0)
            is_seldom = here in self.seldom and zlib.crc32(f"{rank} {run}".encode()) % 3 == 0
            if here in self.racy or is_seldom:
                bits[at] ^= (run + 1) << 4
        met = {(place, block) for place, _, block in launched}
        for number, pair in enumerate(sorted(self.pairs)):
            bits[32 + number] ^= met.issuperset(pair)
        for number, option in taken.items():
            bits[number] ^= ((number, option % SPREAD) in self.options) << 16
        return y

    def first_bits(self, program: Program, rank: int) -> torch.Tensor:
        """Return the output with the first option of each choice and the first config that works."""
        asked: dict[str, Choice] = {}
        for choice in program.choices:
            if is_asked_for(choice.under, asked):
                asked[choice.name] = choice
        launched = [
            (place, n, base_block(kernel, n))
            for place, kernel in enumerate(program.kernels)
            for n, _ in kernel.launches[rank]
            if is_asked_for(kernel.under, asked)
        ]
        return self.of_run(rank, 0, launched, {choice.number: 0 for choice in asked.values()})

    def changes(self, place: int, kernel: Kernel, n: int, block: int) -> bool:
        """Return whether a config alone leaves other marks than the first one, on some rank."""
        base = base_block(kernel, n)
        return any(
            (rank, place, block) in self.racy
            or self.classes.get((rank, place, block), 0) != self.classes.get((rank, place, base), 0)
            for rank in having(kernel, n)
        )


def is_asked_for(under: Under, asked: Collection[str]) -> bool:
    """Return whether a run of first options comes to it; a choice not asked for counts as its last one."""
    return all((0 if name in asked else SPREAD - 1) in options for name, options in under.items())


def base_block(kernel: Kernel, n: int) -> int:
    return viable_blocks(kernel, n)[0]


def draw(random: Random) -> tuple[Program, Outputs]:
    program = draw_comparing_program(random)
    return program, draw_outputs(random, program)


def draw_outputs(random: Random, program: Program) -> Outputs:
    """Return outputs in which first configs repeat themselves, and change nothing together."""
    world = range(program.world_size)
    classes, racy, seldom, others = {}, set(), set(), []
    is_seldom, acts_together = (not program.is_plain and random.random() < chance for chance in (0.3, 0.5))
    for place, kernel in enumerate(program.kernels):
        bases = {base_block(kernel, n) for n in kernel.keys}
        for block in BLOCKS:
            ranks = [rank for rank in world if random.random() < 0.5] or [random.randrange(len(world))]
            kind = random.choice(("class", "racy", "none", "none", "none"))
            if kind == "class":
                classes.update({(rank, place, block): random.choice((1, 2)) for rank in ranks})
            elif kind == "racy" and block not in bases:
                (seldom if is_seldom else racy).update((rank, place, block) for rank in ranks)
            if block not in bases:
                others.append((place, block))
    pairs = {
        (one, other)
        for one in others
        for other in others
        if acts_together and one[0] < other[0] and random.random() < 0.4
    }
    options = {
        (choice.number, option)
        for choice in program.choices
        for option in range(1, SPREAD)
        if random.random() < 0.3
    }
    kept = frozenset(sorted(pairs)[: 32 - PLACES])
    return Outputs(classes, frozenset(racy), frozenset(seldom), kept, frozenset(options))


def draw_comparing_program(random: Random) -> Program:
    """Return a program whose kernels all work on some config, and have a function each."""
    world_size = random.choice((1, 2, 2, 3, 3))
    kernels: list[Kernel] = []
    while len(kernels) < random.choice((1, 2, 3)):
        kernel = draw_kernel(random, world_size, is_plain=True)
        works = all(viable_blocks(kernel, n) for n in kernel.keys)
        if works and kernel.keys and (world_size > 1 or len(kernel.candidates[0]) > 1):
            kernels.append(replace(kernel, function=len(kernels)))
    is_plain = random.random() < 0.5  # then the winners are known beforehand
    search = "exhaustive" if is_plain else random.choice(OF_THE_PACKAGE)
    counts = {"n_warmup": random.choice((0, 1)), "n_repeat": random.choice((1, 2))}
    options: dict[str, Any] = {
        "mode": "replay",
        "bits": "same",
        "objective": "kernel" if is_plain else random.choice(("kernel", "thunk", "graph")),
        "rank_reduce": "max",
        "watch": True,
        "max_runs": random.randrange(4, 40) if not is_plain and random.random() < 0.3 else None,
        **(counts if search == "exhaustive" else {"n_warmup": None, "n_repeat": None}),
    }
    choices: list[Choice] = []
    for number in range(0 if is_plain else random.choice((0, 1, 2))):
        choice = draw_choice(random, world_size, number, choices, is_steady=True)
        choices.append(replace(choice, options=tuple(range(min(len(choice.options), MOST_OPTIONS)))))
    kernels = [replace(kernel, under=draw_under(random, choices, 0.4)) for kernel in kernels]
    return Program(
        world_size=world_size, options=options, search=search, kernels=tuple(kernels),
        choices=tuple(choices), events=(),
        calls=3, is_noisy=not is_plain and random.random() < 0.5, late_clock=0, seconds_a_run=0.0,
        is_plain=is_plain,
    )  # fmt: skip


class ComparingRank(VirtualRank):
    """Lives through three calls: one tunes, one is settled, one tunes anew."""

    def __init__(self, program: Program, agreement: VirtualAgreement, outputs: Outputs) -> None:
        self.outputs = outputs
        self.called: list[torch.Tensor] = []
        self.reports: list[Any] = []
        super().__init__(program, agreement)

    def live(self) -> list[Any]:
        HERE.rank = self
        for call in range(self.program.calls):
            if call == self.program.calls - 1:
                self.tuned.retune()
            self.called.append(self.tuned())
            self.reports.append(self.tuned.report)
            assert not INTERCEPTION.is_within(), "a call has no end"
        return self.reports

    def _thunk(self) -> Any:
        before, run = len(self.attempts), self.runs
        super()._thunk()
        places = {id(kernel): place for place, kernel in enumerate(self.program.kernels)}
        launched = [(places[id(k)], n, block) for k, n, block, worked in self.attempts[before:] if worked]
        return self.outputs.of_run(self.agreement.rank, run, launched, self.taken)


def play(drawn: tuple[Program, Outputs], random: Random, counts: Counter[str]) -> None:
    """Have ranks live through a program; raises AssertionError where a promise is broken."""
    program, outputs = drawn
    witness = Witness(program, counts)  # ranks agree at every exchange, and runs are bounded
    group = VirtualGroup(program.world_size, random, witness.look)
    with virtual_world():
        ranks = [ComparingRank(program, agreement, outputs) for agreement in group.agreements]
        witness.ranks = list(ranks)
        group.run(lambda agreement: ranks[agreement.rank].live())
    for rank in ranks:
        expected = outputs.first_bits(program, rank.agreement.rank)
        for call, y in enumerate(rank.called):
            is_certain = call != 1 or not outputs.seldom  # what shows seldom may win, and show later
            assert not is_certain or torch.equal(y.view(torch.int32), expected.view(torch.int32)), call
        assert [each.runs for each in rank.reports] == [each.runs for each in ranks[0].reports]
    for call in range(program.calls):
        _check_reports(program, outputs, [rank.reports[call] for rank in ranks], counts)


def _check_reports(program: Program, outputs: Outputs, reports: list[Any], counts: Counter[str]) -> None:
    """Check winners and bans after a call, on all ranks."""
    winners: dict[tuple[str, Any], set[str]] = defaultdict(set)
    for report in reports:
        for context in report.contexts:
            winners[context.kernel, context.key].add(context.config_text)
            if context.kernel == "choice":
                option = int(context.config) % SPREAD
                assert (context.key[0], option) not in outputs.options, (context.key, context.config)
                counts["choices compared"] += 1
                continue
            place = [function.__name__ for function in FUNCTIONS].index(context.kernel)
            kernel, n = program.kernels[place], context.key[0]
            block = context.config.kwargs["BLOCK"]
            assert not outputs.changes(place, kernel, n, block), (context.kernel, n, block)
            if program.options["max_runs"] is None and not program.choices:
                _check_complete(program, outputs, (place, n), context, counts)
    assert all(len(configs) == 1 for configs in winners.values()), winners


def _check_complete(
    program: Program, outputs: Outputs, where: tuple[int, int], context: Any, counts: Counter[str]
) -> None:
    """Check what a session that was not cut short has found of a kernel and key."""
    place, n = where
    kernel = program.kernels[place]
    viable = viable_blocks(kernel, n)
    banned = {int(text.split("BLOCK: ")[1].split(",")[0]): why for text, why in context.banned.items()}
    for block in viable:
        if any((rank, place, block) in outputs.racy for rank in having(kernel, n)):
            assert "does not repeat itself" in banned[block], (block, banned)
            counts["racy configs banned"] += 1
        elif block in banned:
            assert outputs.changes(place, kernel, n, block) or outputs.seldom, (block, banned)
            counts["changing configs banned"] += 1
    if program.is_plain:
        times = {b: max(kernel.ms[rank, b] for rank in having(kernel, n)) for b in viable}
        kept = {block: ms for block, ms in times.items() if not outputs.changes(place, kernel, n, block)}
        assert times[context.config.kwargs["BLOCK"]] == min(kept.values())
        counts["winners"] += 1
        counts["winners other than the first config"] += context.config.kwargs["BLOCK"] != viable[0]
        counts["winners slower than the fastest config"] += min(times.values()) < min(kept.values())
