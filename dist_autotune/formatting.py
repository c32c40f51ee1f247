"""How figures and names read, the same in logs, reports and on the command line."""

from __future__ import annotations

import math
import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
WALL_CLOCK = "WallClock"  # the name of the clock of sessions without a GPU
BITS_NOTE = "bits: whether the function's outputs are those of the first configs."
LAUNCH_BOUND_NOTE = (
    "launch-bound: the device waited for the host, so times include host time; candidates that "
    "differ by no more than that left the incumbent in place."
)
WALL_CLOCK_NOTE = "Wall-clock times (interpreter, no GPU): they show behaviour, not speed."


def format_ms(ms: float | None) -> str:
    """Return `ms` with four decimals below 1, three below 10, two above; `-` for None, `failed` for inf."""
    if ms is None:
        return "-"
    if not math.isfinite(ms):
        return "failed" if ms > 0 else str(ms)
    return f"{ms:.{4 if ms < 1 else 3 if ms < 10 else 2}f}"


def format_s(seconds: float) -> str:
    """Return seconds with their unit: two decimals below 1, one below 10, none above."""
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 10 else 0}f} s"


def format_percent(percent: float | None) -> str:
    """Return `percent` with its sign and one decimal; `-` for None."""
    return "-" if percent is None else f"{round(percent, 1) + 0.0:+.1f}"  # + 0.0: no -0.0


def status_label(status: str, *, launch_bound: bool) -> str:
    """Return a context's status, marked where its times hold the host's part."""
    return f"{status}, launch-bound" if launch_bound else status


def bits_label(same_bits: bool | None) -> str:
    """Return `same` or `other`; `-` where nothing was compared."""
    return "-" if same_bits is None else "same" if same_bits else "other"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 run` or `2 runs`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def one_line(text: str) -> str:
    """Return `text` on one line: line ends as ` | `, control characters escaped as Python does."""
    if text.isprintable():
        return text.strip()
    line = " | ".join(line.strip() for line in text.splitlines() if line.strip())
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], line)


def escaped(text: str) -> str:
    """Return `text` without lone surrogates, as of a path that is no UTF-8: they travel nowhere."""
    return text.encode("utf-8", "backslashreplace").decode()


def described(error: BaseException) -> str:
    """Return `Type: message`; of a user's exception that cannot say its message, the type."""
    try:
        return escaped(f"{type(error).__name__}: {error}".rstrip(": "))
    except Exception as other:
        return f"{type(error).__name__} (str() failed: {type(other).__name__})"


def context_label(kernel: str, key: str) -> str:
    """Return `kernel[key]`, the name of a context for people: dtypes short, without quotes."""
    return f"{kernel}[{key}]".replace("'", "").replace("torch.", "").removesuffix("[]")


def config_label(config: object) -> str:
    """Return a config's text without options at their defaults: None, and one CTA."""
    return re.sub(r", (\w+: None|num_ctas: 1)\b(?![\w.])", "", str(config))


def config_parts(text: str) -> tuple[str, ...]:
    """Return the `name: value` parts of a config's text; of other text itself."""
    return tuple(re.split(r", (?=\w+: )", config_label(text)))
