"""One tuned function on one group of ranks: its name, its options, and what its results depend on."""

from __future__ import annotations

import torch
import triton

from ..options import Options
from ..ranks.group import RankGroup
from ..search.messages import Facts
from ..storage.crash_guard import CrashGuard
from ..storage.device import Device
from ..storage.winners import Winners
from ..timing.clock import Clock, default_clock
from ..triton_api import identity, interception
from ..version import __version__

LIMITS = ("watch", "max_runs", "budget_s")  # options that no sample depends on


class TunedFunction:
    """What stays the same from call to call. tunes: False with DIST_AUTOTUNE_MODE=cached."""

    def __init__(
        self, options: Options, name: str, source_digest: str, group: RankGroup, *, tunes: bool
    ) -> None:
        self.options, self.name, self.source_digest = options, name, source_digest
        self.group, self.tunes = group, tunes
        self.is_alone = len(group.ranks) == 1
        self.timeout_s = options.resolved_timeout_s()
        interpreted = interception.is_interpreted()
        self.clock: Clock = options.clock or default_clock(self.timeout_s, interpreted=interpreted)
        self.device = Device.current()
        # What keeps its results apart from others'; "": it shares them. Many functions are called `step`,
        # and all lambdas `<lambda>`: a name of the user's own is enough.
        self.scope = "" if options.share else options.name or f"{name}#{source_digest}"

    def facts(self, values: dict[str, str]) -> Facts:
        """Return facts as this rank reports them, with that of every exchange: where in the program it is."""
        values = {"the tuned function": self.name, **values}
        return {name: {value: self.group.rank} for name, value in values.items()}

    def crash_guard(self, disk: Winners) -> CrashGuard:
        """Return the crash guard, named after all that a crash depends on but kernels and keys."""
        options = self.options
        facts = {
            "function": self.name,
            "source": self.source_digest,
            "scope": self.scope,
            "strategy": identity.function_digest(options.search) if callable(options.search) else "",
            "device": self.device.text,
            "clock": type(self.clock).__name__,
            "ranks": str(self.group.ranks),
            **versions(),
            **{name: value for name, value in options.agreed_fields().items() if name not in LIMITS},
        }
        return CrashGuard(disk if self.tunes else Winners(None), facts, self.name, self.group.rank)


def versions() -> dict[str, str]:
    return {"dist_autotune": __version__, "triton": triton.__version__, "torch": str(torch.__version__)}
