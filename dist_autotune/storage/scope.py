"""All that a result depends on: the context as this rank launches it, and the function on its group."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import Struct

from ..formatting import context_label
from ..options import Options
from ..ranks.group import RankGroup
from ..triton_api import interception
from ..triton_api.identity import KernelIdentity, value_text
from ..triton_api.launch import Key


class ContextIdentity(Struct, frozen=True, eq=False, gc=False):
    """One kernel with one key, as this rank launches it: all fields that a result depends on."""

    kernel: str  # identity of the kernel
    source: KernelIdentity
    key: Key
    key_text: str
    texts: Mapping[str, str]  # of the candidates, by digest, in the order of the configs
    constants: str = ""  # constexpr arguments of the launch that are not in the key
    key_names: tuple[str, ...] = ()  # of the values of the key; of a `tunable` there are none
    is_choice: bool = False  # of a `tunable`
    is_joint: bool = False  # of one whose ranks take the same option in every run

    @property
    def title(self) -> str:
        return context_label(self.source.short_name, self.key_text)

    @property
    def named_key(self) -> str:
        """Return the key with the names of its values, as in `M=4096, a.dtype='torch.float16'`."""
        if not self.key_names:
            return self.key_text
        pairs = zip(self.key_names, self.key, strict=True)
        return ", ".join(f"{name}={value_text(value)}" for name, value in pairs)


@dataclass(frozen=True)
class Device:
    """The device that results hold for."""

    name: str
    capability: str
    driver: str

    @property
    def text(self) -> str:
        return f"{self.name} {self.capability} {self.driver}".strip()

    @classmethod
    def current(cls) -> Device:
        if interception.is_interpreted() or not torch.cuda.is_available():
            return cls("interpreter", "", "")
        major, minor = torch.cuda.get_device_capability()
        module = Path("/proc/driver/nvidia/version")  # where the kernel module states the driver's version
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", module.read_text() if module.exists() else "")
        return cls(torch.cuda.get_device_name(), f"{major}.{minor}", found.group(0) if found else "")


class FunctionScope:
    """A tuned function on one group of ranks, as far as results depend on it. mode: as DIST_AUTOTUNE_MODE."""

    def __init__(
        self, options: Options, name: str, source_digest: str, group: RankGroup, *, mode: str
    ) -> None:
        self.options, self.name, self.source_digest = options, name, source_digest
        self.group, self.mode = group, mode
        self.tunes, self.is_strict = mode == "tune", mode == "strict"
        self.is_alone = len(group.ranks) == 1
        self.device = Device.current()
        self.bits = options.bits
        if self.tunes:
            options.check_bits(has_function=bool(source_digest))
        # What keeps its results apart from others'; "": it shares them. Many functions are called `step`,
        # and all lambdas `<lambda>`: a name of the user's own is enough.
        self.scope = "" if options.share else options.name or f"{name}#{source_digest}"
        if self.bits == "same":  # the best of fewer candidates: others would get less than they could
            self.scope = f"{self.scope} with equal bits".strip()
        self.is_replayed = options.objective == "graph"
        if self.is_replayed:
            self.scope = f"{self.scope} in a graph".strip()

    @property
    def kernel_scope(self) -> str:
        """Return the scope of kernels: a launch's time and the whole run's answer different questions."""
        by_run = self.options.objective == "thunk"
        return f"{self.scope} by the whole run".strip() if by_run else self.scope

    @property
    def tells_times(self) -> bool:
        """Return whether its offers tell all times: of several ranks the first one's, where they decide."""
        options, is_first = self.options, self.group.rank == self.group.ranks[0]
        return options.objective == "kernel" and (
            self.is_alone or (is_first and options.search in ("auto", "expected"))
        )

    @property
    def keys_teach(self) -> bool:
        """Return whether a new key may begin with the winners of other keys.

        Not where bits are compared: the bits that are kept must not depend on earlier tuning.
        """
        return self.bits == "any"
