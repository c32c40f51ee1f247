"""`contextual_autotune` and the class behind it."""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from . import identity, intercept, settings
from .agreement import AGREEMENTS, Agreement
from .clock import Clock
from .domain import Domain
from .errors import InvalidOption, RankMismatch
from .flows import Strategy
from .intercept import INTERCEPTION
from .log import SessionLog
from .preserve import check_preserved
from .records import Note
from .report import TuningReport
from .session import Session, settled_call
from .settings import Options

P = ParamSpec("P")
R = TypeVar("R")


class ContextualAutotuner(Generic[P, R]):
    """A function whose `triton.autotune` launches are tuned where they run.

    Calling it tunes until nothing is left to try, and from then on runs the function with the agreed
    configs. Made by `contextual_autotune`; takes the function's arguments and returns its result.
    """

    def __init__(self, fn: Callable[P, R], options: Options) -> None:
        if isinstance(fn, (classmethod, staticmethod)):
            raise InvalidOption(f"put @{type(fn).__name__} above @contextual_autotune, not below it")
        if not callable(fn):
            raise InvalidOption(f"contextual_autotune decorates a function, not {fn!r}")
        if inspect.iscoroutinefunction(inspect.unwrap(_bare(fn))) or inspect.isasyncgenfunction(_bare(fn)):
            raise InvalidOption(
                f"{fn!r} is asynchronous: its launches happen after the call has returned. "
                "Decorate the synchronous function that launches the kernels."
            )
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.options = options
        bare = _bare(fn)
        self._name = str(options.name or getattr(bare, "__qualname__", type(bare).__qualname__))
        self._log_dir = options.resolved_log_dir()
        self._domain: Domain | None = None
        self._session: Session | None = None
        self._report: TuningReport | None = None
        self._wants_session = True
        self._forgets = False
        self._noted: set[str] = set()  # contexts that are logged as not tuned

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        mode = settings.run_mode()
        if mode == "off" or (INTERCEPTION.active and _joins_active_call()):
            return self.fn(*args, **kwargs)
        with INTERCEPTION.turn:
            if INTERCEPTION.active:  # a tuned function inside a tuned function joins its session
                return self.fn(*args, **kwargs)
            return self._call(mode, functools.partial(self.fn, *args, **kwargs))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @property
    def report(self) -> TuningReport | None:
        """What the last session found, or has found so far; None before the first."""
        return self._report if self._session is None else self._session.report()

    @property
    def settled(self) -> bool:
        """Whether nothing is left to try: the moment to capture a CUDA graph."""
        return self._session is None and not self._wants_session

    def retune(self) -> None:
        """Tune anew at the next call, whatever memory and disk hold. Call it on all ranks."""
        if self._session is not None:
            self._session.close()
            self._report = self._session.report()
        self._session, self._wants_session, self._forgets = None, True, True

    def _call(self, mode: str, thunk: Callable[[], R]) -> R:
        domain = self._current_domain(tunes=mode == "tune")
        if intercept.is_capturing():
            if not self._forgets:
                domain.look_on_disk()
            return settled_call(domain, thunk, self._note, votes=False)[0]
        if self._session is None and not self._wants_session:
            is_alone = len(domain.agreement.ranks) == 1
            votes = self.options.watch and not is_alone and mode == "tune"
            try:
                result, wants = settled_call(domain, thunk, self._note, votes=votes)
            except RankMismatch as error:
                self._wants_session = error.starts_anew
                raise
            self._wants_session = wants and mode == "tune" and (votes or is_alone)
            if wants and not self._wants_session:
                self._note_unwatched(domain)
            return result
        return self._run_session(domain, thunk)

    def _note(self, text: str) -> None:
        """Write a remark to the log outside a session."""
        domain = self._domain
        rank = 0 if domain is None else domain.agreement.rank
        with SessionLog(self._log_dir, rank) as log:
            log.write(Note(rank=rank, text=text))

    def _note_unwatched(self, domain: Domain) -> None:
        """Log, once each, the keys that are new and will not be tuned."""
        for name in sorted(domain.launches.met - self._noted):
            self._noted.add(name)
            title = domain.launches.contexts[name].title
            self._note(f"{title} is new to {self._name} and keeps its first config: nothing watches for it")

    def _run_session(self, domain: Domain, thunk: Callable[[], R]) -> R:
        if self._session is None:
            domain.forgetful = self._forgets and domain.tuning.rules.tunes
            log = SessionLog(self._log_dir, domain.agreement.rank)
            self._session = Session(domain, log, None if self._log_dir is None else str(self._log_dir))
            self._wants_session = True
        session = self._session
        try:
            session.open_once()
            INTERCEPTION.tuning = domain.tuning.rules.tunes
            return session.online(thunk) if self.options.mode == "online" else session.replay(thunk)
        finally:
            INTERCEPTION.tuning = False
            if session.is_over:
                self._report, self._session = session.report(), None
                self._wants_session = session.wants_another
                self._forgets = self._forgets and (session.has_failed or not domain.forgetful)

    def _current_domain(self, *, tunes: bool) -> Domain:
        """Return the state for the group as it is now; another group or mode starts anew."""
        agreement: Agreement = (
            AGREEMENTS.of(self.options.group) if self.options.is_dist else AGREEMENTS.alone()
        )
        known = self._domain
        if known is None or known.agreement is not agreement or known.tuning.rules.tunes != tunes:
            try:
                digest = identity.function_digest(_bare(self.fn))
                known = Domain(self.options, self._name, digest, agreement, tunes=tunes)
            except BaseException as error:  # the peers wait for this rank to open a session
                agreement.fail(error)
                raise
            self._domain = known
            self._session, self._wants_session = None, True
        return known


def contextual_autotune(
    fn: Callable[..., Any] | None = None,
    is_dist: bool = False,
    n_repeat: int | None = None,
    n_warmup: int | None = None,
    *,
    mode: str = "replay",
    search: str | Strategy = "auto",
    objective: str = "kernel",
    statistic: str = "median",
    rank_reduce: str = "max",
    agree: str = "key",
    group: Any = None,
    share: bool = True,
    name: str | None = None,
    watch: bool = True,
    preserve: Sequence[Any] = (),
    cache: bool | str | os.PathLike[str] = True,
    log_dir: str | os.PathLike[str] | None = settings.log_directory_default,
    clock: Clock | None = None,
    timeout_s: float = settings.DEFAULT_TIMEOUT_S,
    on_stuck: str = "raise",
    max_runs: int | None = None,
    budget_s: float | None = None,
    progress: bool | None = None,
) -> Any:
    """Tune the `triton.autotune` kernels that a function launches, inside that function.

    Works bare (`@contextual_autotune`) and called. A call runs the function with one config per kernel
    and key, again and again until each has its winner, and returns the result of the last run
    (`mode="replay"`); or makes one trial per call (`mode="online"`, for training steps).

    Args:
        is_dist: all ranks of `group` agree on each config; every rank must call the function.
        n_repeat: measured runs per config; 5 when None. Giving it, or n_warmup, selects `exhaustive`.
        n_warmup: unmeasured runs before them; 3 when None.
        search: `exhaustive`, `racing`, `auto`, or a function returning a flow (see `flows`).
        objective: `kernel` judges a config by its launches, `thunk` by the time of the whole run.
        statistic: over the samples of one rank: `median`, `mean` or `min`.
        rank_reduce: over ranks: `max` or `mean`.
        agree: which contexts of different ranks belong together: those of equal `key`, or the n-th of
            a kernel (`ordinal`), for keys that hold a rank or a local size.
        group: torch.distributed process group; None: the default group.
        share: False: results belong to this function alone.
        name: of the function in logs, reports and cache; None: its qualified name.
        watch: with is_dist, vote after a settled call whether some rank met a new key.
        preserve: tensors or objects with state_dict() to put back before each further run (replay).
        cache: True: the user's cache directory; a path: that directory; False: none.
        log_dir: directory of `rank-N.log` and `rank-N.jsonl`; None: no files.
        clock: how a launch is timed; None: CUDA events on a GPU, the wall clock without one.
        timeout_s: seconds that a rank waits for its peers in one exchange.
        on_stuck: `abort` ends the process when a peer has failed while this rank hangs in a collective.
        max_runs: runs of a session, the final one included; None: 4 x what the search plans.
        budget_s: seconds after which a session takes the best it knows.
        progress: a bar on rank 0; None: when stderr is a terminal.

    Raises:
        TuningError: for an option that cannot be used; see `dist_autotune.errors` for what a call raises.
    """
    chosen = {key: value for key, value in locals().items() if key != "fn"}
    options = Options(**chosen)
    check_preserved(options.preserve)
    if fn is None:
        return lambda function: ContextualAutotuner(function, options)
    return ContextualAutotuner(fn, options)


def is_tuning() -> bool:
    """Return whether a launch may be a trial now: fast launch paths are for False only."""
    return INTERCEPTION.tuning


def _bare(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under `functools.partial`s."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _joins_active_call() -> bool:
    """Return whether this thread works for the active call: autograd runs backward on its own threads."""
    return torch._C._current_graph_task_id() != -1
