"""Words in memory by which ranks, copy engines and kernels tell each other how far they are.

A signal is an int32 that its one writer sets to a rising epoch and its readers compare with `>=`; it is
never reset. Epochs wrap around: `a >= b` means `a - b >= 0` in int32, which is what the stream operation
CU_STREAM_WAIT_VALUE_GEQ computes too, so a reader must not fall 2**31 epochs behind.

No wait is unbounded. One that sees `budget` polls without success writes a record to the error word it
was given, which the host turns into text with `read_failure`, and then sets the signal far ahead, so
that nobody, now or later, spends another budget on a peer that has been given up.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

SYSTEM = tl.constexpr("sys")  # the scope of words that other devices or the host write
GIVEN_UP = tl.constexpr(1 << 30)  # added to the epoch of a signal that nobody shall wait for any more

# Polls a second while spinning: about 1 us for a system-scope load on a GPU, 150 us in the interpreter.
POLLS_PER_SECOND = {"cuda": 1_000_000, "cpu": 7_000}


@dataclass(frozen=True)
class Failure:
    """What a kernel wrote to an error word."""

    kind: int  # the caller's own code, 1 to 7
    epoch: int  # modulo 2**28
    seen: int  # the value found instead


def polls(timeout_s: float, device_type: str) -> int:
    """Return the budget that lasts about `timeout_s` on a device, such that its double fits an int32."""
    return max(1, min(2**30 - 1, int(timeout_s * POLLS_PER_SECOND[device_type])))


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
def poll_until(signal_ptr, epoch, budget, FENCE: tl.constexpr, SCOPE: tl.constexpr = SYSTEM):
    """Spin until the signal has reached `epoch` or the budget is spent; return its value.

    What its writer wrote before it is visible afterwards, to TMA loads only with FENCE (NVIDIA: data that
    arrived through the generic proxy, read through the async proxy). A kernel must wait outside of its
    pipelined K loop: Triton's pipeliner moves the loads of that loop above a wait inside it.
    """
    # Adding 0 compiles to one thread's ld.acquire and a broadcast; a compare-and-swap would be a real RMW.
    value = tl.atomic_add(signal_ptr, 0, sem="acquire", scope=SCOPE)
    spent = 0
    while (value - epoch < 0) & (spent < budget):
        value = tl.atomic_add(signal_ptr, 0, sem="acquire", scope=SCOPE)
        spent += 1
    if FENCE:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    return value


@triton.jit
def give_up(signal_ptr, epoch, SCOPE: tl.constexpr = SYSTEM):
    """Let everybody pass who waits for the signal, now or later; to be called after recording the failure."""
    tl.atomic_xchg(signal_ptr, epoch + GIVEN_UP, sem="release", scope=SCOPE)


@triton.jit
def wait_until(signal_ptr, epoch, error_ptr, kind, budget, FENCE: tl.constexpr, SCOPE: tl.constexpr = SYSTEM):
    """Do `poll_until`; where it fails, record that as `kind` and give up. Return whether it succeeded."""
    value = poll_until(signal_ptr, epoch, budget, FENCE, SCOPE)
    reached = value - epoch >= 0
    if not reached:
        record_failure(error_ptr, kind, epoch, value)
        give_up(signal_ptr, epoch, SCOPE)
    return reached


@triton.jit
def notify(signal_ptr, epoch, SCOPE: tl.constexpr = SYSTEM):
    """Set the signal after everything that this program has written."""
    tl.debug_barrier()
    tl.atomic_xchg(signal_ptr, epoch, sem="release", scope=SCOPE)


@triton.jit(do_not_specialize=["rank", "epoch", "budget"])
def barrier_all(
    signals_ptr,  # int64 [WORLD]: the address of each rank's int32 [WORLD]
    errors_ptr,  # int64 [WORLD]
    rank,
    epoch,
    budget,
    WORLD: tl.constexpr,
    FENCE: tl.constexpr = False,
):
    """Return when every rank's launch of the same epoch has begun, or its budget is spent; one program.

    Place it before work that may fill the device, never behind: a grid that holds every SM and waits for
    a peer would keep this kernel from starting.
    """
    for peer in range(WORLD):
        theirs = tl.load(signals_ptr + peer).to(tl.pointer_type(tl.int32))
        notify(theirs + rank, epoch)
    mine = tl.load(signals_ptr + rank).to(tl.pointer_type(tl.int32))
    for peer in range(WORLD):
        wait_until(mine + peer, epoch, errors_ptr + peer, 1, budget, FENCE)
