"""The side of `AllGatherGemm` that fetches: it brings the peers' chunks in and says so."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from ..signals import GIVEN_UP, as_epoch
from ..symm import SymmetricMemory, SymmetricTensor
from .words import ARRIVED, FETCHED, READY, ROWS


@dataclass(frozen=True)
class _Peer:
    """One peer's chunk and the words between it and this rank; views made once, not in every call."""

    chunk_here: torch.Tensor
    chunk_there: torch.Tensor
    arrived: torch.Tensor  # here, for the kernel
    ready: torch.Tensor  # here, written by the peer
    our_ready: torch.Tensor  # there
    our_fetched: torch.Tensor  # there
    our_rows: tuple[torch.Tensor, torch.Tensor]  # there, for even and for odd epochs


class ChunkProducer:
    """Copies chunks rank + 1, rank + 2, ... on a side stream of the memory it is given.

    On GPUs the side stream is a CUDA stream and needs no SM; on the CPU it is a thread. The order of
    operations, on which the proof in `operation` rests, is this one source for both.
    """

    def __init__(self, memory: SymmetricMemory, gather: SymmetricTensor, words: SymmetricTensor) -> None:
        self._memory = memory
        self._stream = memory.side_stream()
        self._announced_rows = [0, 0]
        self._rows = 0
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._peers = []
        for step in range(1, memory.world_size):
            peer = (memory.rank + step) % memory.world_size
            theirs = words.peers[peer][:, memory.rank]
            self._peers.append(
                _Peer(
                    chunk_here=gather.local[peer],
                    chunk_there=gather.peers[peer][peer],
                    arrived=words.local[ARRIVED.value, peer],
                    ready=words.local[READY.value, peer],
                    our_ready=theirs[READY.value],
                    our_fetched=theirs[FETCHED.value],
                    our_rows=(theirs[ROWS.value], theirs[ROWS.value + 1]),
                )
            )

    def start(self, rows: int, epoch: int) -> None:
        """Enqueue the exchange of one call, behind what the caller has enqueued so far."""
        memory, stream = self._memory, self._stream
        if rows != self._rows:
            self._rows = rows
            self._copies = [(peer.chunk_here[:rows], peer.chunk_there[:rows]) for peer in self._peers]
        stream.fork()
        parity = epoch & 1
        if self._announced_rows[parity] != rows:
            self._announced_rows[parity] = rows
            for peer in self._peers:
                memory.write_signal(peer.our_rows[parity], rows, stream)
        for peer in self._peers:
            memory.write_signal(peer.our_ready, epoch, stream)
        for peer, (here, there) in zip(self._peers, self._copies, strict=True):
            memory.wait_signal(peer.ready, epoch, stream)
            memory.copy(here, there, stream)
            memory.write_signal(peer.arrived, epoch, stream)
            memory.write_signal(peer.our_fetched, epoch, stream)

    def join(self) -> None:
        """Order what the caller does next behind the exchange; on the CPU, raise what went wrong in it."""
        self._stream.join()

    def finish_alone(self, epoch: int) -> None:
        """Let the exchange run to its end though no kernel watches over it and peers may not be ready.

        Those that are ready still get their signals, and need not lose their patience for them.
        """
        rescue = self._memory.side_stream()
        for peer in self._peers:
            self._memory.write_signal(peer.ready, as_epoch(epoch + GIVEN_UP.value), rescue)
        with contextlib.suppress(Exception):  # this is the way out of an error that says more
            self.join()
