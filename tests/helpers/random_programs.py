"""Random programs for several ranks: what each launches in which run, what it measures and what goes wrong.

A program is drawn from anything with the interface of `random.Random`: a seeded generator, so that one
integer reproduces it, or one of hypothesis's, which makes a failing program small.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from random import Random
from typing import Any

BLOCKS = (16, 32, 64, 128, 256)
KEYS = (64, 80, 96)
RANKS = range(2, 9)
SEARCHES = ("exhaustive",) * 3 + ("racing",) * 3 + ("shuffled", "endless", "stubborn", "raising")
BAD_SAMPLES = (math.nan, math.inf, -1.0, 0.0, None)


@dataclass(frozen=True)
class Pattern:
    """In which of its runs a rank comes to a launch, and how often in those."""

    kind: str = "always"  # "always" | "every" | "odd" | "until" | "from" | "sometimes" | "never"
    number: int = 0
    count: int = 1

    def launches(self, run: int) -> int:
        comes = {
            "always": True,
            "every": run % max(self.number, 1) == 0,
            "odd": run % 2 == 1,
            "until": run < self.number,
            "from": run >= self.number,
            "sometimes": zlib.crc32(f"{run} {self.number}".encode()) % 3 > 0,
            "never": False,
        }[self.kind]
        return self.count if comes else 0


@dataclass(frozen=True)
class Kernel:
    """One autotuned kernel; each field is by rank, or by (rank, BLOCK)."""

    function: int
    candidates: tuple[tuple[int, ...], ...]  # in each rank's order
    ms: dict[tuple[int, int], float]
    failures: dict[tuple[int, int], str]  # "launch" | "hook" | "preflight"
    bad_samples: dict[tuple[int, int], float | None]
    is_sometimes_bad: bool
    launches: tuple[tuple[tuple[int, Pattern], ...], ...]  # (n, pattern) of each rank

    @property
    def keys(self) -> list[int]:
        """Return every n that some rank launches it with."""
        return sorted({n for own in self.launches for n, _ in own})

    @property
    def is_plain(self) -> bool:
        """Return whether every rank launches it in every run and measures it well."""
        patterns = {pattern.kind for own in self.launches for _, pattern in own}
        return patterns <= {"always"} and not self.bad_samples


@dataclass(frozen=True)
class Choice:
    """A `tunable`."""

    name: str
    options: tuple[str, ...]
    ms: dict[str, float]
    launches: tuple[Pattern, ...]


@dataclass(frozen=True)
class Event:
    """What happens before a call, or in the n-th run or exchange of a rank."""

    kind: str  # "retune" | "retune some" | "restart" | "cached" | "raise" | "leave" | "late"
    at: int
    rank: int = 0
    number: int = 0


@dataclass(frozen=True)
class Program:
    """One random program."""

    world_size: int
    options: dict[str, Any]
    search: str
    kernels: tuple[Kernel, ...]
    choices: tuple[Choice, ...]
    events: tuple[Event, ...]
    calls: int
    is_noisy: bool
    late_clock: int  # online: how many looks a clock takes to be ready, at most
    seconds_a_run: float
    is_plain: bool = False
    lost_disks: tuple[int, ...] = field(default=())  # ranks that a restart finds without their entries
    changed_disks: tuple[int, ...] = field(default=())  # and those that find another winner in them

    @property
    def is_online(self) -> bool:
        return self.options["mode"] == "online"

    def contexts(self) -> list[tuple[Kernel, int]]:
        return [(kernel, n) for kernel in self.kernels for n in kernel.keys]

    def events_at(self, call: int, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.at == call and event.kind in kinds]

    def events_of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    def faults(self) -> list[Event]:
        return self.events_of("raise", "leave", "late")


def having(kernel: Kernel, n: int) -> list[int]:
    """Return the ranks that launch `n`."""
    return [rank for rank, own in enumerate(kernel.launches) if n in dict(own)]


def viable_blocks(kernel: Kernel, n: int) -> list[int]:
    """Return the BLOCKs that all those ranks have and that fail on none, in the lowest rank's order."""
    ranks = having(kernel, n)
    return [
        block
        for block in kernel.candidates[ranks[0]]
        if all(block in kernel.candidates[rank] and (rank, block) not in kernel.failures for rank in ranks)
    ]


def true_winners(kernel: Kernel, n: int, rank_reduce: str) -> list[int]:
    """Return the BLOCK that is fastest; several where the sum of times leaves a tie open."""
    times: dict[int, float] = {}
    for block in viable_blocks(kernel, n):
        by_rank = [kernel.ms[rank, block] for rank in having(kernel, n)]
        times[block] = max(by_rank) if rank_reduce == "max" else math.fsum(by_rank) / len(by_rank)
    fastest = min(times.values())
    ties = [block for block, ms in times.items() if ms <= fastest + 1e-9]
    return ties[:1] if rank_reduce == "max" else ties


def draw_program(random: Random) -> Program:
    """Return a program."""
    world_size = random.choice(RANKS)
    is_plain = random.random() < 0.3  # then the winners are known beforehand
    search = "exhaustive" if is_plain else random.choice(SEARCHES)
    options = _options(random, search, is_plain=is_plain)
    kernels = tuple(
        draw_kernel(random, world_size, is_plain=is_plain) for _ in range(random.choice((1, 1, 2, 3)))
    )
    choices = tuple(_choice(random, world_size, n) for n in range(random.choice((0, 0, 0, 1, 2))))
    is_online = options["mode"] == "online"
    calls = random.randrange(4, 60) if is_online else random.randrange(1, 6)
    return Program(
        world_size=world_size,
        options=options,
        search=search,
        kernels=kernels,
        choices=() if is_plain else choices,
        events=() if is_plain else _events(random, world_size, calls, watches=options["watch"]),
        calls=calls,
        is_noisy=not is_plain and random.random() < 0.5,
        late_clock=random.choice((0, 0, 1, 3)),
        seconds_a_run=random.choice((0.0, 0.0, 0.5)),
        is_plain=is_plain,
        lost_disks=_some(random, world_size),
        changed_disks=_some(random, world_size),
    )


def _options(random: Random, search: str, *, is_plain: bool) -> dict[str, Any]:
    is_limited = not is_plain and random.random() < 0.25
    return {
        "mode": "replay" if is_plain else random.choice(("replay", "replay", "online")),
        "objective": "kernel" if is_plain else random.choice(("kernel", "kernel", "thunk")),
        "n_warmup": random.choice((0, 0, 1, 2)) if search != "racing" else None,
        "n_repeat": random.choice((1, 1, 2, 3)) if search != "racing" else None,
        "statistic": random.choice(("median", "mean", "min")),
        "rank_reduce": random.choice(("max", "max", "mean")),
        "agree": "key" if is_plain else random.choice(("key", "key", "ordinal")),
        "share": random.random() < 0.8,
        "watch": is_plain or random.random() < 0.8,
        "max_runs": random.randrange(1, 30) if is_limited else None,
        "budget_s": random.choice((1.0, 5.0)) if is_limited and random.random() < 0.5 else None,
    }


def draw_kernel(random: Random, world_size: int, *, is_plain: bool) -> Kernel:
    """Return a kernel; a plain one is launched in every run by all ranks that have it."""
    ranks = range(world_size)
    shared = random.sample(BLOCKS, random.randrange(1, len(BLOCKS) + 1))
    candidates = [tuple(shared) for _ in ranks]
    if random.random() < 0.3:
        for rank in _some(random, world_size):
            candidates[rank] = tuple(random.sample(BLOCKS, random.randrange(1, len(BLOCKS) + 1)))
    pairs = [(rank, block) for rank in ranks for block in BLOCKS]
    failures = {}
    if random.random() < 0.35:
        for pair in random.sample(pairs, random.choice((1, 1, 2, 4))):
            failures[pair] = random.choice(("launch", "hook", "preflight"))
    bad = {}
    if not is_plain and random.random() < 0.25:
        bad = {pair: random.choice(BAD_SAMPLES) for pair in random.sample(pairs, random.choice((1, 2, 5)))}
    times = [round(0.1 * random.randrange(1, 60), 1) for _ in BLOCKS]
    by_rank = random.random() < 0.6
    ms = {
        (rank, block): round(times[at] + (0.1 * random.randrange(0, 30) if by_rank else 0.0), 1)
        for rank in ranks
        for at, block in enumerate(BLOCKS)
    }
    keys = random.sample(KEYS, random.choice((1, 1, 1, 2, 3)))
    launches = tuple(tuple(_launches(random, keys, rank, is_plain=is_plain)) for rank in ranks)
    return Kernel(
        function=random.randrange(3),
        candidates=tuple(candidates),
        ms=ms,
        failures=failures,
        bad_samples=bad,
        is_sometimes_bad=random.random() < 0.5,
        launches=launches,
    )


def _launches(random: Random, keys: list[int], rank: int, *, is_plain: bool) -> list[tuple[int, Pattern]]:
    """Return (n, pattern) for one rank: its own keys among them, in its own order."""
    own = [n for n in keys if random.random() < 0.9]
    if not is_plain and random.random() < 0.15:
        own.append(1000 + rank)
    if random.random() < 0.3:
        random.shuffle(own)
    kinds = ("always",) if is_plain else ("always",) * 7 + ("every", "until", "from", "sometimes", "never")
    return [
        (n, Pattern(random.choice(kinds), random.choice((2, 3, 4, 7, 17)), random.choice((1, 1, 2))))
        for n in own
    ]


def _choice(random: Random, world_size: int, number: int) -> Choice:
    options = tuple("abc"[: random.randrange(1, 4)])
    ms = {option: 0.1 * random.randrange(1, 30) for option in options}
    kinds = ("always",) * 4 + ("every", "until", "from", "never")
    patterns = [Pattern(random.choice(kinds), random.choice((2, 3, 7))) for _ in range(world_size)]
    return Choice(f"choice-{number}", options, ms, tuple(patterns))


def _events(random: Random, world_size: int, calls: int, *, watches: bool) -> tuple[Event, ...]:
    events: list[Event] = []
    # Where settled calls exchange nothing, nobody can tell that only some ranks were asked to tune anew.
    kinds = random.choice((("retune", "retune some", "restart"), ("retune", "restart", "cached")))
    for call in range(1, calls):
        if random.random() < 0.3 / max(1, calls // 6):
            kind = random.choice(kinds if watches else kinds[:1])
            events.append(Event(kind, call, random.randrange(world_size)))
    for _ in range(random.choice((0, 0, 0, 1, 1, 2))):
        kind = random.choice(("raise", "raise", "leave", "late"))
        events.append(Event(kind, -1, random.randrange(world_size), random.randrange(40)))
    return tuple(events)


def _some(random: Random, world_size: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(world_size) if random.random() < 0.3)
