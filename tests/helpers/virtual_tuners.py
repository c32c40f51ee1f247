"""One rank of a random program: real tuner, real Autotuners; kernels, clock and disk are made up.

What a rank sends is made by the very code that makes it in production. Replaced are only the exchange
(`virtual_ranks`), the kernels under the Autotuners, the clock, the disk entries and the preflight, which
would need a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import triton
from kernels_for_tests import accumulate, add, double, out_of_resources
from msgspec.structs import replace
from random_programs import FLOWS, SPREAD, Kernel, Program, Under
from virtual_ranks import Gone, VirtualAgreement, everybodys_turn

import dist_autotune.compilation.preflight
from dist_autotune import contextual_autotune, settings, tunable
from dist_autotune import options as options_module
from dist_autotune.compilation import child, compiler
from dist_autotune.compilation.preflight import Compilation, Planned
from dist_autotune.compilation.workers import Work
from dist_autotune.launch.dispatcher import Dispatcher
from dist_autotune.launch.rank_context import RankContext
from dist_autotune.logs.writer import SessionLog
from dist_autotune.ranks.group import GROUPS
from dist_autotune.storage.winners import Entry, EntryKey, Winners
from dist_autotune.triton_api import identity, interception
from dist_autotune.triton_api.interception import INTERCEPTION
from dist_autotune.triton_api.launch import Launch
from dist_autotune.tuner.function_state import FunctionState

LOOKS_AT_MOST = 2  # at a child, until it has ended
FUNCTIONS = (add, double, accumulate)
HERE = threading.local()  # .rank: the VirtualRank whose thread this is


class Boom(Exception):
    """A rank's own exception."""


class VirtualClock:
    """Reads the scripted times of the launches between start and stop; ready some looks later."""

    def __init__(self, rank: VirtualRank) -> None:
        self._rank = rank
        self._took_ms: list[float | None] = []
        self._looks: dict[int, int] = {}
        self.host_ms = 1.0  # of launches so far, those without a sample among them

    def spend(self, ms: float | None) -> None:
        self._took_ms.append(ms)
        self.host_ms += ms if ms is not None and 0 < ms < math.inf else 1.0

    def start(self) -> list[int]:
        return [len(self._took_ms)]

    def stop(self, mark: list[int]) -> None:
        mark.append(len(self._took_ms))

    def ready(self, mark: list[int]) -> bool:
        looks = self._looks[mark[0]] = self._looks.get(mark[0], -1) + 1
        return looks >= self.lateness(self._rank.agreement.rank, mark[0])

    def lateness(self, rank: int, mark: int) -> int:
        """Return how many looks at a mark come too early."""
        return zlib.crc32(f"{rank} {mark}".encode()) % (self._rank.program.late_clock + 1)

    def read_ms(self, mark: list[int]) -> Any:
        took_ms = self._took_ms[mark[0] : mark[1]]
        return took_ms[0] if len(took_ms) == 1 else sum(ms or 0.0 for ms in took_ms)


class VirtualDisk:
    """The disk entries of one rank, in place of the files of `Winners`."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._launched: dict[str, dict[str, None]] = {}  # by function

    def put(self, entry: Entry, *, replaces: bool = True) -> None:
        if replaces or entry.key.digest not in self.entries:
            self.entries[entry.key.digest] = entry

    def of_kernel(self, kernel: str) -> list[Entry]:
        return [entry for entry in self.entries.values() if kernel in ("", entry.key.kernel)]

    def record_launch(self, function: str, key: EntryKey) -> None:
        self._launched.setdefault(function, {})[key.digest] = None

    def launched_by(self, function: str) -> list[Entry]:
        return [self.entries[name] for name in self._launched.get(function, ()) if name in self.entries]

    def lose(self, *, keeps_most: bool) -> None:
        """Forget all entries, or every third."""
        names = sorted(self.entries)
        for name in names[::3] if keeps_most else names:
            del self.entries[name]


class VirtualChild:
    """Stands in for a child that compiles: the look at which it ends is scripted."""

    def __init__(self, work: Work) -> None:
        self._endings = [child.Ending(each()) for each in work.pieces]
        self._looks, self._number, self.is_over, self.why_left = 0, len(HERE.rank.compilers), False, ""
        HERE.rank.compilers.append(self)

    def poll(self) -> list[tuple[int, child.Ending]]:
        self._looks += 1
        if self._drawn() % (LOOKS_AT_MOST - self._looks + 1):
            return []
        self.kill()
        return [*enumerate(self._endings)]

    def stands_still(self) -> bool:
        return False

    def pause(self, *, goes_on: bool) -> None:
        """It ends at a look, paused or not."""

    def kill(self) -> None:
        if not self.is_over:
            HERE.rank.compilers.remove(self)
        self.is_over = True

    def _drawn(self) -> int:
        rank = HERE.rank.agreement.rank
        return zlib.crc32(f"{rank} {self._looks} {self._number}".encode())


class VirtualKernel:
    """Stands between an Autotuner and its `@jit` function."""

    def __init__(self, rank: VirtualRank, kernel: Kernel) -> None:
        self.fn = FUNCTIONS[kernel.function]
        self.arg_names = list(self.fn.arg_names)
        self.__name__ = self.fn.__name__
        self._rank = rank
        self._kernel = kernel
        self._launches = 0

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        rank, block = self._rank, kwargs["BLOCK"]
        failure = self._kernel.failures.get((rank.agreement.rank, block))
        if failure is not None:
            raise out_of_resources()
        rank.launched_share = self._kernel.shares.get(block, 0)
        rank.clock.spend(self._ms(block))

    def _ms(self, block: int) -> float | None:
        self._launches += 1
        rank = self._rank.agreement.rank
        noise = zlib.crc32(f"{rank} {block} {self._launches}".encode())
        bad = self._kernel.bad_samples
        if (rank, block) in bad and (not self._kernel.is_sometimes_bad or noise % 2):
            return bad[rank, block]
        return self._kernel.ms[rank, block] * (1 + self._rank.program.is_noisy * (noise % 100) / 200)


class VirtualRank:
    """Lives through one program."""

    def __init__(self, program: Program, agreement: VirtualAgreement) -> None:
        self.program = program
        self.agreement = agreement
        self.clock = VirtualClock(self)
        self.disk = VirtualDisk()
        self.mode = "tune"
        self.runs = 0  # of the thunk, in all calls
        self.launched_share = 0  # of the last launch
        self.call = self.exchanges = 0  # the second: before this call
        self.endings: list[Ending] = []
        self.start_process()

    def start_process(self) -> None:
        """Forget what memory holds, as a new process does."""
        self.compilers: list[VirtualChild] = []  # under way
        program, rank = self.program, self.agreement.rank
        self.tuners = [self._tuner(kernel, rank) for kernel in program.kernels]
        options = {name: value for name, value in program.options.items() if value is not None}
        search = FLOWS.get(program.search, program.search)
        self.tuned = contextual_autotune(
            self._thunk,
            is_dist=True,
            search=search,
            name="step",
            clock=self.clock,
            group=self.agreement,
            cache=False,  # no directory, so no crash guard; see VirtualDisk
            log_dir=None,
            progress=False,
            **options,
        )

    @property
    def state(self) -> FunctionState | None:
        calls = self.tuned._calls
        known: FunctionState | None = None if calls is None else calls.state
        return known

    def now_s(self) -> float:
        """Take the place of `time.monotonic`: the same on each machine, however busy."""
        return self.program.seconds_a_run * self.runs + self.clock.host_ms / 1e3

    def live(self) -> list[Ending]:
        """Make all calls; return how each ended."""
        HERE.rank = self
        for event in self.program.faults():
            if event.rank == self.agreement.rank and event.kind == "leave":
                self.agreement.leaves_at = event.number
            elif event.rank == self.agreement.rank and event.kind == "late":
                self.agreement.is_late_at = event.number
        for call in range(self.program.calls):
            self.call = call
            self._meet_events()
            before, self.exchanges = self.runs, self.agreement.sequence
            try:
                value = self.tuned()
                assert value == self.runs, "the call returned another run's result than the last"
                error = None
            except Gone:
                self.endings.append(Ending(self, Gone(), before))
                raise
            except Exception as caught:
                error = caught
            assert not INTERCEPTION.is_within(), "a call has no end"
            assert not (self.tuned.settled and self.compilers), "a process compiles what nobody asks for"
            self.endings.append(Ending(self, error, before))
        return self.endings

    def preflight(self, tuner: Any, configs: dict[str, Any]) -> dict[str, str]:
        kernel = self.program.kernels[self.tuners.index(tuner)]
        rank = self.agreement.rank
        blocks = {digest: config.kwargs["BLOCK"] for digest, config in configs.items()}
        return {
            digest: "does not load"
            for digest, block in blocks.items()
            if kernel.failures.get((rank, block)) == "preflight"
        }

    def _tuner(self, kernel: Kernel, rank: int) -> Any:
        def hook(named: dict[str, Any]) -> None:
            raise out_of_resources()

        configs = [
            triton.Config(
                {"BLOCK": block}, pre_hook=hook if kernel.failures.get((rank, block)) == "hook" else None
            )
            for block in kernel.candidates[rank]
        ]
        return triton.autotune(configs, ["n"])(VirtualKernel(self, kernel))

    def _meet_events(self) -> None:
        program, rank = self.program, self.agreement.rank
        for event in program.events_at(self.call, "retune", "retune some", "restart", "cached"):
            if event.kind == "retune" or (event.kind == "retune some" and rank >= event.rank):
                self.tuned.retune()
            elif event.kind == "cached":
                self.mode = "cached" if self.mode == "tune" else "tune"
            elif event.kind == "restart":
                if rank in program.lost_disks:
                    self.disk.lose(keeps_most=False)
                if program.loses_some:
                    self.disk.lose(keeps_most=True)
                if rank in program.changed_disks:
                    for name, entry in self.disk.entries.items():
                        self.disk.entries[name] = replace(entry, winner=entry.key.candidates[-1])
                self.start_process()

    def _thunk(self) -> int:
        program, rank = self.program, self.agreement.rank
        under_way = None if self.state is None else self.state.dispatcher.run_under_way
        is_repeated = under_way is not None and under_way.repeats
        self.runs += not is_repeated
        run = self.runs - 1
        if any(event.number == run for event in program.events_of("retune inside")) and not is_repeated:
            self.tuned.retune()
        fails = [event for event in program.faults() if event.kind == "raise" and event.rank == rank]
        if any(event.number == run and run % 2 for event in fails):
            raise Boom
        asked: dict[str, int] = {}

        def is_reached(under: Under) -> bool:
            return all(option_of(name) % SPREAD in options for name, options in under.items())

        def option_of(name: str) -> int:
            """Return the option that this run takes, asked for where it is first needed."""
            if name not in asked:
                choice = next(each for each in program.choices if each.name == name)
                asked[name] = SPREAD - 1  # as the last ones
                if is_reached(choice.under):
                    for _ in range(choice.launches[rank].launches(run)):
                        asked[name] = tunable("choice", choice.options, key=(choice.number,))
                        self.clock.spend(choice.ms_of(asked[name]))
            return asked[name]

        for kernel, tuner in zip(program.kernels, self.tuners, strict=True):
            for n, pattern in kernel.launches[rank] if is_reached(kernel.under) else ():
                for _ in range(pattern.launches(run)):
                    tuner[(1,)](0, 0, n)
        for choice in program.choices:
            option_of(choice.name)
        if any(event.number == run for event in fails):
            raise Boom
        return self.runs


class Ending:
    """How one call ended on one rank."""

    def __init__(self, rank: VirtualRank, error: BaseException | None, runs_before: int) -> None:
        self.error = error
        self.runs = rank.runs - runs_before
        self.is_of_session = rank.agreement.sequence > rank.exchanges
        self.is_settled = rank.tuned.settled
        self.report = rank.tuned.report
        self.winners: dict[tuple[int, int], int] = {}  # (function, n) -> BLOCK
        if error is None and rank.state is not None:
            for name, known in rank.state.registry.by_name.items():
                context = rank.state.orders.contexts.get(name)
                if (
                    context is not None
                    and context.settled
                    and known.announced
                    and not known.identity.is_choice
                ):
                    binding = known.bindings[0]
                    kernel = rank.program.kernels[rank.tuners.index(binding.tuner())]
                    config = binding.configs[context.digests[context.incumbent]]
                    self.winners[kernel.function, known.identity.key[0]] = config.kwargs["BLOCK"]


# ---- the world in which virtual ranks live


@contextlib.contextmanager
def virtual_world() -> Iterator[None]:
    """Let every rank of this process have its own turn, disk, log, mode and preflight."""

    def plan(launch: Launch, configs: dict[str, Any], hooks_s: float) -> Planned:
        reasons = HERE.rank.preflight(launch.tuner, configs)
        tell = {digest: functools.partial(reasons.get, digest, "") for digest in configs}
        return Planned({digest: Compilation("", tell[digest], id) for digest in configs})

    def keep_share(context: RankContext, candidate: str, *about: Any) -> None:
        context.shares[candidate] = HERE.rank.launched_share

    of_process, now_s = settings.run_mode, time.monotonic  # where no rank has its turn, as in a decorator

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".* returned only times")  # on purpose
        for place, name, value in (
            (INTERCEPTION, "session_lock", everybodys_turn()),  # virtual ranks never run at once
            (GROUPS, "of", lambda group: group),
            (options_module, "_is_process_group", lambda group: True),
            (SessionLog, "write", lambda log, *records: None),
            (Winners, "put", lambda cache, *entries, **how: [HERE.rank.disk.put(e, **how) for e in entries]),
            (Winners, "get", lambda cache, key: HERE.rank.disk.entries.get(key.digest)),
            (Winners, "entries", lambda cache, kernel="": HERE.rank.disk.of_kernel(kernel)),
            (Winners, "record_launch", lambda cache, *about: HERE.rank.disk.record_launch(*about)),
            (Winners, "launched_by", lambda cache, function: HERE.rank.disk.launched_by(function)),
            (Dispatcher, "_keep_share", staticmethod(keep_share)),
            (settings, "run_mode", lambda: HERE.rank.mode if hasattr(HERE, "rank") else of_process()),
            (identity, "function_digest", lambda function: "the same on all ranks"),
            (interception, "is_interpreted", lambda: False),
            (dist_autotune.compilation.preflight, "current_device", lambda: -1),
            (dist_autotune.compilation.preflight, "plan", plan),
            (compiler, "Child", VirtualChild),
            (compiler, "POLL_S", 0.0),
            (compiler, "has_binary", lambda key: False),
            (time, "monotonic", lambda: HERE.rank.now_s() if hasattr(HERE, "rank") else now_s()),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield
