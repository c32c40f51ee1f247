"""Programs that end in the middle of tuning, each in a process of its own, and what the next one does."""

import os
import signal

from kernels_for_tests import Bench, block_of, launch, numbers, records

from dist_autotune.storage.crash_guard import FOLDER
from ranks import assert_all_ok, run_ranks

MS = {16: 3.0, 32: 2.0, 64: 1.0}
EXHAUSTIVE = {"n_warmup": 1, "n_repeat": 2}  # 3 configs: 9 runs and the final one


def die(number):
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
    os.kill(os.getpid(), number)


def scripted(bench, ms, events):
    """Return what launches of each BLOCK take; `events`: (BLOCK, n) -> called in the n-th launch of it."""
    counts = dict.fromkeys(ms, 0)

    def time_of(block):
        def launched(_):
            counts[block] += 1
            events.get((block, counts[block]), lambda: None)()
            return ms[block]

        return launched

    return {block: time_of(block) for block in ms}


def program(rank, events=None, options=EXHAUSTIVE):
    """Tune one kernel; return what was launched and found."""
    bench, x = Bench(), numbers()
    kernel = bench.kernel(scripted(bench, MS, events or {}))
    step = bench.tune(lambda: launch(kernel, x), **options)
    step()
    return summary(bench, step)


def summary(bench, step, rank=0):
    return {
        "blocks": bench.blocks(),
        "winners": {f"{c.kernel}{c.key[0]}": block_of(c.config) for c in step.report.contexts},
        "timings": {c.kernel: sorted(c.timings.values()) for c in step.report.contexts},
        "banned": {
            f"{context.kernel} {text.split(',')[0]}": reason
            for context in step.report.contexts
            for text, reason in context.banned.items()
        },
        "notes": [event.text for event in records(rank=rank) if event.event == "note"],
    }


def alone(function, *arguments):
    """Return how `function` ended in a process of its own."""
    (result,) = run_ranks(function, 1, *arguments, init="none")
    return result


def value_of(function, *arguments):
    return assert_all_ok([alone(function, *arguments)])[0]


def guards(cache):
    return sorted((cache / FOLDER).glob("*.json"))
