"""Random programs for several ranks: what each launches in which run, what it measures and what goes wrong.

A program is drawn from anything with the interface of `random.Random`: a seeded generator, so that one
integer reproduces it, or one of hypothesis's, which makes a failing program small.
"""

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from dist_autotune.search.strategies import Warmup

BLOCKS = (16, 32, 64, 128, 256)
MANY_BLOCKS = (range(1, 15), range(1, 15), range(1, 41), range(1, 301))
KEYS = (64, 80, 96)
MANY_KEYS = tuple(range(64, 240, 16))
RANKS = (1, 2, 2, 2, 3, 3, 4, 4, 6, 8)
OF_THE_PACKAGE = ("exhaustive", "racing", "auto", "expected")
SHARES = (1000, 900, 750, 500, 250)
BAD_SAMPLES = (math.nan, math.inf, -1.0, 0.0, None)


# ---- strategies of a user's own


def shuffled(candidates: Any, *, n_warmup: int, n_repeat: int) -> Any:
    """Try candidates in an order of its own; end at the first that is twice as fast as another."""
    agreed_ms: dict[int, float] = {}
    for index in sorted(candidates, key=lambda index: zlib.crc32(str(index).encode())):
        if n_warmup:
            yield Warmup(index)
        agreed_ms[index] = yield index
        if 2 * min(agreed_ms.values()) < max(agreed_ms.values()):
            break
    return min(agreed_ms, key=agreed_ms.__getitem__)


def endless(candidates: Any, *, n_warmup: int, n_repeat: int) -> Any:
    for index in itertools.cycle(candidates):  # noqa: UP028  a cycle has no send()
        yield index


def stubborn(candidates: Any, *, n_warmup: int, n_repeat: int) -> Any:
    """Ask for the last candidate until its time is known, banned or not; return it in any case."""
    for _ in range(3):
        yield candidates[-1]
    return candidates[-1]


def raising(candidates: Any, *, n_warmup: int, n_repeat: int) -> Any:
    for index in candidates:
        if (yield index) > 5:
            raise ValueError("too slow for this strategy")
    return candidates[0]


FLOWS = {"shuffled": shuffled, "endless": endless, "stubborn": stubborn, "raising": raising}
SEARCHES = ("exhaustive",) * 2 + OF_THE_PACKAGE[1:] * 3 + tuple(FLOWS)


# ---- programs


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


Under = Mapping[str, tuple[int, ...]]  # choice -> its options, modulo SPREAD, that lead to a launch
SPREAD = 4


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
    under: Under = field(default_factory=dict)
    shares: Mapping[int, int] = field(default_factory=dict)  # BLOCK -> thousandths of the device

    @property
    def keys(self) -> list[int]:
        """Return every n that some rank launches it with."""
        return sorted({n for own in self.launches for n, _ in own})


@dataclass(frozen=True)
class Choice:
    """A `tunable`; its options are 0, 1, ..."""

    number: int
    options: Sequence[int]
    ms: tuple[float, ...]  # of the options in turn
    launches: tuple[Pattern, ...]
    under: Under = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"choice-{self.number}"

    def ms_of(self, option: int) -> float:
        return self.ms[option % len(self.ms)]


@dataclass(frozen=True)
class Event:
    """What happens before a call, or in the n-th run or exchange of a rank."""

    kind: str  # "retune" | "retune some" | "retune inside" | "restart" | "cached", or a fault
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
    loses_some: bool = False  # a restart finds a part of the entries on no disk

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


def true_winner(kernel: Kernel, n: int) -> int:
    """Return the BLOCK that is fastest by its slowest rank, the first of equal ones."""
    ranks = having(kernel, n)
    times = {block: max(kernel.ms[rank, block] for rank in ranks) for block in viable_blocks(kernel, n)}
    return min(times, key=times.__getitem__)


def draw_program(random: Random) -> Program:
    """Return a program."""
    world_size = random.choice(RANKS)
    is_plain = random.random() < 0.2  # then the winners are known beforehand
    is_steady = is_plain or random.random() < 0.4  # all ranks launch all in every run
    is_large = not is_plain and random.random() < 0.3  # as functions are: many contexts, of few kernels
    search = "exhaustive" if is_plain else random.choice(OF_THE_PACKAGE if is_large else SEARCHES)
    options = _options(random, search, is_plain=is_plain)
    counts = (3, 4, 6, 8) if is_large else (1, 1, 2, 3)
    kernels = [
        draw_kernel(random, world_size, is_plain=is_steady, is_large=is_large)
        for _ in range(random.choice(counts))
    ]
    choices: list[Choice] = []
    if not is_plain:
        for number in range(random.choice((0, 1, 2, 3, 4) if is_large else (0, 0, 0, 1, 2))):
            choices.append(draw_choice(random, world_size, number, choices, is_steady=is_steady))
        kernels = [replace(kernel, under=draw_under(random, choices, 0.6)) for kernel in kernels]
    is_online = options["mode"] == "online"
    calls = random.randrange(4, 60) if is_online else random.randrange(1, 6)
    if is_online and is_large:
        calls = random.randrange(60, 400)
    return Program(
        world_size=world_size,
        options=options,
        search=search,
        kernels=tuple(kernels),
        choices=tuple(choices),
        events=() if is_steady else _events(random, world_size, calls, watches=options["watch"]),
        calls=calls,
        is_noisy=not is_plain and random.random() < 0.5,
        late_clock=random.choice((0, 0, 1, 3)),
        seconds_a_run=random.choice((0.0, 0.0, 0.5)),
        is_plain=is_plain,
        lost_disks=_some(random, world_size),
        changed_disks=_some(random, world_size),
        loses_some=random.random() < 0.5,
    )


def _options(random: Random, search: str, *, is_plain: bool) -> dict[str, Any]:
    is_limited = not is_plain and random.random() < 0.25
    mode = "replay" if is_plain else random.choice(("replay", "replay", "online"))
    objectives = ("kernel", "kernel", "thunk") if mode == "online" else ("kernel", "kernel", "thunk", "graph")
    counts = search not in OF_THE_PACKAGE[1:]
    return {
        "mode": mode,
        "objective": "kernel" if is_plain else random.choice(objectives),
        "n_warmup": random.choice((0, 0, 1, 2)) if counts else None,
        "n_repeat": random.choice((1, 1, 2, 3)) if counts else None,
        "share": random.random() < 0.8,
        "watch": is_plain or random.random() < 0.8,
        "max_runs": random.randrange(1, random.choice((30, 300))) if is_limited else None,
        "budget_s": random.choice((1.0, 5.0, 40.0)) if is_limited and random.random() < 0.5 else None,
    }


def draw_kernel(random: Random, world_size: int, *, is_plain: bool, is_large: bool = False) -> Kernel:
    """Return a kernel; a plain one is launched in every run by all ranks that have it."""
    ranks = range(world_size)
    blocks = random.choice(MANY_BLOCKS) if not is_plain and random.random() < 0.08 else BLOCKS
    shared = random.sample(blocks, random.randrange(len(blocks) // 2, len(blocks) + 1) or 1)
    candidates = [tuple(shared) for _ in ranks]
    if random.random() < 0.3:
        for rank in _some(random, world_size):
            candidates[rank] = tuple(random.sample(blocks, random.randrange(1, len(blocks) + 1)))
    pairs = [(rank, block) for rank in ranks for block in blocks]
    failures = {}
    if random.random() < 0.35:
        for pair in random.sample(pairs, random.choice((1, 1, 2, 4))):
            failures[pair] = random.choice(("launch", "hook", "preflight"))
    bad = {}
    if not is_plain and random.random() < 0.25:
        bad = {pair: random.choice(BAD_SAMPLES) for pair in random.sample(pairs, random.choice((1, 2, 5)))}
    times = [round(0.1 * random.randrange(1, 60), 1) for _ in blocks]
    by_rank = random.random() < 0.6
    ms = {
        (rank, block): round(times[at] + (0.1 * random.randrange(0, 30) if by_rank else 0.0), 1)
        for rank in ranks
        for at, block in enumerate(blocks)
    }
    keys = random.sample(KEYS, random.choice((1, 1, 1, 2, 3)))
    if is_large:
        keys = random.sample(MANY_KEYS, random.choice((1, 3, 5, 8)))
    launches = tuple(tuple(_launches(random, keys, rank, is_plain=is_plain)) for rank in ranks)
    return Kernel(
        function=random.randrange(3),
        candidates=tuple(candidates),
        ms=ms,
        failures=failures,
        bad_samples=bad,
        is_sometimes_bad=random.random() < 0.5,
        launches=launches,
        shares={block: random.choice(SHARES) for block in blocks} if random.random() < 0.5 else {},
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
        (n, Pattern(random.choice(kinds), random.choice((2, 3, 4, 7, 17, 40, 80)), random.choice((1, 1, 2))))
        for n in own
    ]


def draw_choice(
    random: Random, world_size: int, number: int, earlier: Sequence[Choice], *, is_steady: bool
) -> Choice:
    options: Sequence[int] = tuple(range(random.choice((1, 2, 2, 3, 3, 4, 6, 20))))
    if random.random() < 0.05:  # too many for a race of plans
        options = range(random.choice((300, 300, 2000)))
    ms = tuple(0.1 * random.randrange(1, 30) for _ in range(random.choice((2, 3, 7, 50))))
    kinds = ("always",) * 7 + (() if is_steady else ("every", "until", "from", "never"))
    is_alike = random.random() < 0.7
    patterns = [Pattern(random.choice(kinds), random.choice((2, 3, 7))) for _ in range(world_size)]
    launches = (patterns[0],) * world_size if is_alike else tuple(patterns)
    return Choice(number, options, ms, launches, draw_under(random, earlier, 0.4))


def draw_under(random: Random, choices: Sequence[Choice], chance: float) -> Under:
    """Return options of one or two of the choices, or of none, by chance."""
    if not choices or random.random() > chance:
        return {}
    chosen = random.sample(choices, min(random.choice((1, 1, 2)), len(choices)))
    return {
        choice.name: tuple(sorted(random.sample(range(SPREAD), random.choice((1, 2, 2, 3)))))
        for choice in chosen
    }


def _events(random: Random, world_size: int, calls: int, *, watches: bool) -> tuple[Event, ...]:
    events: list[Event] = []
    # Where settled calls exchange nothing, nobody can tell that only some ranks were asked to tune anew.
    kinds = random.choice((("retune", "retune some", "restart"), ("retune", "restart", "cached")))
    for call in range(1, calls):
        if random.random() < 0.3 / max(1, calls // 6):
            kind = random.choice(kinds if watches else kinds[:1])
            events.append(Event(kind, call, random.randrange(world_size)))
    if watches and random.random() < 0.15:
        events.append(Event("retune inside", -1, number=random.randrange(1, 60)))
    for _ in range(random.choice((0, 0, 0, 1, 1, 2))):
        kind = random.choice(("raise", "raise", "leave", "late"))
        events.append(Event(kind, -1, random.randrange(world_size), random.randrange(40)))
    return tuple(events)


def _some(random: Random, world_size: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(world_size) if random.random() < 0.3)
