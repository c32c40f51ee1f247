"""The report of a tuned function's last session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import formatting
from ..formatting import config_label, context_label, counted, format_ms
from ..search.budget import Forecast
from ..timing.time_spent import SecondsSpent

if TYPE_CHECKING:  # what only reads reports needs neither torch nor Triton
    from ..launch.registry import Registry
    from ..search.state import SearchState


@dataclass(frozen=True)
class TunedContext:
    """One kernel with one key, and its winner."""

    kernel: str
    key: Any
    config: Any  # the winning triton.Config, or the winning option of a `tunable`; None: there is none
    ms: float | None = None  # agreed over the ranks; None: never timed
    fastest_rank_ms: float | None = None  # of the winner; `ms` is that of the slowest, or the mean
    status: str = "tuned"  # | "cached" | "starved" | "partial" | "tuning" | "unfinished": it was dropped
    timings: Mapping[str, float] = field(default_factory=dict)  # candidate's text -> agreed ms
    banned: Mapping[str, str] = field(default_factory=dict)  # candidate's text -> reason
    launch_bound: bool = False  # the device waited for the host, whose part is in the times

    def __str__(self) -> str:
        label, ms, _, status, timed, banned, config = self._cells(world_size=1)
        return f"{label}: {config}, {ms} ms, {status} ({timed} timed, {banned} banned)"

    @property
    def spread_percent(self) -> float | None:
        """How much longer the agreed time of the winner is than the fastest rank's; None: not timed."""
        if self.ms is None or not self.fastest_rank_ms:
            return None
        return 100 * (self.ms / self.fastest_rank_ms - 1)

    def _cells(self, world_size: int) -> tuple[str, ...]:
        key = self.key if isinstance(self.key, tuple) else (self.key,)
        label = context_label(self.kernel, ", ".join(map(str, key)))
        is_known = self.spread_percent is not None and world_size > 1
        spread = f"{self.spread_percent:.1f} %" if is_known else "-"
        status = formatting.status_label(self.status, launch_bound=self.launch_bound)
        counts = str(len(self.timings)), str(len(self.banned))
        config = "-" if self.config is None else config_label(self.config)
        return (label, format_ms(self.ms), spread, status, *counts, config)


@dataclass(frozen=True)
class TuningReport:
    """The contexts of one session; `str` of it is a table."""

    runs: int  # executions of the tuned function, the final one included
    contexts: tuple[TunedContext, ...]
    world_size: int = 1
    seconds: float = 0.0
    clock: str = ""  # class name
    log_dir: str | None = None
    warning: str = ""
    spent: SecondsSpent = field(default_factory=SecondsSpent)
    outlook: Forecast | None = None  # what is still to be tried; None: the session is over

    def __str__(self) -> str:
        work = f"{counted(len(self.contexts), 'context')} in {counted(self.runs, 'run')}"
        lines = [f"{work} on {counted(self.world_size, 'rank')}, {self.seconds:.1f} s"]
        if self.clock == formatting.WALL_CLOCK:
            lines.append(formatting.WALL_CLOCK_NOTE)
        if self.contexts:
            columns = ("context", "ms", "spread", "status", "timed", "banned", "winner")
            rows = [context._cells(self.world_size) for context in self.contexts]
            lines += formatting.align(columns, rows, right={"ms", "spread", "timed", "banned"})
        if any(context.launch_bound for context in self.contexts):
            lines.append(formatting.LAUNCH_BOUND_NOTE.capitalize())
        if self.outlook is not None:
            lines.append(f"Under way: {self.outlook}")
        if self.warning:
            lines.append(f"Warning: {self.warning}")
        if self.log_dir is not None:
            lines.append(f"Logs: {self.log_dir}")
        return "\n".join(lines)


def tuned_contexts(search: SearchState, registry: Registry, names: Iterable[str]) -> tuple[TunedContext, ...]:
    """Return the contexts among `names` in which there was a choice, as they stand."""
    contexts = []
    for name in sorted(names):
        context, rank_context = search.contexts.get(name), registry.by_name.get(name)
        if context is None or rank_context is None or len(context.digests) == 1:
            continue
        best, bans = None if context.is_spent else context.incumbent, sorted(context.banned.items())
        contexts.append(
            TunedContext(
                kernel=context.kernel,
                key=rank_context.key,
                config=None if best is None else rank_context.config_of(context.digests[best]),
                ms=None if best is None else context.times.ms.get(best),
                fastest_rank_ms=None if best is None else context.times.fastest_ms.get(best),
                launch_bound=best is not None and context.is_launch_bound,
                status=context.status or "tuning",
                timings={context.texts[index]: ms for index, ms in context.known_ms()},
                banned={context.texts[i]: f"rank {rank}: {reason}" for i, (rank, reason) in bans},
            )
        )
    return tuple(contexts)
