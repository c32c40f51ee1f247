"""Orders a call after the last one on any stream, and on request after the arrival of all peers.

[Note: beside a pipeline] A kernel that waits for a peer may hold every SM. If that peer waits for an NCCL
send of this rank, which finds no SM, neither goes on until patience ends. After a `Meeting` all ranks have
come to the call: it waits for copies, which need no SM, and for kernels of peers, which no send of this rank
delays any more. The kernel that meets has one warp a peer.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from ..launches.loading import load
from ..signals import GIVEN_UP, as_epoch, wait_until
from ..symm import SymmetricMemory, Write
from .flags import NOT_COME


def launches_block() -> bool:
    """Return whether a launch returns when its kernel has ended: CUDA_LAUNCH_BLOCKING=1, or a sanitizer."""
    injected = (os.environ.get(name, "") for name in ("CUDA_INJECTION64_PATH", "LD_PRELOAD"))
    return os.environ.get("CUDA_LAUNCH_BLOCKING") == "1" or any("sanitizer" in each for each in injected)


class StreamOrder:
    """Orders a call after the last one where it comes on another stream: the device waits, no host does.

    Calls on one stream cost a comparison. A captured call is ordered behind the others of its capture, an
    eager one behind the last eager one. The caller orders captures and replays.
    """

    def __init__(self) -> None:
        # Handle and stream of the last call, by whether it was captured. The stream is kept, as for the
        # default stream's handle, 0, ExternalStream would make another one.
        self._last: dict[bool, tuple[int, torch.cuda.Stream]] = {}

    def follow(self, device: torch.device, *, is_capturing: bool) -> None:
        """Order later work of the current stream after the last call."""
        handle, before = torch._C._cuda_getCurrentRawStream(device.index), self._last.get(is_capturing)
        if before is not None and before[0] == handle:
            return
        stream = torch.cuda.current_stream(device)
        self._last[is_capturing] = handle, stream
        if before is None:
            return
        event = torch.cuda.Event()
        with torch.cuda.stream(before[1]):
            if is_capturing and not torch.cuda.is_current_stream_capturing():
                return  # that was another capture, which has ended
            event.record()
        stream.wait_event(event)


@triton.jit(do_not_specialize=["rank", "epoch", "patience_ticks"])
def await_peers(flags_ptr, errors_ptr, rank, epoch, patience_ticks, WORLD: tl.constexpr):
    """Return when a peer has come to the call, or patience has ended; a program a peer."""
    peer = (rank + 1 + tl.program_id(0)) % WORLD
    wait_until(flags_ptr + peer, epoch, errors_ptr + peer, NOT_COME, patience_ticks)


class Meeting:
    """Holds the caller's stream back until all peers have come to the call; opening one is collective.

    errors: int64 [W], the operation's. For eager calls: a graph would repeat its number.
    """

    def __init__(self, memory: SymmetricMemory, errors: torch.Tensor) -> None:
        world, rank = memory.world_size, memory.rank
        flags = memory.allocate((world,), torch.int32)  # the last call that each peer has come to
        self._calls = 0
        self._arguments = (flags.local, errors, rank)
        self._constants = {"WORLD": world, "num_warps": 1}
        self._stream = memory.side_stream()
        self._memory = memory
        self._there = [theirs[rank] for peer, theirs in enumerate(flags.peers) if peer != rank]
        self._grid = (world - 1, 1, 1)
        load(await_peers, self._grid, *self._arguments, 0, 0, **self._constants)

    def leave(self) -> None:
        """Let no peer wait for this rank: it comes to no further call."""
        epoch = as_epoch(self._calls + GIVEN_UP.value)
        self._memory.enqueue([Write(word, epoch) for word in self._there], self._stream)

    def attend(self, patience_ticks: int) -> None:
        """Enqueue that this rank has come, and a wait for its peers."""
        self._calls += 1
        epoch = as_epoch(self._calls)
        self._stream.fork()
        self._memory.enqueue([Write(word, epoch) for word in self._there], self._stream)
        await_peers[self._grid](*self._arguments, epoch, patience_ticks, **self._constants)
        self._stream.join()
