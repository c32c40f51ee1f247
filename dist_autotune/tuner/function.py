"""One tuned function on one group of ranks: its name, its options, and what its ranks must have in common."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
import triton

from ..codec import digest
from ..options import Options
from ..ranks.group import RankGroup
from ..search.messages import Message, Opening, RunReport, checked
from ..storage.crash_guard import FOLDER, CrashGuard
from ..storage.device import Device
from ..storage.winners import Winners
from ..timing.clock import Clock, default_clock
from ..timing.synchronized_start import clock_name
from ..triton_api import identity, interception
from ..version import __version__

SESSION_STATE = "the state of the session"  # the fact that names the session which a rank would go on with
MAY_DIFFER = ("device", "settled", "clock", "retune", "session", SESSION_STATE)  # facts of an opening
SOURCE_OF = "the source of kernel "  # and its name: a fact that runs report
LIMITS = ("watch", "max_runs", "budget_s")  # options that no sample depends on


@dataclass(frozen=True)
class TunedFunction:
    """What stays the same from call to call.

    tunes: False with DIST_AUTOTUNE_MODE=cached, which tries nothing.
    """

    options: Options
    name: str
    source_digest: str
    group: RankGroup
    clock: Clock
    device: Device
    timeout_s: float
    tunes: bool

    @classmethod
    def of(
        cls, options: Options, name: str, source_digest: str, group: RankGroup, *, tunes: bool
    ) -> TunedFunction:
        """Return the function as its options, this process and this device have it."""
        timeout_s = options.resolved_timeout_s()
        clock = options.clock or default_clock(timeout_s, interpreted=interception.is_interpreted())
        return cls(options, name, source_digest, group, clock, Device.current(), timeout_s, tunes)

    @functools.cached_property  # settled calls ask for it
    def is_alone(self) -> bool:
        """Return whether there are no peers."""
        return len(self.group.ranks) == 1

    @property
    def scope(self) -> str:
        """Return what keeps this function's results apart from others'; "": it shares them."""
        # Many functions are called `step`, and all lambdas `<lambda>`: a name of the user's own is enough.
        return "" if self.options.share else self.options.name or f"{self.name}#{self.source_digest}"

    def fact(self, name: str, value: str) -> dict[str, dict[str, int]]:
        """Return a fact as this rank reports it."""
        return {name: {value: self.group.rank}}

    @property
    def point(self) -> dict[str, dict[str, int]]:
        """Return where in the program this rank is: a fact of every exchange."""
        return self.fact("the tuned function", self.name)

    def opening(self, state: str, settled: str, *, retunes: bool) -> Opening:
        """Return what this rank reports when a session opens, or goes on from `state` after a failed run.

        state: "": there is nothing to go on with. settled: the results of earlier sessions, as text.
        """
        facts = {
            SESSION_STATE: state,
            "the source of the tuned function": self.source_digest,
            "the version of dist_autotune": __version__,
            "the version of Triton": triton.__version__,
            "retune": str(retunes),
            "DIST_AUTOTUNE_MODE": "tune" if self.tunes else "cached",
            "device": self.device.text,
            "clock": clock_name(),
            "settled": digest(settled),
            **{f"the option {name}": value for name, value in self.options.agreed_fields().items()},
        }
        rank = self.group.rank
        return Opening(rank, {**self.point, **{name: {value: rank} for name, value in facts.items()}})

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
            "dist_autotune": __version__,
            "triton": triton.__version__,
            "torch": str(torch.__version__),
            **{name: value for name, value in options.agreed_fields().items() if name not in LIMITS},
        }
        directory = disk.directory / FOLDER if disk.directory is not None and self.tunes else None
        return CrashGuard(directory, facts, self.name, self.group.rank, disk.report_guard_failure)


def check_opening(merged: Message) -> Opening:
    """Return what all ranks reported; raises RankMismatch where they differ."""
    facts = {name: values for name, values in merged.facts.items() if name not in MAY_DIFFER}
    return checked(merged, Opening, facts)


class KernelSources:
    """The sources of kernels as all ranks have reported them."""

    def __init__(self) -> None:
        self._texts: dict[str, dict[str, int]] = {}  # name -> texts -> lowest rank

    def check_run(self, merged: Message) -> RunReport:
        """Return what all ranks reported; raises RankMismatch where they differ.

        One name may stand for several texts (functions made by functions), and ranks may launch different
        ones of them: they differ when they have none in common.
        """
        facts = {}
        for name, values in merged.facts.items():
            if name.startswith(SOURCE_OF):
                values = self._texts[name] = {**values, **self._texts.get(name, {})}
                texts = [set(value.split()) for value in values]
                if all(one & other for one, other in itertools.combinations(texts, 2)):
                    continue
            facts[name] = values
        return checked(merged, RunReport, facts)
