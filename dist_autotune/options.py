"""The options of one tuned function."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from . import settings
from .errors import CacheWarning, InvalidOption, warn

DEFAULT_N_REPEAT = 5
DEFAULT_N_WARMUP = 3
LONGEST_FILLER_MS = 1000.0
DEFAULT_OVERHEAD, FREE_S = 0.15, 10.0  # online; a job does not feel so short a session


VALUES = {  # the texts that an option takes; what is not here takes something else
    "mode": ("replay", "online"),
    "search": ("auto", "exhaustive", "racing", "expected"),
    "objective": ("kernel", "thunk", "graph"),
    "on_stuck": ("raise", "abort"),
    "bits": settings.BIT_RULES,
}
AGREED = (  # what must be equal on all ranks
    *("n_repeat", "n_warmup", "mode", "search", "objective", "share", "watch"),
    *("max_runs", "budget_s", "overhead", "filler_ms", "bits"),
)
OF_REPEATED_RUNS = ("preserve", "bits", "outputs")  # steps are made once
OF_FUNCTIONS = ("mode", "group", "preserve", "clock", "bits", "outputs")  # `dist-autotune run` lacks them


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked options of `contextual_autotune`: they make its signature and help, and those of `run`.

    Args:
        is_dist: all ranks of `group` agree on each config; every rank must call the function. `run` sets it.
        n_repeat: measured runs per config; None: 5. Giving it, or n_warmup, selects `exhaustive`.
        n_warmup: unmeasured runs per config, before those; None: 3.
        mode: `replay` repeats the function in one call until all is tuned; with `online` a call is one run.
        search: `exhaustive`, `racing`, `expected`, `auto`, or a function returning a flow (docs/options.md).
        objective: `kernel` judges a config by its launches, `thunk` by the time of the whole run, `graph` by
            replays of the whole run, captured into a CUDA graph (docs/search.md).
        group: torch.distributed process group, or a DeviceMesh of one dimension; None: the default group.
        share: other functions use the results, too.
        name: the function's name in logs, reports and cache; None: its qualified name, or the program's file.
        watch: with is_dist, tune a key that all ranks meet in one settled call; else it stays untuned.
        preserve: tensors, generators, modules, optimizers and other objects with state_dict(). Their state is
            put back before each further run (replay).
        cache: True: the user's cache directory; a path: that directory; False, or `off` of `run`: none.
        log_dir: directory of `rank-N.log` and `rank-N.jsonl`; None, or `off` of `run`: no files.
        clock: how a launch is timed; None: CUDA events on a GPU, the wall clock without one.
        timeout_s: seconds that a rank waits for peers or for its device; a longer run is reported as stuck.
        on_stuck: `abort` ends the process `timeout_s` after it was reported as stuck (in a collective).
        max_runs: runs of a session, the final one included; None: 4 x what the search plans.
        budget_s: seconds since the session's first call, all included, after which the best so far wins.
        overhead: share of the time that tuning may take online: trials are spread over as many steps as that
            needs. None: 0.15 in sessions of more than 10 s. Replay is not limited, and its log says so.
        compile_jobs: candidates that a rank compiles at a time; None: one per core of its share of the host,
            online half of that.
        filler_ms: the longest delay of a trial, so that the host runs ahead and its time is in no sample;
            None: 20, online 1.
        progress: rank 0 shows progress on stderr, also with None: a bar on a terminal, else a line at each
            quarter.
        bits: `same`: a winner's outputs equal those of the first configs, bit for bit, on all ranks, else the
            next best is verified; `check`: the report says of each winner whether they do (replay).
        outputs: outputs that `bits` compares beside the result and `preserve`: tensors or objects with
            state_dict().
    """

    is_dist: bool = field(default=False, kw_only=False)
    n_repeat: int | None = field(default=None, kw_only=False)
    n_warmup: int | None = field(default=None, kw_only=False)
    mode: str = "replay"
    search: str | Callable[..., Any] = "auto"
    objective: str = "kernel"
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
    overhead: float | None = None
    compile_jobs: int | None = None
    filler_ms: float | None = None
    progress: bool | None = None
    bits: str = settings.DEFAULT_BITS
    outputs: Sequence[Any] = ()

    # No options: what the environment has said, as it was before, and all variables then.
    _not_given: ClassVar[Mapping[str, Any]] = {}
    _variables: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        settings.check_variables()
        self._check_values()
        self._check_objects()
        if self.preserve and self.mode == "online":
            raise InvalidOption(
                "preserve= belongs to mode='replay': an online run happens only once, and nothing is put "
                "back. Leave preserve= out."
            )
        if self.objective == "graph" and self.mode == "online":
            raise InvalidOption(
                "objective='graph' belongs to mode='replay': a run is captured and replayed to judge it. Use "
                "objective='thunk' online, or decorate the function that is captured."
            )
        found = self._from_environment()
        not_given = {name: getattr(self, name) for name in found if name != "log_dir"}
        found |= {"_not_given": not_given, "_variables": settings.variables()}
        for name, value in found.items():
            object.__setattr__(self, name, value)
        for name in ("log_dir", "cache"):  # a later os.chdir moves none
            if isinstance(given := getattr(self, name), str | os.PathLike):
                object.__setattr__(self, name, Path(given).absolute())

    def at_first_call(self) -> Options:
        """Return the options as the environment says by now: programs set variables after their imports.

        The log directory stays that of the decoration.
        """
        return self if settings.variables() == self._variables else replace(self, **self._not_given)

    def _from_environment(self) -> dict[str, Any]:
        """Return the options that were not given, as the environment or the user's directories say."""
        found: dict[str, Any] = {}
        if isinstance(self.log_dir, settings.DefaultText):
            found["log_dir"] = settings.log_directory()
        if isinstance(self.bits, settings.DefaultText):
            found["bits"] = settings.DefaultText(settings.bits())
        if isinstance(self.timeout_s, settings.DefaultSeconds):
            found["timeout_s"] = settings.timeout_s()
        if self.compile_jobs is None:
            found["compile_jobs"] = settings.compile_jobs()
        if self.overhead is None and self.mode == "online":
            found["overhead"] = settings.overhead()
        if self.cache is True:
            found["cache"] = settings.cache_directory() or False
            if not found["cache"]:
                text = f"No cache: {settings.NO_HOME}. Winners are not kept on disk."
                warn(text, CacheWarning)
        return found

    def _check_values(self) -> None:
        """Raise InvalidOption for a text, number or directory that cannot be used."""
        for name, values in VALUES.items():
            if not (name == "search" and callable(self.search)):
                _one_of(name, getattr(self, name), values)
        _at_least("n_repeat", self.n_repeat, 1)
        _at_least("n_warmup", self.n_warmup, 0)
        _at_least("max_runs", self.max_runs, 1)
        _at_least("compile_jobs", self.compile_jobs, 1)
        _positive("timeout_s", self.timeout_s)
        if self.budget_s is not None:
            _positive("budget_s", self.budget_s)
        if self.overhead is not None:
            self._check_overhead()
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
        if self.name == "":
            raise InvalidOption("name='': give a name, or None for that of the function")

    def _check_overhead(self) -> None:
        if not isinstance(self.overhead, int | float):
            raise InvalidOption(f"overhead={self.overhead!r}: expected a number, such as 0.15")
        settings.check_overhead("overhead", self.overhead)

    def _check_objects(self) -> None:
        """Raise InvalidOption for an object that its option does not take."""
        for method in ("start", "stop", "read_ms") if self.clock is not None else ():
            if not callable(getattr(self.clock, method, None)):
                raise InvalidOption(f"clock={self.clock!r} has no method {method}(): see dist_autotune.Clock")
        if isinstance(self.clock, type):
            raise InvalidOption(f"clock={self.clock!r}: give a clock, not its class: {self.clock.__name__}()")
        for name in ("preserve", "outputs"):
            items = getattr(self, name)
            if isinstance(items, str) or not isinstance(items, Sequence):
                raise InvalidOption(f"{name}={items!r}: give a sequence of tensors or state_dict holders")
        if not (self.group is None or _is_mesh(self.group) or _is_process_group(self.group)):
            raise InvalidOption(f"group={self.group!r}: expected a process group, a DeviceMesh, or None")
        if _is_mesh(self.group) and self.group.ndim != 1:
            names = self.group.mesh_dim_names or ()
            which = f"mesh[{names[-1]!r}]" if names else "mesh.get_group(mesh_dim)"
            raise InvalidOption(
                f"group= is a DeviceMesh of {self.group.ndim} dimensions {tuple(names)}: give one, as {which}"
            )

    def rules(self) -> dict[str, Any]:
        """Return the options that steer decisions, as `Rules` and the log name them."""
        names = ("mode", "objective", "max_runs", "budget_s")
        n_repeat = DEFAULT_N_REPEAT if self.n_repeat is None else self.n_repeat
        n_warmup = DEFAULT_N_WARMUP if self.n_warmup is None else self.n_warmup
        given = {name: getattr(self, name) for name in names}
        given |= {"n_repeat": n_repeat, "n_warmup": n_warmup, "bits": self.bits}
        given |= self.resolved_overhead()
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

    @property
    def log_path(self) -> Path | None:
        """Return the log directory; None: no files."""
        return self.log_dir if isinstance(self.log_dir, Path) else None

    @property
    def cache_path(self) -> Path | None:
        """Return the directory of winners; None: none are kept."""
        return self.cache if isinstance(self.cache, Path) else None

    def resolved_overhead(self) -> dict[str, float | None]:
        """Return the share of the time that tuning may take, None: no limit, and the seconds before it."""
        if self.overhead is None and self.mode == "online":
            return {"overhead": DEFAULT_OVERHEAD, "free_s": FREE_S}
        return {"overhead": self.overhead, "free_s": 0.0}

    def check_bits(self, *, has_function: bool = True) -> None:
        """Raise InvalidOption if tuning cannot keep to `bits`; has_function: of one, not of steps."""
        if self.bits == "any" or self.mode == "replay":
            return
        is_default = isinstance(self.bits, settings.DefaultText)
        given = f"{settings.BITS}={self.bits}" if is_default else f"bits={self.bits!r}"
        why = (
            f"{given} compares outputs by repeating a step from the same inputs and state, and here each "
            "step is made once. Decorate a function that makes one step with @contextual_autotune"
        )
        if has_function:
            why = (
                f"{given} belongs to mode='replay': outputs are compared by repeating a step from the same "
                "inputs and state, and online each step is made once. Leave out mode='online'"
            )
        raise InvalidOption(
            f"{why} and name all state that it changes in preserve=: the first call tunes, each later one is "
            "one step. If a step cannot be repeated, tune another function with the same kernels and use its "
            f"results with {settings.MODE}=cached; or set bits='any'."
        )

    def agreed_fields(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, as text."""
        fields = {name: repr(getattr(self, name)) for name in AGREED}
        # Of many candidates auto tries a few, racing all.
        search = "auto" if self.search == "auto" and self.search_name == "racing" else self.search_name
        overhead = str(self.resolved_overhead()["overhead"])
        return {**fields, "search": search, "overhead": overhead}


def made_by(owner: str, lacking: Sequence[str] = (), /, *by_position: Any, **by_name: Any) -> Options:
    """Return the options given to `owner`; raises TypeError with the nearest name for an unknown one.

    lacking: the owner can do nothing with these, so they are no nearest name.
    """
    known = {each.name for each in fields(Options)}
    for name in by_name.keys() - known:
        close = difflib.get_close_matches(name, known.difference(lacking), 1)
        nearest = "".join(f" Did you mean {each}?" for each in close)
        raise TypeError(f"{owner}() has no option {name}.{nearest} docs/options.md lists all")
    try:
        return Options(*by_position, **by_name)
    except TypeError as error:  # whose arguments are the owner's
        raise TypeError(str(error).replace("Options.__init__", owner)) from None


def help_texts() -> dict[str, str]:
    """Return the line on each option in the docstring of `Options`."""
    args = inspect.cleandoc(Options.__doc__ or "").partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", args, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _is_mesh(group: Any) -> bool:
    module = sys.modules.get("torch.distributed.device_mesh")  # imported by whoever has a mesh
    return module is not None and isinstance(group, module.DeviceMesh)


def _is_process_group(group: Any) -> bool:
    """Return whether torch takes it for a group, which may have ended, or have other members."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available():
        return False
    return isinstance(group, module.ProcessGroup) or group is module.GroupMember.NON_GROUP_MEMBER


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
