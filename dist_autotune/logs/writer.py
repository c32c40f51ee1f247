"""Writes a session's records as they come: `rank-N.log` for people, `rank-N.jsonl` with the same events.

One `write` system call for the lines of a run: other sessions and other processes of the same rank number
append to the files, and a crash leaves every run before it. A full file becomes `rank-N.older.*`, in place of
the one before.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import asdict

from ..codec import to_json
from ..errors import warn
from ..formatting import (
    WALL_CLOCK,
    bits_label,
    config_label,
    context_label,
    counted,
    format_ms,
    one_line,
    status_label,
)
from ..search.phases.step_gain import cost_and_gain
from . import records
from .records import Record

logger = logging.getLogger("dist_autotune")
FOR_USERS = (  # to follow: INFO, where all others are DEBUG
    *(records.Banned, records.Preflighted, records.ContextSettled),
    *(records.RunFailed, records.SessionClosed, records.Note),
)
MOST_BYTES = 16 << 20  # of a file: a rank has four
SUBJECT_WIDTH = 32  # to which shorter ones are padded


class SessionLog(contextlib.AbstractContextManager["SessionLog"]):
    """Writes records of one rank to `directory` and to the logger `dist_autotune`.

    The files are opened at the first record. A directory that cannot be written is one RuntimeWarning; tuning
    goes on. A forked child writes nothing: its launches are no part of the session.
    """

    def __init__(self, directory: Path | None, rank: int) -> None:
        names = f"rank-{rank}.jsonl", f"rank-{rank}.log"
        self._paths = () if directory is None else tuple(directory.absolute() / name for name in names)
        self._files: dict[Path, int] = {}  # descriptors of those that are open
        weakref.finalize(self, _close, self._files).atexit = False  # a function may go amid its session
        self._lines = LogLines()
        self._pid = os.getpid()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, *records: Record) -> None:
        """Append records to both files; they are with the operating system when this returns."""
        if os.getpid() != self._pid:
            return
        lines = [self._lines.line(record) for record in records]
        for record, line in zip(records, lines, strict=True):
            level = logging.INFO if isinstance(record, FOR_USERS) else logging.DEBUG
            logger.log(logging.WARNING if getattr(record, "warning", "") else level, "%s", line)
        if not (self._paths and records):
            return
        try:
            for path, texts in zip(self._paths, (map(to_json, records), lines), strict=True):
                self._append(path, "\n".join(texts))
        except OSError as error:
            self.close()
            self._paths = ()  # before the warning, which raises where warnings are errors
            text = f"No more logs in {path.parent}: {error}. Tuning goes on without them."
            warn(text, RuntimeWarning)

    def close(self) -> None:
        """Close the files; a later record opens them again."""
        _close(self._files)

    def _append(self, path: Path, text: str) -> None:
        """Append lines in one write, whole, or raise OSError."""
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        is_open = path in self._files
        file = self._files[path] if is_open else self._open(path)
        size = os.fstat(file).st_size
        if size and size + len(data) > MOST_BYTES:
            file = self._begin_next(path)
        elif size and not is_open and os.pread(file, 1, size - 1) != b"\n":  # a full disk has cut a line
            data = b"\n" + data
        if os.write(file, data) != len(data):
            raise OSError(errno.ENOSPC, "no space for whole lines", str(path))

    def _open(self, path: Path) -> int:
        if not path.parent.exists():  # a directory that is there already may be anything of the user's
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / ".gitignore").write_text("*\n")
        file = self._files[path] = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        return file

    def _begin_next(self, path: Path) -> int:
        """Put a full file aside, unless another process of this rank has done so; return the next one."""
        full = self._files.pop(path)
        if path.exists() and os.path.samestat(os.fstat(full), path.stat()):
            os.replace(path, path.with_name(f"{path.stem}.older{path.suffix}"))
        os.close(full)
        return self._open(path)


def _close(files: dict[Path, int]) -> None:
    while files:
        os.close(files.popitem()[1])


@dataclass
class _Context:
    """Fields of a context's earlier records that its later lines show."""

    label: str
    candidates: int = 0  # 0: its admission was not seen
    agreed_ms: dict[int, float] = field(default_factory=dict)  # config id -> latest

    def best(self) -> str:
        """Return `(best 0.2980, #3)`, or nothing before the first agreed time."""
        if not self.agreed_ms:
            return ""
        config_id = min(self.agreed_ms, key=self.agreed_ms.__getitem__)
        return f"(best {format_ms(self.agreed_ms[config_id])}, #{config_id})"


class LogLines:
    """Turns the records of one session into lines: `[  12.4s] rank 0   matmul[4096]  config  7/24  ...`.

    A config is named by its id, its place in the agreed order, counted from 0; its text ends the line.
    """

    def __init__(self) -> None:
        self._contexts: dict[str, _Context] = {}
        self._unit = "ms"
        self._function = ""

    def line(self, record: Record) -> str:
        """Return the line for `record`, without its end; never more than one line."""
        subject, text = one_line(self._subject(record)), one_line(self._text(record))
        return f"[{record.elapsed_s:6.1f}s] rank {record.rank:<3} {subject:<{SUBJECT_WIDTH}}  {text}"

    def _subject(self, record: Record) -> str:
        """Return the context, session or run of a record."""
        if isinstance(record, records.ContextRecord | records.Preflighted):
            return context_label(record.kernel, record.key)
        if isinstance(record, records.SessionOpened):
            self._function = record.thunk
            return f"session {record.session}"
        if isinstance(record, records.SessionClosed):
            return f"session {record.session} of {self._function}"
        run: int | None = getattr(record, "run", None)
        return record.event if run is None else "opening" if run < 0 else f"run {run}"

    def _text(self, record: Record) -> str:
        """Return the text of a record after its subject."""
        match record:
            case records.ConfigRecord():
                context = self._context(record)
                of = f"{record.config_id}/{context.candidates}" if context.candidates else record.config_id
                parts = [f"config {of:>6}", *self._of_config(context, record), config_label(record.config)]
                return "  ".join(filter(None, parts))
            case records.ContextAdmitted():
                context = self._context(record)
                context.candidates = len(record.candidates)
                where = "" if record.local else ", launched on other ranks only"
                candidates = f"{counted(context.candidates, 'candidate')}, incumbent #{record.incumbent}"
                like = f", as with the key {record.like}" if record.like else ""
                again = f"; {record.again}" if record.again else ""
                return f"admitted in run {record.run}: {candidates}{like}{where}{again}"
            case records.RunStarted():
                tried = [f"{self._label(context)} #{config_id}" for context, config_id in record.plan.items()]
                return f"tries {', '.join(tried) or 'nothing'}"
            case records.Merged():
                launched = map(self._label, record.payload.get("parts", ()))
                return f"merged: {', '.join(launched) or 'nothing launched'}"
            case records.RunFailed():
                return f"failed on rank {record.by_rank}: {record.error}"
            case records.SessionClosed():
                counts = f"{counted(record.runs, 'run')}, {counted(record.contexts, 'context')}"
                paid = cost_and_gain(record.cost, record.gain)
                return ". ".join(filter(None, [f"closed: {record.outcome}, {counts}", *paid, record.warning]))
            case records.Note():
                return record.text
            case records.SessionOpened():
                self._unit = "ms (wall clock)" if record.clock == WALL_CLOCK else "ms"
        return _facts(record)

    def _of_config(self, context: _Context, record: records.ConfigRecord) -> list[str]:
        """Return the parts of a line on a config."""
        match record:
            case records.Trial():
                kind = "incumbent" if record.kind == "incumbent" else f"{record.kind} {record.k}"
                of = f"/{record.n}" if record.n and record.kind != "incumbent" else ""
                launches = f"{record.launches} launches" if record.launches != 1 else ""
                gap = f"host time up to {format_ms(record.gap_ms)}" if record.gap_ms else ""
                return [self._time(kind + of, record.ms), launches, gap, context.best()]
            case records.Agreed():
                if record.ms is not None and record.counted:
                    context.agreed_ms[record.config_id] = record.ms
                fastest = f"fastest rank {format_ms(record.fastest_rank_ms)}"
                doubt = "" if record.counted else "not counted: some rank ran another config"
                return [self._time("agreed", record.ms), fastest, doubt, context.best()]
            case records.Banned():
                context.agreed_ms.pop(record.config_id, None)
                return [f"banned by rank {record.by_rank}: {record.reason}"]
            case records.ContextSettled():
                status = status_label(record.status, launch_bound=record.launch_bound)
                bits = "" if record.same_bits is None else f", {bits_label(record.same_bits)} bits"
                counts = f"{status}, {len(record.timings)} timed, {len(record.banned)} banned{bits}"
                slower = f"not the fastest: {record.not_fastest}" if record.not_fastest else ""
                said = "; ".join(filter(None, (counts, record.untried, slower)))
                return [self._time("winner", record.ms), said]
        return []

    def _time(self, what: str, ms: float | None) -> str:
        return f"{what:<13} {format_ms(ms):>8}" + (f" {self._unit}" if ms is not None else "")

    def _context(self, record: records.ContextRecord) -> _Context:
        label = context_label(record.kernel, record.key)
        return self._contexts.setdefault(record.context, _Context(label))

    def _label(self, digest: str) -> str:
        return self._contexts[digest].label if digest in self._contexts else digest


def _facts(record: Record) -> str:
    """Return the event and the fields that its subject does not tell: `exchanged: sent_bytes 170, ...`."""
    told = {"schema", "session", "rank", "elapsed_s", "run", "kernel", "key"}
    fields = {name: value for name, value in asdict(record).items() if name not in told}
    text = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items())
    return f"{record.event}: {', '.join(text)}"
