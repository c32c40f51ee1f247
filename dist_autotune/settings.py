"""Options of one tuned function, and the only place that reads the environment."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InvalidOption

MODE = "DIST_AUTOTUNE_MODE"
CACHE_DIR = "DIST_AUTOTUNE_CACHE_DIR"
LOG_DIR = "DIST_AUTOTUNE_LOG_DIR"
TIMEOUT_S = "DIST_AUTOTUNE_TIMEOUT_S"

# Read by launch.sh and the test suite, not by the package; listed so that a typo is an error.
TORCH_INDEX = "DIST_AUTOTUNE_TORCH_INDEX"
TEST_GPU = "DIST_AUTOTUNE_TEST_GPU"

KNOWN_VARIABLES = (MODE, CACHE_DIR, LOG_DIR, TIMEOUT_S, TORCH_INDEX, TEST_GPU)
# Of other projects: they change what runs here, so `dist-autotune doctor` shows them.
OTHERS_VARIABLES = (
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
)
MODES = ("tune", "cached", "off")

log_directory_default = ".autotune_logs"
DEFAULT_TIMEOUT_S = 300.0
DEFAULT_N_REPEAT = 5
DEFAULT_N_WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `contextual_autotune`, checked; see DESIGN of each in its docstring."""

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
    log_dir: str | os.PathLike[str] | None = log_directory_default
    clock: Any = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    on_stuck: str = "raise"
    max_runs: int | None = None
    budget_s: float | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        _check_variables()
        _one_of("mode", self.mode, ("replay", "online"))
        _one_of("objective", self.objective, ("kernel", "thunk"))
        _one_of("statistic", self.statistic, ("median", "mean", "min"))
        _one_of("rank_reduce", self.rank_reduce, ("max", "mean"))
        _one_of("agree", self.agree, ("key", "ordinal"))
        _one_of("on_stuck", self.on_stuck, ("raise", "abort"))
        if not callable(self.search):
            _one_of("search", self.search, ("auto", "exhaustive", "racing"))
        _at_least("n_repeat", self.n_repeat, 1)
        _at_least("n_warmup", self.n_warmup, 0)
        _at_least("max_runs", self.max_runs, 1)
        _positive("timeout_s", self.timeout_s)
        _positive("budget_s", self.budget_s)
        for name in ("is_dist", "share", "watch"):
            _one_of(name, getattr(self, name), (True, False), bool)
        _one_of("progress", self.progress, (True, False, None), bool | None)
        _is_a("name", self.name, str | None, "a string")
        _is_a("log_dir", self.log_dir, str | os.PathLike | None, "a directory, or None for no logs")
        _is_a("cache", self.cache, bool | str | os.PathLike, "True, False or a directory")
        for method in ("start", "stop", "read_ms"):
            if self.clock is not None and not callable(getattr(self.clock, method, None)):
                raise InvalidOption(f"clock={self.clock!r} has no method {method}(): see dist_autotune.Clock")
        if isinstance(self.preserve, str) or not isinstance(self.preserve, Sequence):
            raise InvalidOption(
                f"preserve={self.preserve!r}: give a sequence of tensors or state_dict holders"
            )
        if self.preserve and self.mode == "online":
            raise InvalidOption("preserve= belongs to mode='replay': an online run happens only once")

    @property
    def repeats(self) -> int:
        return DEFAULT_N_REPEAT if self.n_repeat is None else self.n_repeat

    @property
    def warmups(self) -> int:
        return DEFAULT_N_WARMUP if self.n_warmup is None else self.n_warmup

    @property
    def search_name(self) -> str:
        """Return the strategy's name, with `auto` resolved."""
        if callable(self.search):
            return str(getattr(self.search, "__qualname__", type(self.search).__name__))
        if self.search != "auto":
            return self.search
        return "exhaustive" if self.n_repeat is not None or self.n_warmup is not None else "racing"

    def resolved_log_dir(self) -> Path | None:
        """Return the absolute log directory (now: a later os.chdir does not move it)."""
        if self.log_dir is None:
            return None
        chosen = self.log_dir
        if chosen == log_directory_default:
            chosen = os.environ.get(LOG_DIR) or chosen
        return Path(chosen).absolute()

    def resolved_timeout_s(self) -> float:
        if self.timeout_s != DEFAULT_TIMEOUT_S or TIMEOUT_S not in os.environ:
            return self.timeout_s
        try:
            seconds = float(os.environ[TIMEOUT_S])
        except ValueError:
            raise InvalidOption(f"{TIMEOUT_S}={os.environ[TIMEOUT_S]!r}: give seconds, such as 60") from None
        _positive(TIMEOUT_S, seconds)
        return seconds

    def resolved_cache_dir(self) -> Path | None:
        """Return the directory of the on-disk cache; None: caching is off."""
        if self.cache is False:
            return None
        return cache_directory() if self.cache is True else Path(self.cache).absolute()

    def agreed_fields(self) -> dict[str, str]:
        """Return what must be equal on all ranks, as text."""
        names = ("n_repeat", "n_warmup", "mode", "objective", "statistic", "rank_reduce", "agree", "share")
        fields = {name: repr(getattr(self, name)) for name in (*names, "watch", "max_runs", "budget_s")}
        return {**fields, "search": self.search_name}


def run_mode() -> str:
    """Return the value of DIST_AUTOTUNE_MODE, `tune` when unset."""
    mode = os.environ.get(MODE) or "tune"
    if mode not in MODES:
        raise InvalidOption(f"{MODE}={mode!r}: expected one of {', '.join(MODES)}")
    return mode


def process_rank() -> int:
    """Return the rank that torchrun gave this process, 0 without one: for the names of logs."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def cache_directory() -> Path:
    """Return DIST_AUTOTUNE_CACHE_DIR, or the platform's user cache directory."""
    chosen = os.environ.get(CACHE_DIR)
    if chosen:
        return Path(chosen).absolute()
    from .cache import default_directory

    return default_directory()


def variables() -> dict[str, str]:
    """Return the variables that are set: those named DIST_AUTOTUNE_..., and others that matter here."""
    names = [name for name in os.environ if name.startswith("DIST_AUTOTUNE_")]
    return {name: os.environ[name] for name in [*sorted(names), *OTHERS_VARIABLES] if name in os.environ}


def check_variables() -> None:
    """Raise InvalidOption for a name or a value of a DIST_AUTOTUNE_... variable that cannot be used."""
    _check_variables()
    run_mode()
    Options().resolved_timeout_s()


def environment_of_helpers(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment for a helper process: this one's without our own settings, then `changes`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DIST_AUTOTUNE_")}
    merged = {**kept, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def digest(text: str) -> str:
    """Return 16 hexadecimal digits that stand for `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_variables() -> None:
    unknown = sorted(
        name for name in os.environ if name.startswith("DIST_AUTOTUNE_") and name not in KNOWN_VARIABLES
    )
    if unknown:
        raise InvalidOption(
            f"unknown environment variable {', '.join(unknown)}; known: {', '.join(KNOWN_VARIABLES)}"
        )


def _one_of(name: str, value: Any, allowed: tuple[Any, ...], kind: Any = str) -> None:
    if not isinstance(value, kind) or value not in allowed:
        raise InvalidOption(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _is_a(name: str, value: Any, kind: Any, expected: str) -> None:
    if not isinstance(value, kind):
        raise InvalidOption(f"{name}={value!r}: expected {expected}")


def _at_least(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidOption(f"{name}={value!r}: expected an int of at least {least}")


def _positive(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise InvalidOption(f"{name}={value!r}: expected a positive number of seconds")
