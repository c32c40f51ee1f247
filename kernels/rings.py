"""Slots and mbarrier phases of a ring of buffers, by step.

Step s of a ring of `size` slots uses slot s % size, for the (s // size)-th time. `full` completes a phase
when the slot has been filled, `empty` when it has been read:

    use of the slot               0       1       2       3
    the reader waits for full     0       1       0       1      ring_phase
    the writer waits for empty    1       0       1       0      ring_phase ^ 1

A wait for a parity returns unless the phase with that parity is under way. A new mbarrier is in phase 0, so
the first writer of a slot does not wait.
"""

from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants to see it in every module with a kernel


@triton.jit
def ring_slot(step, size):
    """Return the slot that the step uses."""
    return step % size


@triton.jit
def ring_phase(step, size):
    """Return the parity with which the step's reader waits for `full`; its writer waits with the other."""
    return step // size & 1
