"""The ranks that share memory, and how they exchange small values before any memory is shared.

[Note: who fails leaves] A rank whose calls have failed abandons its memory and meets nobody. Its peers may
not know of the failure and close theirs: their last exchange then meets a later one of that rank, which opens
other memory, for instance. So the exchange of a close names its memory. Who has abandoned that memory makes
its own exchange once more; who closes it and finds another exchange raises, and goes on to the next.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from dist_autotune import PeerFailed

MESSAGE_BYTES = 2048  # that all ranks send at first: a collective over tensors of one size
CLOSES = "closing the memory "  # the step of a close, with the memory's name
REFUSES = "raised "  # the step of a rank that opens nothing, with its error
TOLD = 300  # characters of that error: as JSON they take a message at most
TELLING_S = 2.0  # that such a rank waits for its peers to know
POLL_S = 1e-3

_abandoned: set[str] = set()  # the closes of memory that this process has left


class SymmetricMemoryError(RuntimeError):
    """Symmetric memory cannot be opened or used; every rank of the failing step raises it."""


class SharingRanks:
    """The ranks of a process group, or the one rank there is without any.

    Everything goes over the caller's own group, which may be a subset of the world and of gloo or NCCL.
    """

    memory_name = ""  # the same on all ranks, once they know that they can share it

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self.rank, self.world_size = 0, 1
        self.members: tuple[int, ...] = (0,)
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise ValueError("a group was given, but torch.distributed is not initialised")
            return
        others = dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to ranks that it leaves out
        if not isinstance(group, dist.ProcessGroup | None) and group != others:
            raise TypeError(
                f"group={group!r}: a process group is needed, or None; of a DeviceMesh mesh.get_group(dim)"
            )
        if dist.get_rank(group) < 0:
            raise ValueError(f"global rank {dist.get_rank()} is not a member of the group that was given")
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    def exchange(self, step: str, value: Any) -> list[Any]:
        """Return the JSON value of each rank, by rank; collective, `timeout_s` long at most.

        Raises on all ranks where one is at another step. Peers that close memory which this rank has
        abandoned are asked again: see [Note: who fails leaves].
        """
        found = self._meet(step, value)
        if any(at != step for at, _ in found):
            steps = "; ".join(f"rank {rank}: {at}" for rank, (at, _) in enumerate(found))
            raise SymmetricMemoryError(
                f"{self}: the ranks are at different steps: {steps}. Open, use and close the same operations "
                "on all, in the same order and with the same arguments"
            )
        return [each for _, each in found]

    def meet_to_close(self) -> None:
        """Return when all ranks close the memory; raise where some have abandoned it; collective."""
        step = CLOSES + self.memory_name
        left = [rank for rank, (at, _) in enumerate(self._meet(step, None)) if at != step]
        if left:
            raise SymmetricMemoryError(
                f"{self} closed its memory, which ranks {left} had left after a failure of theirs. Open "
                "another on all ranks"
            )

    def abandon(self) -> None:
        """Remember that this rank meets nobody in a close of the memory."""
        _abandoned.add(CLOSES + self.memory_name)

    def _meet(self, step: str, value: Any) -> list[tuple[str, Any]]:
        """Return the step and the value of each rank."""
        if self.world_size == 1:
            return [(step, value)]
        while True:
            found = self._gather(json.dumps([step, value]).encode())
            if not any(at in _abandoned for at, _ in found):
                return found

    def _gather(self, text: bytes) -> list[Any]:
        """Return what all ranks' texts say; after a round of lengths where one is too long for the first."""
        is_long = len(text) > MESSAGE_BYTES
        found = self._gather_texts(json.dumps(len(text)).encode() if is_long else text, MESSAGE_BYTES)
        for rank, each in enumerate(found):  # they send no second text
            if isinstance(each, list) and each[0].startswith(REFUSES):
                error = each[0].removeprefix(REFUSES)
                raise PeerFailed(
                    f"{self}: rank {rank} opens nothing with its peers, as it raised {error}. Mend that, and "
                    "open the operation again on all ranks",
                    rank,
                    error,
                )
        longest = max((each for each in found if isinstance(each, int)), default=0)
        return self._gather_texts(text, longest) if longest else found

    def refuse(self, error: Exception) -> None:
        """Raise PeerFailed on the peers in the step that they are at or come to; 2 s long at most.

        Not by NCCL, which may wait for the peers without a bound.
        """
        if self.world_size == 1 or self._channel().type != "cpu":
            return
        step = REFUSES + f"{type(error).__name__}: {error}"[:TOLD]
        work, _ = self._begin_gather(json.dumps([step, None]).encode(), MESSAGE_BYTES)
        deadline = time.monotonic() + min(TELLING_S, self.timeout_s)
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _begin_gather(self, text: bytes, size: int) -> tuple[Any, list[torch.Tensor]]:
        mine = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8).to(self._channel())
        theirs = [torch.empty_like(mine) for _ in range(self.world_size)]
        return dist.all_gather(theirs, mine, group=self.group, async_op=True), theirs

    def _gather_texts(self, text: bytes, size: int) -> list[Any]:
        try:
            work, theirs = self._begin_gather(text, size)
            work.wait(datetime.timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            message = f"{self} got no answer from all its peers within {self.timeout_s:g} s: {error}"
            raise SymmetricMemoryError(message) from error
        return [json.loads(bytes(part.cpu().numpy())) for part in theirs]

    def raise_together(self, doing: str, error: Exception | None) -> None:
        """Raise on every rank if any has an error, so that none goes on alone; collective."""
        text = None if error is None else f"{type(error).__name__}: {error}"
        failed = {rank: text for rank, text in enumerate(self.exchange(doing, text)) if text is not None}
        if failed:
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise SymmetricMemoryError(
                f"{doing} failed on {len(failed)} of {self.world_size} ranks: {reasons}"
            ) from error

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run the block; raise on every rank if it raises on any; collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # libraries have classes of their own
            error = caught
        self.raise_together(doing, error)

    def _channel(self) -> torch.device:
        on_cpu = "cpu:" in dist.get_backend_config(self.group)
        return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def opening_together(kind: type, construct: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of a class that all ranks open: what one rank raises, the others hear of.

    They raise PeerFailed with the rank and its error, if their group has a backend for the CPU.
    """
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def opened(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except (SymmetricMemoryError, PeerFailed):  # on all ranks
            raise
        except Exception as error:
            if type(self) is kind:  # else the constructor of its class tells it
                with contextlib.suppress(Exception):  # arguments that do not fit, a group of others
                    group = signature.bind(self, *args, **kwargs).arguments.get("group")
                    SharingRanks(group).refuse(error)
            raise

    return opened
