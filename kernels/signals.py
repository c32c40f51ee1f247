"""Words in memory by which ranks, copy engines and kernels tell each other how far they are.

A signal is an integer that readers compare with `>=`: the number of a call, an epoch, which only rises, or a
flag or count that returns to 0. Numbers wrap around: `a >= b` means `a - b >= 0`, as on CUDA's streams.

No wait is unbounded. One that has lasted `patience_ticks`, of 2**20 ns (1.05 ms), without success writes a
record to the error word it was given, which the host turns into text with `read_failure`, and then sets the
signal far ahead, so that nobody, now or later, spends more patience on a peer that has been given up.

On NVIDIA GPUs patience is time: the device's clock is read, but not before the first round of polls has
failed, and then once a round. A wait lasts as long as its patience and at most a tick and two rounds longer.
Elsewhere, and should that clock stand still, patience is a number of polls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl

from .compat import compiled_for, is_one_warp, leave_the_core

SYSTEM = tl.constexpr("sys")  # the scope of words that other devices or the host write
DEVICE = tl.constexpr("gpu")
GIVEN_UP = tl.constexpr(1 << 30)  # added to the epoch of a signal that nobody shall wait for any more

# On NVIDIA GPUs the clock is read once a round. A poll of a word in the own memory takes 0.2 us on an H200.
# No GPU polls so many rounds in a tick: they end the wait if the clock stands still.
POLLS_PER_ROUND = tl.constexpr(2048)
MOST_ROUNDS_PER_TICK = tl.constexpr(10)
# Elsewhere a round is about a tick: a poll takes 1 us on AMD GPUs; interpreted, 0.3 to 0.6 ms and a sleep.
POLLS_PER_TICK_AMD = tl.constexpr(1000)
POLLS_PER_TICK_CPU = tl.constexpr(1)
SLEEP_CPU_S = tl.constexpr(0.7e-3)
TICK_S = 2**20 / 1e9  # so that the clock is shifted, and what is compared are int32
MOST_PATIENCE_TICKS = tl.constexpr(100_000_000)  # 29 hours; the rounds of twice as many fit an int32


@dataclass(frozen=True)
class Failure:
    """A failure that a kernel wrote to an error word."""

    kind: int  # the caller's own code, 1 to 7; 0: the peer did not come to a meeting
    epoch: int  # that was waited for, modulo 2**28; 0: of a flag or count
    seen: int  # the value found instead


def as_patience(timeout_s: float) -> int:
    """Return the patience that kernels take, in ticks: at least 1, at most 29 hours."""
    return math.ceil(max(1, min(MOST_PATIENCE_TICKS.value, timeout_s / TICK_S)))


def as_epoch(count: int) -> int:
    """Return the int32 epoch of a call count that may exceed 31 bits."""
    return (count + 2**31) % 2**32 - 2**31


def read_failure(word: int) -> Failure | None:
    """Return what an error word (int64) says; None for 0."""
    if word == 0:
        return None
    seen = (word + 2**31) % 2**32 - 2**31
    return Failure(kind=word >> 60, epoch=(word >> 32) % 2**28, seen=seen)


@triton.jit
def record_failure(error_ptr, kind, epoch, seen):
    """Write a failure as one int64, so that nobody reads half of it; the first one stands."""
    if tl.load(error_ptr) == 0:
        low = tl.cast(seen, tl.int64) & 0xFFFFFFFF
        middle = (tl.cast(epoch, tl.int64) & 0xFFFFFFF) << 32
        tl.store(error_ptr, (tl.cast(kind, tl.int64) << 60) | middle | low)


@triton.jit
def poll_until(signal_ptr, epoch, patience_ticks, FENCE: tl.constexpr, SCOPE: tl.constexpr = SYSTEM):
    """Spin until the signal has reached `epoch` or patience has ended; return its value.

    What its writer wrote before it is visible afterwards, to TMA loads only with FENCE (NVIDIA: data that
    arrived through the generic proxy, read through the async proxy). A kernel must wait outside of its
    pipelined K loop: Triton's pipeliner moves the loads of that loop above a wait inside it.
    """
    TARGET: tl.constexpr = compiled_for()
    HAS_CLOCK: tl.constexpr = TARGET == "cuda"
    POLLS: tl.constexpr = polls_per_round(TARGET)
    # Adding 0 compiles to one thread's ld.acquire and a broadcast; a compare-and-swap would be a real RMW.
    value = tl.atomic_add(signal_ptr, 0, sem="acquire", scope=SCOPE)
    rounds_left = rounds_of(patience_ticks, HAS_CLOCK)
    began = 0  # until the clock has been read
    polls = 0  # of the round
    while (value - epoch < 0) & (rounds_left > 0):
        if TARGET == "cpu":
            leave_the_core(SLEEP_CPU_S)
        value = tl.atomic_add(signal_ptr, 0, sem="acquire", scope=SCOPE)
        polls += 1
        if polls == POLLS:
            polls = 0
            rounds_left, began = after_round(rounds_left, began, patience_ticks, HAS_CLOCK)
    if FENCE:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    return value


@triton.constexpr_function
def polls_per_round(target):
    """Return after how many polls a wait asks whether it has lasted long enough."""
    return {"cuda": POLLS_PER_ROUND, "hip": POLLS_PER_TICK_AMD}.get(target, POLLS_PER_TICK_CPU)


@triton.jit
def rounds_of(patience_ticks, HAS_CLOCK: tl.constexpr):
    """Return how many rounds of polls a wait lasts at most."""
    return patience_ticks * MOST_ROUNDS_PER_TICK if HAS_CLOCK else patience_ticks


@triton.jit
def after_round(rounds_left, began, patience_ticks, HAS_CLOCK: tl.constexpr):
    """Return how many rounds of polls are left, none behind the patience, and when the first one ended."""
    rounds_left -= 1
    if HAS_CLOCK:
        now = ticks()
        began = tl.where(began == 0, now, began)
        # Both were rounded down, so only more than the patience is certain to be as long.
        is_late = in_any_thread(tl.where(now - began > patience_ticks, 1, 0))
        rounds_left = tl.where(is_late != 0, 0, rounds_left)
    return rounds_left, began


@triton.jit
def give_up(signal_ptr, epoch):
    """Let everybody pass who waits for the signal, now or later; to be called after recording the failure."""
    tl.atomic_xchg(signal_ptr, epoch + GIVEN_UP, sem="release", scope=SYSTEM)


@triton.jit
def wait_until(signal_ptr, epoch, error_ptr, kind, patience_ticks):
    """Do `poll_until`; where it fails, record that as `kind` and give up. Return whether it succeeded."""
    value = poll_until(signal_ptr, epoch, patience_ticks, False)
    reached = value - epoch >= 0
    if not reached:
        record_failure(error_ptr, kind, epoch, value)
        give_up(signal_ptr, epoch)
    return reached


@triton.jit
def notify(signal_ptr, epoch):
    """Set the signal after everything that this program has written."""
    tl.debug_barrier()
    tl.atomic_xchg(signal_ptr, epoch, sem="release", scope=SYSTEM)


@triton.jit
def count_up(counter_ptr, SEM: tl.constexpr, SCOPE: tl.constexpr = DEVICE, number=1):
    """Add 1, or `number`, after everything that this program has written; return what was counted before."""
    tl.debug_barrier()  # one thread counts, for the stores of all
    return tl.atomic_add(counter_ptr, number, sem=SEM, scope=SCOPE)


# ---- the device's clock


@triton.jit
def ticks():
    """Return the device's clock in units of 2**20 ns, about a millisecond, as an int32 that wraps around."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b64 now;
        mov.u64 now, %globaltimer;
        shr.u64 now, now, 20;
        cvt.u32.u64 $0, now;
        }
        """,
        "=r",
        [],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def in_any_thread(flag):
    """Return 1 in all threads if the flag, an int32, is not 0 in one of them, else 0.

    Threads that read the clock find different numbers. What decides which way a program goes must not differ:
    some would leave a loop in which the others wait for them at a barrier.
    """
    # Of a program that is not of one warp, all warps come here: barrier 0 is theirs.
    VOTE: tl.constexpr = "vote.sync.any.pred any, mine, -1;"
    BARRIER: tl.constexpr = "barrier.cta.red.or.pred any, 0, mine;"
    ASK: tl.constexpr = VOTE if is_one_warp() else BARRIER
    return tl.inline_asm_elementwise(
        "{ .reg .pred mine, any; setp.ne.s32 mine, $1, 0; " + ASK + " selp.s32 $0, 1, 0, any; }",
        "=r,r",
        [flag],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
