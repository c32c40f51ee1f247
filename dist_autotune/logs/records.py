"""The events of a session: its log lines and its JSONL records are made from these, and read back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from ..codec import parse
from ..formatting import counted
from ..search.phases.pace import Cost
from ..search.phases.step_gain import StepGain

SCHEMA_VERSION = 1
Judge: TypeAlias = Literal["launch", "run"]
LONGEST_LINE_BYTES = 64 << 20  # a longer one is read in parts, which are no records


class Record(Struct, frozen=True, kw_only=True, tag_field="event"):
    """Fields that every event carries."""

    schema: int = SCHEMA_VERSION
    session: str = ""  # the same text on every rank of one session
    rank: int = 0
    elapsed_s: float = 0.0  # since the session opened, on this rank's monotonic clock

    @property
    def event(self) -> str:
        return str(self.__struct_config__.tag)


class SessionOpened(Record, frozen=True, kw_only=True, tag="session_opened"):
    thunk: str
    world_size: int
    ranks: tuple[int, ...]
    mode: str
    search: str
    objective: str
    n_warmup: int
    n_repeat: int
    device: str
    versions: dict[str, str]
    pid: int
    started_at: str  # wall clock, ISO 8601, UTC: for people, never for decisions
    clock: str = ""
    node: str = ""  # the name of this rank's host
    max_runs: int | None = None
    budget_s: float | None = None
    overhead: float | None = None
    free_s: float = 0.0
    bits: str = "any"  # | "same" | "check": see `dist_autotune.contextual_autotune`
    tries_all: bool = False  # search="racing", where auto would try a few of many candidates


class ContextRecord(Record, frozen=True, kw_only=True):
    """Fields that every event about one (kernel, key) carries."""

    run: int
    context: str  # digest, the same on every rank
    kernel: str
    key: str


class ConfigRecord(ContextRecord, frozen=True, kw_only=True):
    """Fields that every event about one config carries."""

    config_id: int  # its place in the agreed order; -1: several configs in one run
    config: str


class ContextAdmitted(ContextRecord, frozen=True, kw_only=True, tag="context_admitted"):
    candidates: tuple[str, ...]  # texts, in the agreed order; config ids index it
    incumbent: int
    local: bool = True  # False: only other ranks launch it
    like: str = ""  # the nearest tuned key: its winner is the first candidate; "": there was none
    default: int = 0  # the candidate that is launched untuned
    again: str = ""  # after an upgrade: which of them are raced; "": all


class RunStarted(Record, frozen=True, kw_only=True, tag="run_started"):
    """Written and flushed before the run: after a crash the log names the candidates on trial."""

    run: int
    plan: dict[str, int]  # context -> config id on trial


class Trial(ConfigRecord, frozen=True, kw_only=True, tag="trial"):
    kind: str  # "warm-up" | "sample" | "incumbent" (not on trial in this run)
    k: int  # 1-based: sample or warm-up k ...
    n: int  # ... of n planned for this config (0: the search does not say)
    launches: int
    ms: float | None  # mean per launch of this run, this rank; None: no usable sample
    median_ms: float | None  # this rank's median so far of this config
    gap_ms: float = 0.0  # how much of `ms` may be the host's; 0.0: none, or the clock cannot tell
    judge: Judge = "launch"  # `ms` is of the kernel's launches, or of the whole "run"


class RunTimed(Record, frozen=True, kw_only=True, tag="run_timed"):
    """A run that was timed as a whole on this rank: `objective="thunk"`, tunables."""

    run: int
    judged: str  # "context|candidate" by digest; "|tuned" and "|default": the comparison of plans
    counts: bool  # False: a warm-up, or a run that did not count
    ms: float | None
    median_ms: float | None


class Merged(Record, frozen=True, kw_only=True, tag="merged"):
    """The reports of all ranks on a run, merged: the next plan follows from this alone."""

    run: int
    payload: dict[str, Any]  # a `RunReport` without facts; fields at defaults are left out


class Agreed(ConfigRecord, frozen=True, kw_only=True, tag="agreed"):
    ms: float | None  # reduced over ranks; None: a rank that launched it has no sample
    fastest_rank_ms: float | None
    counted: bool  # False: some rank could not run the planned config
    gap_ms: float = 0.0  # how much of `ms` may be a host's


class Banned(ConfigRecord, frozen=True, kw_only=True, tag="banned"):
    by_rank: int
    reason: str


class Preflighted(Record, frozen=True, kw_only=True, tag="preflighted"):
    """How this rank compiled and loaded the candidates of one (kernel, key), all by the end of `run`."""

    run: int
    kernel: str
    key: str
    compiled: int  # by this rank
    from_peers: int  # by another process of this host meanwhile
    cached: int  # there at the start
    failed: int  # their reasons are in records of their own
    seconds: float
    workers: int  # candidates compiled at a time
    remark: str = ""


class Exchanged(Record, frozen=True, kw_only=True, tag="exchanged"):
    run: int  # -1: the exchange that opens the session
    sent_bytes: int
    received_bytes: int
    ms: float


class ContextSettled(ConfigRecord, frozen=True, kw_only=True, tag="context_settled"):
    status: str  # "tuned" | "cached" | "starved" | "partial"
    ms: float | None
    timings: dict[str, float] = {}  # candidate's text -> agreed ms
    launch_bound: bool = False  # times hold the host's part: near candidates could not be told apart
    fastest_rank_ms: float | None = None
    default_ms: float | None = None  # agreed, of the candidate that is launched untuned
    banned: dict[str, str] = {}  # candidate's text -> rank and reason
    judge: Judge = "launch"  # `ms` is of one launch, or of the whole "run"
    launches: int = 1  # of this rank in one run; 0: only other ranks launch it
    same_bits: bool | None = None  # the winner leaves the first config's outputs; None: not verified
    again: str = ""  # which candidates were raced after an upgrade; "": there was none
    untried: str = ""  # what was not tried, and why
    not_fastest: str = ""  # why the winner is not the fastest of those timed; "": it is


class RunFailed(Record, frozen=True, kw_only=True, tag="run_failed"):
    run: int
    by_rank: int
    error: str


class SessionClosed(Record, frozen=True, kw_only=True, tag="session_closed"):
    runs: int
    contexts: int
    outcome: str  # "settled" | "partial" | "unfinished": given up while it tried | the error's class name
    warning: str = ""
    seconds: float = 0.0  # since the first call, on this rank
    compiling_s: float = 0.0
    runs_s: float = 0.0
    exchanges_s: float = 0.0
    cost: Cost | None = None  # to the program, online; None: replay
    gain: StepGain | None = None  # of a step, online; None: not compared
    operations: tuple[str, ...] = ()  # how those of its runs send data between ranks, a line each


class Note(Record, frozen=True, kw_only=True, tag="note"):
    text: str
    is_outlook: bool = False  # how far the session is: moot once it has ended


AnyRecord: TypeAlias = (
    SessionOpened | ContextAdmitted | RunStarted | Trial | RunTimed | Merged | Agreed | Banned | Preflighted
    | Exchanged | ContextSettled | RunFailed | SessionClosed | Note
)  # fmt: skip


def read_records(path: Path, skipped: Counter[str]) -> Iterator[Record]:
    """Yield the records of a `rank-N.jsonl` file in order; count unusable lines by reason in `skipped`."""
    if not path.is_file():  # a pipe would be waited for
        skipped["not a regular file"] += 1
        return
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE_BYTES):
            try:
                if line.strip():
                    yield parse(line, AnyRecord, SCHEMA_VERSION)  # type: ignore[arg-type]  # of a union
            except ValueError as error:
                skipped[str(error)] += 1


def describe_skipped(reasons: Counter[str]) -> str:
    """Return `skipped 3 lines: 2 x damaged, 1 x schema 2, expected 1`."""
    listed = ", ".join(f"{n} x {reason}" for reason, n in reasons.items())
    return f"skipped {counted(reasons.total(), 'line')}: {listed}"
