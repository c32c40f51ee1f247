"""Functions whose outputs depend on configs, for tests of how winners are verified by bits."""

from __future__ import annotations

import itertools

import torch
from kernels_for_tests import add, launch, numbers, only, winner

BASE, SLOW, FAST = 16, 32, 64  # BLOCKs: FAST changes a bit


def off_by_one_bit(y):
    """Add one unit in the last place to one element."""
    y.view(torch.int32)[3] += 1
    return y


class Function:
    """A function of one kernel: its outputs depend on the config as `change` says."""

    def __init__(self, bench, ms=None, change=None, kernel=add):
        self.bench, self.change = bench, {FAST: off_by_one_bit} if change is None else change
        self.kernel = bench.kernel(ms or {BASE: 3.0, SLOW: 2.0, FAST: 1.0}, kernel)

    def __call__(self):
        y = launch(self.kernel, numbers(), torch.zeros(64))
        return self.change.get(self.bench.launches[-1].block, lambda y: y)(y)


def racy():
    """Return a change that depends on how often it was made."""
    count = itertools.count(1)

    def change(y):
        y[0] = next(count)
        return y

    return change


def only_reason(context, block):
    (reason,) = [reason for text, reason in context.banned.items() if f"BLOCK: {block}" in text]
    return reason


def tuned_config(bench, **options):
    """Return status and winner of a new process, as it were, and whether it leaves the outputs the same."""
    tuned = bench.tune(Function(bench), **options)
    tuned()
    context = only(tuned.report)
    return context.status, winner(context), context.same_bits
