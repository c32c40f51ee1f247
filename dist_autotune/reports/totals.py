"""The totals of a job, over all its functions and loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..formatting import context_label, counted
from ..tuner.report import Findings, labels_by_reason

UNSETTLED = ("tuning", "unfinished", "partial")  # statuses


def total_lines(found: Sequence[Findings]) -> Iterator[str]:
    """Yield lines: contexts by status, untuned keys with reasons, gains, costs, the place of the report."""
    contexts = [context for each in found for context in each.contexts]
    settled = sum(context.status not in UNSETTLED for context in contexts)
    statuses = Counter(context.status for context in contexts)
    listed = "".join(f", {count} {status}" for status, count in sorted(statuses.items()))
    of = f" of {counted(len(found), 'function')}" if len(found) > 1 else ""
    yield f"In all: {counted(len(contexts), 'context')}{of}, {settled} settled{listed}"
    untuned = ((_label(*names), reason) for each in found for *names, reason in each.untuned)
    for labels, reason in labels_by_reason(untuned):
        yield f"Untuned: {labels}: {reason}"
    for each in found if len(found) > 1 else ():  # of one alone its own report says so
        yield f"Gain of {each.name}: {each.report.gain or each.report.step or 'not known'}"
    yield f"Tuning took {sum(each.report.cost_s + each.report.earlier_s for each in found):.1f} s in all"
    for directory in sorted({each.report.log_dir for each in found if each.report.log_dir}):
        yield f"Report: dist-autotune report {directory}"


def _label(kernel: str, key: object) -> str:
    keys = key if isinstance(key, tuple) else (key,)
    return context_label(kernel, ", ".join(map(str, keys)))
