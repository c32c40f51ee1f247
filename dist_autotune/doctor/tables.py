"""The doctor's report as tables, in the same form as the tables of the other reports."""

from __future__ import annotations

from collections.abc import Iterator

from .. import settings
from ..formatting import Table, columns, counted
from .facts import CACHE, LOGS, Examination
from .findings import Finding

MISSING = "not installed"
UNKNOWN = "none"


def doctor_tables(seen: Examination, findings: list[Finding]) -> Iterator[Table]:
    """Yield what there is, then what it means."""
    yield _versions_table(seen)
    yield _settings_table(seen)
    if seen.gpus:
        yield _gpus_table(seen)
    if len(seen.gpus) > 1:
        yield _links_table(seen)
    rows = tuple((name, "yes" if works else "no", text) for name, (works, text) in seen.backends().items())
    yield Table("Symmetric memory", columns("backend", "works", "seen"), rows)
    checks = tuple((finding.level, finding.check, finding.seen) for finding in findings)
    yield Table("Findings", columns("", "what", "seen"), checks)


def next_steps(findings: list[Finding]) -> Iterator[str]:
    """Yield a line for each problem, then for each remark, and one that sums up."""
    for level in ("problem", "remark"):
        for finding in findings:
            if finding.level == level:
                yield f"{level}: {finding.check}: {finding.next_step}."
    counts = [sum(finding.level == level for finding in findings) for level in ("problem", "remark")]
    said = [
        counted(count, level) for count, level in zip(counts, ("problem", "remark"), strict=True) if count
    ]
    yield f"{'Something needed is broken' if counts[0] else 'Everything needed works'}" + (
        f" ({', '.join(said)})." if said else "."
    )


def _versions_table(seen: Examination) -> Table:
    absent = {"CUDA": "a CPU build of torch", "driver": UNKNOWN}
    rows = tuple((name, text or absent.get(name, MISSING)) for name, text in seen.versions.items())
    return Table("Versions", columns("what", "version"), rows)


def _settings_table(seen: Examination) -> Table:
    defaults = {
        settings.MODE: settings.MODES[0],
        settings.CACHE_DIR: seen.directories.get(CACHE, "?"),
        settings.LOG_DIR: seen.directories.get(LOGS, "?"),
        settings.TIMEOUT_S: f"{settings.DEFAULT_TIMEOUT_S:g}",
    }
    unset = [(name, value, "default") for name, value in defaults.items() if name not in seen.variables]
    given = [(name, value, "environment") for name, value in seen.variables.items()]
    return Table("Settings", columns("variable", "value", "from"), tuple(sorted([*unset, *given])))


def _gpus_table(seen: Examination) -> Table:
    names = columns(">GPU", "name", "capability", ">SMs", ">memory GiB", ">free GiB")
    rows = tuple(
        (
            str(gpu["index"]),
            gpu["name"],
            gpu["capability"],
            str(gpu["sms"]),
            f"{gpu['memory_bytes'] / 2**30:.1f}",
            f"{gpu['free_bytes'] / 2**30:.1f}",
        )
        for gpu in seen.gpus
    )
    return Table("GPUs", names, rows)


def _links_table(seen: Examination) -> Table:
    indices = [gpu["index"] for gpu in seen.gpus]
    cells = {}
    for link in seen.links():
        speed = "?" if link["gb_per_s"] is None else f"{link['gb_per_s']:.0f}"
        access = "" if link["peer_access"] else "no peer access"
        cells[link["from"], link["to"]] = " ".join(part for part in (speed, link["link"], access) if part)
    rows = tuple((f"GPU {a}", *("-" if a == b else cells.get((a, b), "?") for b in indices)) for a in indices)
    names = columns("from \\ to", *(f">GPU {index}" for index in indices))
    note = "GB/s of one copy of 256 MiB, median of 7, one direction at a time; NV18: 18 NVLinks (nvidia-smi)."
    return Table("Links", names, rows, note)
