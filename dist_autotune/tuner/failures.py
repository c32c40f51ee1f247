"""What is told of a session that goes wrong: to the peers, in the log and on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from ..errors import AgreementTimeout, LaunchFailed, LaunchTimeout, PeerFailed
from ..formatting import described
from ..logs.records import RunFailed
from ..timing.device_errors import DeviceFailed, diagnosis, is_reported, listed
from .function_state import FunctionState
from .recorder import Recorder


class Failures:
    """Texts about the failures of one session on this rank: they name runs, launches and logs."""

    def __init__(self, domain: FunctionState, chronicle: Recorder, log_dir: str | None) -> None:
        self._domain = domain
        self._chronicle = chronicle
        self._log_dir = log_dir

    def diagnosed(self, error: BaseException) -> BaseException:
        """Return what to tell of an error: of one on the device, with the names of what may have caused it.

        An error of ours gets them into its text; one that the function raised is left as it is.
        """
        is_ours = isinstance(error, LaunchFailed | LaunchTimeout)
        if not (is_ours or is_reported(error)):
            return error
        domain = self._domain
        where = f"Rank {domain.agreement.rank}: run {domain.tuning.runs} of {domain.name}"
        text = diagnosis(error, where, domain.rank_contexts.launched(), self._own_log())
        if is_ours:
            error.args = (text,)
            return error
        self.tell_stuck(text)
        return DeviceFailed(text)

    def write(self, error: BaseException, by_rank: int) -> None:
        """Write down that the run under way has failed."""
        self._chronicle.write(
            RunFailed(run=self._domain.tuning.runs, by_rank=by_rank, error=_one_line(error))
        )

    def of_exchange(self, error: BaseException) -> None:
        """Write down that an exchange has failed; to a time-out add where its missing ranks log."""
        if isinstance(error, AgreementTimeout) and self._log_dir is not None:
            files = ", ".join(f"{self._log_dir}/rank-{rank}.jsonl" for rank in error.missing_ranks)
            error.args = (f"{error} Last records: {files}",)
        self.write(error, getattr(error, "rank", self._domain.agreement.rank))

    def tell_stuck(self, text: str) -> None:
        """Say why this process may be stuck; any thread may."""
        diagnosis_to(self._chronicle.note)(text)

    def whereabouts(self) -> str:
        """Return what the run under way is at; asked on another thread."""
        return f"Not ended, or on trial: {listed(self._domain.rank_contexts.launched())}. {self._own_log()}"

    def on_trial(self) -> str:
        """Return what the run under way tries, to follow its name in messages."""
        trials = [
            f"{c.title} with {c.texts[c.trial]}"
            for c in self._domain.tuning.contexts.unsettled
            if c.trial is not None
        ]
        more = f" and {len(trials) - 1} more" if len(trials) > 1 else ""
        return f" ({trials[0]}{more})" if trials else ""

    def _own_log(self) -> str:
        rank = self._domain.agreement.rank
        return "" if self._log_dir is None else f"Log: {self._log_dir}/rank-{rank}.log. "


def diagnosis_to(note: Callable[[str], None]) -> Callable[[str], None]:
    """Return what says why this process may be stuck: by `note`, and where it is seen if it never ends."""

    def write(text: str) -> None:
        note(text)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed, or None
            sys.stderr.write(f"dist_autotune: {text}\n")
            sys.stderr.flush()

    return write


def _one_line(error: BaseException) -> str:
    if isinstance(error, PeerFailed):
        return f"rank {error.rank}: {error.error}"
    return described(error).replace("\n", " ")[:500]
