"""The options of one tuned function."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import settings
from .errors import CacheWarning, InvalidOption

DEFAULT_N_REPEAT = 5
DEFAULT_N_WARMUP = 3
LONGEST_FILLER_MS = 1000.0


@dataclass(frozen=True)
class About:
    """What there is to say of an option beside its type, its default and its meaning."""

    of_program: str = ""  # its help in `dist-autotune run`; empty: a program cannot be given it
    values: tuple[str, ...] = ()  # the texts that it takes; (): it takes something else
    is_agreed: bool = False  # it must be equal on all ranks


# Checks, the comparison of ranks and the options of `run` are made from this table.
ABOUT = {
    "is_dist": About("All ranks of the default process group agree on each config; default: yes."),
    "n_repeat": About(
        "Measured steps per config. Giving it, or --n-warmup, selects the exhaustive search.", is_agreed=True
    ),
    "n_warmup": About("Unmeasured steps before them.", is_agreed=True),
    "mode": About(values=("replay", "online"), is_agreed=True),
    "search": About(
        "exhaustive, racing, expected or auto.",
        values=("auto", "exhaustive", "racing", "expected"),
        is_agreed=True,
    ),
    "objective": About(
        "kernel: judge a config by its launches; thunk: by the time of the whole step.",
        values=("kernel", "thunk", "graph"),
        is_agreed=True,
    ),
    "statistic": About(
        "Over the samples of one rank: median, mean or min.", values=("median", "mean", "min"), is_agreed=True
    ),
    "rank_reduce": About("Over ranks: max or mean.", values=("max", "mean"), is_agreed=True),
    "agree": About(
        "Contexts of ranks belong together by key, or as the n-th of a kernel: ordinal.",
        values=("key", "ordinal"),
        is_agreed=True,
    ),
    "share": About("--no-share: results belong to this program alone.", is_agreed=True),
    "name": About("Of the program in logs, reports and cache; default: its file or module."),
    "watch": About(
        "With several ranks, vote after each settled step whether some rank met a new key.", is_agreed=True
    ),
    "cache": About("Directory of the results; 'off': none."),
    "log_dir": About("Directory of the logs; 'off': none."),
    "timeout_s": About("Seconds that a rank waits for its peers."),
    "on_stuck": About("abort: end the process when a peer is stuck in a step.", values=("raise", "abort")),
    "max_runs": About("Steps of a session at most.", is_agreed=True),
    "budget_s": About("Seconds after which the best so far stays.", is_agreed=True),
    "compile_jobs": About("Candidates that a rank compiles at a time, behind the steps."),
    "filler_ms": About(
        "How much later a trial may begin, in ms, for kernels to be timed without the host's part.",
        is_agreed=True,
    ),
    "progress": About("On rank 0's stderr: a bar on a terminal, else a line every 5 s."),
    "bits": About(values=settings.BIT_RULES, is_agreed=True),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `contextual_autotune`, checked; its docstring says what each means."""

    is_dist: bool = False
    n_repeat: int | None = None
    n_warmup: int | None = None
    mode: str = "replay"
    search: str | Callable[..., Any] = "auto"
    objective: str = "kernel"
    statistic: str = "median"
    rank_reduce: str = "max"
    agree: str = "key"
    group: Any = None
    share: bool = True
    name: str | None = None
    watch: bool = True
    preserve: Sequence[Any] = ()
    cache: bool | str | os.PathLike[str] = True
    log_dir: str | os.PathLike[str] | None = settings.DEFAULT_LOG_DIR
    clock: Any = None
    timeout_s: float = settings.DEFAULT_TIMEOUT_S
    on_stuck: str = "raise"
    max_runs: int | None = None
    budget_s: float | None = None
    compile_jobs: int | None = None
    filler_ms: float | None = None
    progress: bool | None = None
    bits: str = settings.DEFAULT_BITS
    outputs: Sequence[Any] = ()

    def __post_init__(self) -> None:
        settings.check_names()
        for name, about in ABOUT.items():
            if about.values and not (name == "search" and callable(self.search)):
                _one_of(name, getattr(self, name), about.values)
        _at_least("n_repeat", self.n_repeat, 1)
        _at_least("n_warmup", self.n_warmup, 0)
        _at_least("max_runs", self.max_runs, 1)
        _at_least("compile_jobs", self.compile_jobs, 1)
        _positive("timeout_s", self.timeout_s)
        if self.budget_s is not None:
            _positive("budget_s", self.budget_s)
        if self.filler_ms is not None:
            _milliseconds("filler_ms", self.filler_ms, most=LONGEST_FILLER_MS)
        for name in ("is_dist", "share", "watch"):
            _is_a(name, getattr(self, name), bool, "one of True, False")
        _is_a("progress", self.progress, bool | None, "one of True, False, None")
        _is_a("name", self.name, str | None, "a string")
        _is_a("log_dir", self.log_dir, str | os.PathLike | None, "a directory, or None for no logs")
        _is_a("cache", self.cache, bool | str | os.PathLike, "True, False or a directory")
        for name in ("log_dir", "cache"):
            if getattr(self, name) == "":
                raise InvalidOption(f"{name}='': give a directory; '.' is the current one")
        for method in ("start", "stop", "read_ms") if self.clock is not None else ():
            if not callable(getattr(self.clock, method, None)):
                raise InvalidOption(f"clock={self.clock!r} has no method {method}(): see dist_autotune.Clock")
        if isinstance(self.clock, type):
            raise InvalidOption(f"clock={self.clock!r}: give a clock, not its class: {self.clock.__name__}()")
        for name in ("preserve", "outputs"):
            items = getattr(self, name)
            if isinstance(items, str) or not isinstance(items, Sequence):
                raise InvalidOption(f"{name}={items!r}: give a sequence of tensors or state_dict holders")
        if _is_mesh(self.group) and self.group.ndim != 1:
            names = self.group.mesh_dim_names or ()
            which = f"mesh[{names[-1]!r}]" if names else "mesh.get_group(mesh_dim)"
            raise InvalidOption(
                f"group= is a DeviceMesh of {self.group.ndim} dimensions {tuple(names)}: give one, as {which}"
            )
        if self.preserve and self.mode == "online":
            raise InvalidOption("preserve= belongs to mode='replay': an online run happens only once")
        if self.objective == "graph" and self.mode == "online":
            raise InvalidOption(
                "objective='graph' belongs to mode='replay': a run is captured and replayed to judge it"
            )
        if not isinstance(self.cache, bool):  # a later os.chdir does not move it
            object.__setattr__(self, "cache", Path(self.cache).absolute())

    def rules(self) -> dict[str, Any]:
        """Return the options that steer decisions, as `Rules` and the log name them."""
        names = ("mode", "objective", "rank_reduce", "max_runs", "budget_s")
        n_repeat = DEFAULT_N_REPEAT if self.n_repeat is None else self.n_repeat
        n_warmup = DEFAULT_N_WARMUP if self.n_warmup is None else self.n_warmup
        given = {name: getattr(self, name) for name in names}
        given |= {"n_repeat": n_repeat, "n_warmup": n_warmup, "bits": self.resolved_bits()}
        given["tries_all"] = self.search == "racing"
        return {**given, "search": self.search_name}

    @property
    def search_name(self) -> str:
        """Return the strategy's name, with `auto` resolved."""
        if callable(self.search):
            return str(getattr(self.search, "__qualname__", type(self.search).__name__))
        if self.search != "auto":
            return self.search
        return "exhaustive" if self.n_repeat is not None or self.n_warmup is not None else "racing"

    def process_group(self) -> Any:
        """Return the process group; of a DeviceMesh, that of its dimension."""
        if not _is_mesh(self.group):
            return self.group
        from torch.distributed import GroupMember  # torch, which readers of logs do not need

        is_member = self.group.get_coordinate() is not None
        return self.group.get_group() if is_member else GroupMember.NON_GROUP_MEMBER

    def resolved_log_dir(self) -> Path | None:
        """Return the log directory, absolute: a later os.chdir does not move it."""
        if self.log_dir is None:
            return None
        is_default = isinstance(self.log_dir, settings.DefaultText)
        return Path(settings.log_directory() if is_default else self.log_dir).absolute()

    def resolved_bits(self) -> str:
        return settings.bits() if isinstance(self.bits, settings.DefaultText) else self.bits

    def check_bits(self, *, has_function: bool = True) -> None:
        """Raise InvalidOption if tuning cannot keep to `bits`; has_function: of one, not of steps."""
        if self.resolved_bits() == "any" or self.mode == "replay":
            return
        is_default = isinstance(self.bits, settings.DefaultText)
        given = f"{settings.BITS}={settings.bits()}" if is_default else f"bits={self.bits!r}"
        advice = "Leave out mode='online'"
        if not has_function:
            advice = "Decorate a function that makes one step with @contextual_autotune"
        raise InvalidOption(
            f"{given} belongs to mode='replay': outputs are compared by making a step again from the same "
            f"inputs and state, and online each is made once. {advice} and name all that it changes in "
            "preserve=: the first call tunes, each later one is one step. Where a step cannot be made again, "
            f"use another function's results with {settings.MODE}=cached, or bits='any'."
        )

    def resolved_timeout_s(self) -> float:
        is_default = isinstance(self.timeout_s, settings.DefaultSeconds)
        return settings.timeout_s() if is_default else self.timeout_s

    def resolved_compile_jobs(self) -> int | None:
        """Return how many candidates a rank compiles at a time; None: as its cores allow."""
        return settings.compile_jobs() if self.compile_jobs is None else self.compile_jobs

    def resolved_cache_dir(self) -> Path | None:
        """Return the directory of the on-disk cache; None: caching is off, or the user has no directory."""
        if self.cache is False:
            return None
        if self.cache is not True:
            return Path(self.cache)
        directory = settings.cache_directory()
        if directory is None:
            text = f"No cache: {settings.NO_HOME}. Winners are not kept on disk."
            warnings.warn(text, CacheWarning, stacklevel=2)
        return directory

    def agreed_fields(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, as text."""
        fields = {name: repr(getattr(self, name)) for name, about in ABOUT.items() if about.is_agreed}
        # Of many candidates auto tries a few, racing all.
        search = "auto" if self.search == "auto" and self.search_name == "racing" else self.search_name
        return {**fields, "search": search, "bits": self.resolved_bits()}


def _is_mesh(group: Any) -> bool:
    module = sys.modules.get("torch.distributed.device_mesh")  # imported by whoever has a mesh
    return module is not None and isinstance(group, module.DeviceMesh)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise InvalidOption(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _is_a(name: str, value: Any, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise InvalidOption(f"{name}={value!r}: expected {expected}")


def _at_least(name: str, value: Any, least: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_int and value >= least):
        raise InvalidOption(f"{name}={value!r}: expected an int of at least {least}")


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise InvalidOption(f"{name}={value!r}: expected a positive number of seconds")


def _milliseconds(name: str, value: Any, *, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise InvalidOption(f"{name}={value!r}: expected milliseconds, from 0 to {most:g}")
