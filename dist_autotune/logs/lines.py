"""Records as aligned lines for people: `[  12.4s] rank 0   matmul[4096]  config  7/24  ...`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..formatting import WALL_CLOCK, config_label, context_label, counted, format_ms, one_line, status_label
from . import records


@dataclass
class _Context:
    """What the lines about one context need from its earlier records."""

    label: str
    candidates: int = 0  # 0: its admission was not seen
    config_width: int = 0
    agreed_ms: dict[int, float] = field(default_factory=dict)  # config id -> latest
    banned: set[int] = field(default_factory=set)

    def config(self, config_id: int, text: str) -> str:
        """Return `config  7/24  BLOCK_M=128, num_warps=4`, padded to the context's longest config."""
        digits = len(str(self.candidates))
        of = f"/{self.candidates}" if self.candidates else ""
        return f"config {config_id:>{digits}}{of}  {config_label(text):<{self.config_width}}"

    def best(self) -> str:
        """Return `(best 0.2980, #3)`, or nothing before the first agreed time."""
        if not self.agreed_ms:
            return ""
        config_id = min(self.agreed_ms, key=self.agreed_ms.__getitem__)
        return f"  (best {format_ms(self.agreed_ms[config_id])}, #{config_id})"


class LogLines:
    """Turns the records of one session, in their order, into lines.

    A config is named by its id, its place in the agreed order, counted from 0: `config  7/24` is the
    eighth of 24 and has the number 7 in the JSONL records too.
    """

    def __init__(self) -> None:
        self._contexts: dict[str, _Context] = {}
        self._subject_width = 24
        self._unit = "ms"

    def line(self, record: records.Record) -> str:
        """Return the line for `record`, without its end; never more than one line."""
        subject, text = map(one_line, self._describe(record))
        self._subject_width = max(self._subject_width, len(subject))
        prefix = f"[{record.elapsed_s:6.1f}s] rank {record.rank:<3}"
        return f"{prefix} {subject:<{self._subject_width}}  {text}"

    def _describe(self, record: records.Record) -> tuple[str, str]:
        """Return what the record is about and what it says."""
        if isinstance(record, records.ContextRecord):
            context = self._context(record)
            return context.label, self._about_context(context, record)
        match record:
            case records.RunStarted():
                tried = [f"{self._label(context)} #{config_id}" for context, config_id in record.plan.items()]
                return f"run {record.run}", "tries " + (", ".join(tried) or "nothing")
            case records.Exchanged():
                where = "opening" if record.run < 0 else f"run {record.run}"
                sizes = f"sent {record.sent_bytes} B, received {record.received_bytes} B"
                return where, f"exchanged in {format_ms(record.ms)} ms, {sizes}"
            case records.Merged():
                return f"run {record.run}", f"all ranks said: {self._said(record.payload)}"
            case records.RunTimed():
                doubt = "" if record.counts else ", no sample"
                return f"run {record.run}", f"whole run {format_ms(record.ms)} {self._unit}{doubt}"
            case records.Preflighted():
                return context_label(record.kernel, record.key), self._preflighted(record)
            case records.RunFailed():
                return f"run {record.run}", f"failed on rank {record.by_rank}: {record.error}"
            case records.SessionOpened():
                self._unit = "ms (wall clock)" if record.clock == WALL_CLOCK else "ms"
                return f"session {record.session}", self._opened(record)
            case records.SessionClosed():
                warning = f". {record.warning}" if record.warning else ""
                return f"session {record.session}", (
                    f"closed: {record.outcome}, {counted(record.runs, 'run')}, "
                    f"{counted(record.contexts, 'context')}{warning}"
                )
            case records.Note():
                return "note", record.text
            case _:  # a kind of record that was added without a line of its own still leaves its facts
                return record.event, str(record)

    def _about_context(self, context: _Context, record: records.ContextRecord) -> str:
        match record:
            case records.Trial():
                return self._trial(context, record)
            case records.Agreed():
                if record.ms is not None and record.counted:
                    context.agreed_ms[record.config_id] = record.ms
                times = self._time("agreed", record.ms)
                fastest = f"  fastest rank {format_ms(record.fastest_rank_ms)}"
                doubt = "" if record.counted else "  not counted: some rank ran another config"
                return (
                    context.config(record.config_id, record.config) + times + fastest + doubt + context.best()
                )
            case records.Banned():
                context.banned.add(record.config_id)
                context.agreed_ms.pop(record.config_id, None)
                config = context.config(record.config_id, record.config)
                return f"{config}  banned by rank {record.by_rank}: {record.reason}"
            case records.ContextSettled():
                config = context.config(record.config_id, record.config)
                counts = f"{len(record.timings)} timed, {len(context.banned)} banned"
                status = status_label(record.status, launch_bound=record.launch_bound)
                return f"{config}{self._time('winner', record.ms)}  {status}, {counts}"
            case records.ContextAdmitted():
                context.candidates = len(record.candidates)
                context.config_width = max((len(config_label(c)) for c in record.candidates), default=0)
                whose = "" if record.local else ", launched on other ranks only"
                return f"admitted in run {record.run}: {counted(context.candidates, 'candidate')}, " + (
                    f"incumbent #{record.incumbent}{whose}"
                )
            case _:
                return str(record)

    def _trial(self, context: _Context, trial: records.Trial) -> str:
        of = f" {trial.k}/{trial.n}" if trial.n else f" {trial.k}"
        what = trial.kind + (of if trial.kind != "incumbent" else "")
        launches = f"  {trial.launches} launches" if trial.launches != 1 else ""
        gap = f"  of which the host up to {format_ms(trial.gap_ms)}" if trial.gap_ms else ""
        return (
            context.config(trial.config_id, trial.config)
            + self._time(what, trial.ms)
            + launches
            + gap
            + context.best()
        )

    def _time(self, what: str, ms: float | None) -> str:
        return f"  {what:<13} {format_ms(ms):>8}" + (f" {self._unit}" if ms is not None else "")

    @staticmethod
    def _preflighted(record: records.Preflighted) -> str:
        remark = f"; {record.remark}" if record.remark else ""
        return (
            f"compiled {record.compiled} here ({record.workers} at a time), {record.from_peers} by peers, "
            f"{record.cached} in the cache, {record.failed} failed, {record.seconds:.1f} s{remark}"
        )

    def _opened(self, record: records.SessionOpened) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        return (
            f"opened: {record.thunk}, ranks {list(record.ranks)}, mode {record.mode}, "
            f"search {record.search}, objective {record.objective}, "
            f"{counted(record.n_warmup, 'warm-up')}, {counted(record.n_repeat, 'sample')}, "
            f"{record.statistic} of a rank, {record.rank_reduce} over ranks; {record.device}; {versions}; "
            f"clock {record.clock or '?'}; pid {record.pid}; {record.started_at}"
        )

    def _context(self, record: records.ContextRecord) -> _Context:
        if (context := self._contexts.get(record.context)) is None:
            context = self._contexts[record.context] = _Context(context_label(record.kernel, record.key))
        return context

    def _said(self, payload: dict[str, Any]) -> str:
        parts = payload.get("parts", {}).items()
        told = [f"{self._label(name)} {counted(part.get('measured', 0), 'time')}" for name, part in parts]
        return ", ".join(told) or "nothing launched"

    def _label(self, digest: str) -> str:
        context = self._contexts.get(digest)
        return context.label if context else digest
