"""Which test of a GPU session runs when, and on which devices: no pytest, no processes, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

Name = TypeVar("Name")

MOST_IN_JOB = 6  # tests that one process runs: it starts CUDA once for them
MOST_ON_DEVICE = 14  # tests that share a device
MOST_SPANNING = (
    0.5  # of those may span devices: a kernel that waits for a peer needs its turn on both at once
)
SECONDS = 6.0  # what a test is reckoned to take of which nothing is known
MOST_RESERVED = 0.25  # of the session, for tests that run alone


@dataclass(frozen=True)
class Job(Generic[Name]):
    """Tests that one process runs, one after the other."""

    tests: tuple[Name, ...]
    devices: int = 1
    is_alone: bool = False  # no other test uses its devices meanwhile
    seconds: float = SECONDS  # what it is reckoned to take


@dataclass(frozen=True)
class Placed(Generic[Name]):
    """A job and the devices that it has."""

    job: Job[Name]
    devices: tuple[int, ...]


def jobs_of(tests: Iterable[tuple[Name, Any, int, bool, float]]) -> list[Job[Name]]:
    """Return jobs of (test, function, devices, alone, seconds); tests of a function may share one."""
    jobs: list[Job[Name]] = []
    last = None
    for test, function, devices, is_alone, seconds in tests:
        kind = (function, devices)
        if not is_alone and devices == 1 and kind == last and len(jobs[-1].tests) < MOST_IN_JOB:
            jobs[-1] = Job((*jobs[-1].tests, test), devices, seconds=jobs[-1].seconds + seconds)
        else:
            jobs.append(Job((test,), devices, is_alone, seconds))
        last = None if is_alone else kind
    return jobs


def part_of(tests: Sequence[Name], part: str) -> list[Name]:
    """Return part "i/n" of the tests, of 1 to n: every n-th one, so that the parts take about as long."""
    try:
        index, parts = (int(text) for text in part.split("/"))
    except ValueError:
        index, parts = 0, 0
    if not 1 <= index <= parts:
        raise ValueError(f"part {part!r}: expected i/n with i of 1 to n, such as 1/2")
    return list(tests[index - 1 :: parts])


def jobs_at_once(cores: int, devices: int) -> int:
    """Return how many tests may share a device: nearly all of their time is that of a core."""
    return max(1, min(MOST_ON_DEVICE, 7 * cores // (8 * devices)))


@dataclass
class Schedule(Generic[Name]):
    """Jobs that wait, and what runs on each device: first what may share a device, then what is alone."""

    jobs: list[Job[Name]]
    devices: int
    at_once: int  # jobs on one device
    limit_s: float = math.inf  # of the session
    running: list[Placed[Name]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.jobs = sorted(self.jobs, key=lambda job: (-job.devices, -job.seconds))  # long before short

    def reserved_s(self) -> float:
        """Return how long before the session's end no more jobs begin that share a device."""
        alone_s = sum(job.seconds * job.devices / self.devices for job in self.jobs if job.is_alone)
        return min(alone_s, MOST_RESERVED * self.limit_s)

    def begin(self, now_s: float) -> Placed[Name] | None:
        """Return the next job, which runs from now on; None: nothing can begin before something ends."""
        shared = [job for job in self.jobs if not job.is_alone]
        alone = [job for job in self.jobs if job.is_alone]
        if alone and now_s > self.limit_s - self.reserved_s():
            shared = []
        for job in (*shared, *alone):
            if len(free := self._free(job, shared)) >= job.devices:
                placed = Placed(job, tuple(sorted(free[: job.devices])))
                self.jobs.remove(job)
                self.running.append(placed)
                return placed
        return None

    def end(self, placed: Placed[Name], left: Sequence[Name] = ()) -> None:
        """Let the devices of a job go; `left` are tests that its process did not come to."""
        self.running.remove(placed)
        if left:
            self.jobs.insert(0, replace(placed.job, tests=tuple(left)))

    def again(self, test: Name, devices: int, seconds: float = SECONDS) -> None:
        """Let a test run once more, alone and after all others."""
        self.jobs.append(Job((test,), devices, is_alone=True, seconds=seconds))

    def _free(self, job: Job[Name], shared: list[Job[Name]]) -> list[int]:
        """Return the devices that have room for the job, the emptiest first."""
        on = [[each.job for each in self.running if device in each.devices] for device in range(self.devices)]
        spanning = sum(each.job.devices > 1 for each in self.running)
        if job.devices > 1 and spanning >= max(1, MOST_SPANNING * self.at_once):
            return []
        free = []
        for device, jobs in enumerate(on):
            if job.is_alone:
                has_room = not jobs and not shared
            else:
                has_room = len(jobs) < self.at_once and not any(each.is_alone for each in jobs)
            if has_room:
                free.append(device)
        return sorted(free, key=lambda device: len(on[device]))
