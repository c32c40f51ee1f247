"""The environment: no other module reads it. An empty variable counts as unset."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Mapping
from pathlib import Path

from .errors import InvalidOption, warn

MODE = "DIST_AUTOTUNE_MODE"
CACHE_DIR = "DIST_AUTOTUNE_CACHE_DIR"
LOG_DIR = "DIST_AUTOTUNE_LOG_DIR"
TIMEOUT_S = "DIST_AUTOTUNE_TIMEOUT_S"
BITS = "DIST_AUTOTUNE_BITS"
COMPILE_TIMEOUT_S = "DIST_AUTOTUNE_COMPILE_TIMEOUT_S"
COMPILE_JOBS = "DIST_AUTOTUNE_COMPILE_JOBS"
OVERHEAD = "DIST_AUTOTUNE_OVERHEAD"

# Read by launch.sh and the test suite; listed so that a typo is told.
READ_ELSEWHERE = ("DIST_AUTOTUNE_TORCH_INDEX", "DIST_AUTOTUNE_TEST_GPU")
KNOWN_VARIABLES = (
    *(MODE, CACHE_DIR, LOG_DIR, TIMEOUT_S, BITS, COMPILE_TIMEOUT_S, COMPILE_JOBS, OVERHEAD),
    *READ_ELSEWHERE,
)
# Of other projects: they change what runs here, so `dist-autotune doctor` shows them.
OTHERS_VARIABLES = (
    "TRITON_INTERPRET",
    "TRITON_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "NVSHMEM_DISABLE_NVLS",
)
MODES = ("tune", "cached", "strict", "off")
BIT_RULES = ("any", "same", "check")
NO_HOME = f"this user has no home directory. Set HOME, or {CACHE_DIR} to a directory that can be written"


class DefaultText(str):
    """An argument that was not given: the environment may say otherwise."""


class DefaultSeconds(float):
    """As `DefaultText`."""


DEFAULT_LOG_DIR = DefaultText(".autotune_logs")
DEFAULT_BITS = DefaultText("any")
DEFAULT_TIMEOUT_S = DefaultSeconds(300.0)
DEFAULT_COMPILE_TIMEOUT_S = 120.0
MOST_OVERHEAD = 1.0


_ENVIRONMENT = getattr(os.environ, "_data", None)
_MODE_KEY = os.fsencode(MODE)


def run_mode() -> str:
    if _ENVIRONMENT is not None and _MODE_KEY not in _ENVIRONMENT:  # 0.1 us, `os.environ.get` takes 1
        return "tune"
    mode = os.environ.get(MODE) or "tune"
    if mode not in MODES:
        raise InvalidOption(f"{MODE}={mode!r}: expected one of {', '.join(MODES)}")
    return mode


def process_rank() -> int:
    """Return the rank that torchrun gave this process, 0 without one."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def world_size() -> int:
    """Return how many ranks torchrun has started, 1 without one."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


def agent_has_store() -> bool:
    """Return whether torchrun's agent hosts the store of the default group, no rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def place_on_host(position: int, ranks: int) -> tuple[int, int]:
    """Return which of its host's ranks this process is, of how many; without torchrun, of the group's."""
    said = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if all(text.isdecimal() for text in said) and int(said[0]) < int(said[1]):
        return int(said[0]), int(said[1])
    return position, ranks


def log_directory() -> str:
    return os.environ.get(LOG_DIR) or DEFAULT_LOG_DIR


def timeout_s() -> float:
    """Return DIST_AUTOTUNE_TIMEOUT_S, or the default: the longest that a rank waits for its peers."""
    return _seconds(TIMEOUT_S, DEFAULT_TIMEOUT_S, "a positive number of seconds", least=math.ulp(0.0))


def bits() -> str:
    """Return DIST_AUTOTUNE_BITS, or the default: the rule for the bits of outputs."""
    rule = os.environ.get(BITS) or DEFAULT_BITS
    if rule not in BIT_RULES:
        raise InvalidOption(f"{BITS}={rule!r}: expected one of {', '.join(BIT_RULES)}")
    return rule


def compile_timeout_s() -> float:
    """Return the seconds that one candidate may take to compile; 0: no limit, and no process of its own."""
    return _seconds(COMPILE_TIMEOUT_S, DEFAULT_COMPILE_TIMEOUT_S, "seconds, or 0 for no limit", least=0.0)


def compile_jobs() -> int | None:
    """Return DIST_AUTOTUNE_COMPILE_JOBS, how many candidates a rank compiles at a time; None: not given."""
    text = os.environ.get(COMPILE_JOBS)
    if text and not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise InvalidOption(f"{COMPILE_JOBS}={text!r}: expected an int of at least 1")
    return int(text) if text else None


def overhead() -> float | None:
    """Return DIST_AUTOTUNE_OVERHEAD, the share of the time that tuning may take; None: not given."""
    text = os.environ.get(OVERHEAD)
    return check_overhead(OVERHEAD, text) if text else None


def check_overhead(name: str, value: object) -> float:
    """Return the share as a number; raises InvalidOption unless it is above 0 and at most MOST_OVERHEAD."""
    share = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            share = float(value)
    if not 0 < share <= MOST_OVERHEAD:
        raise InvalidOption(
            f"{name}={value!r}: expected the share of the time that tuning may take, above 0 and at most "
            f"{MOST_OVERHEAD:g}; 0.15 lets a step take 1.15 times as long on average"
        )
    return share


def cache_directory() -> Path | None:
    """Return DIST_AUTOTUNE_CACHE_DIR, or this user's, such as `~/.cache/dist_autotune`; None: no home."""
    if chosen := os.environ.get(CACHE_DIR):
        return Path(chosen).absolute()
    import platformdirs  # only needed where no directory was chosen

    try:
        directory = platformdirs.user_cache_path("dist_autotune", appauthor=False)
    except RuntimeError:  # neither HOME nor an entry in the password database
        return None
    return directory if directory.is_absolute() else None  # older versions leave the "~" as it is


def variables() -> dict[str, str]:
    """Return the set variables: DIST_AUTOTUNE_..., and those of other programs that matter here."""
    names = [name for name in os.environ if name.startswith("DIST_AUTOTUNE_")]
    return {name: os.environ[name] for name in [*sorted(names), *OTHERS_VARIABLES] if os.environ.get(name)}


def unknown_variables() -> str:
    """Return the DIST_AUTOTUNE_... variables that nothing reads, as of a typo, with the nearest name."""
    found = []
    for name in sorted(os.environ.keys() - set(KNOWN_VARIABLES)):
        if name.startswith("DIST_AUTOTUNE_") and os.environ[name]:
            nearest = difflib.get_close_matches(name, KNOWN_VARIABLES, 1)
            found.append(name + "".join(f" (did you mean {each}?)" for each in nearest))
    return ", ".join(found)


def check_variables() -> None:
    """Raise InvalidOption for a DIST_AUTOTUNE_... value that cannot be used; warn of unknown names."""
    if unknown := unknown_variables():
        warn(f"Nothing reads {unknown}: docs/environment.md lists all variables")
    run_mode()
    bits()
    compile_timeout_s()
    compile_jobs()
    overhead()
    timeout_s()


def environment_of_helpers(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment for a helper process: this one's without our own settings, then `changes`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DIST_AUTOTUNE_")}
    return {name: value for name, value in {**kept, **changes}.items() if value is not None}


def _seconds(name: str, default: float, expected: str, *, least: float) -> float:
    text = os.environ.get(name)
    try:
        seconds = float(text) if text else default
    except ValueError:
        raise InvalidOption(f"{name}={text!r}: give seconds, such as 60") from None
    if not least <= seconds < math.inf:
        raise InvalidOption(f"{name}={seconds!r}: expected {expected}")
    return seconds
