"""Base class of operations over symmetric memory: allocation, failures of peers, closing.

Ranks may run different configs in one call, as their flags count chunks, never tiles. All ranks must make the
same calls in the same order: see [Note: calls are numbered]. A call on another stream than the last call
waits for that one on the device. The host does not see replays of CUDA graphs.
"""

from __future__ import annotations

import abc
import math
import sys
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist

from ..agreement.bulletin import Bulletin
from ..agreement.errors import PeerTimeout
from ..agreement.failures import FailureKinds, FailureRecords
from ..configs import INTERPRETED
from ..signals import TICK_S, Failure, as_patience
from ..symm import open_symmetric_memory
from ..symm.base import Shared
from ..symm.ranks import opening_together
from ..tensors import check_timeout
from .calls import UnderWay, leave, wait_for_device, watch
from .flags import NOT_COME
from .streams import Meeting, StreamOrder, launches_block

INTERPRETED_PROGRAMS = 2  # of a kernel; the interpreter runs them one after the other


class DeviceFacts(NamedTuple):
    """Facts of an operation's device, read once."""

    is_gpu: bool = False
    sms: int = 0
    has_tma: bool = INTERPRETED
    needs_fence: bool = False  # between signals and TMA loads
    launches_block: bool = False  # a launch returns only when its kernel has ended

    @classmethod
    def of(cls, device: torch.device) -> DeviceFacts:
        if device.type != "cuda":
            return cls()
        found = torch.cuda.get_device_properties(device)
        is_new = found.major >= 9 and not torch.version.hip
        return cls(True, found.multi_processor_count, INTERPRETED or is_new, is_new, launches_block())

    @property
    def programs(self) -> int:
        """Return how many programs a persistent kernel has: one for each SM."""
        return self.sms or INTERPRETED_PROGRAMS


class Operation(Shared):
    """A collective operation of a group's ranks, with its symmetric memory; a context manager.

    Kernels wait up to `timeout_s` for a peer: by the clock on NVIDIA GPUs, elsewhere for a number of polls
    that takes about as long.

    Opening and closing are collective: see `opening_together`. A subclass allocates in `_allocate`. What it
    sets there and later is deleted on closing, so a closed operation holds no memory.
    """

    _failure_kinds: ClassVar[FailureKinds]
    _further_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # beside float16 and bfloat16
    _travels: ClassVar[str] = "copy engines move rows beside the kernels"  # for reports, on GPUs
    _is_closed = True  # until opening has succeeded

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__init__ = opening_together(cls, cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self, dtype: torch.dtype, group: dist.ProcessGroup | None, backend: str, timeout_s: float
    ) -> None:
        check_timeout(timeout_s)
        # The interpreter copies CUDA tensors to the CPU, where no peer's signal would be seen.
        device = "cpu" if INTERPRETED else "cuda"
        self._memory = open_symmetric_memory(group, backend, device, timeout_s=timeout_s)
        self.rank, self.world_size = self._memory.rank, self._memory.world_size
        self.device = self._memory.device
        self._facts = DeviceFacts.of(self.device)
        self.backend = f"{self._memory.name}: {self._memory.reason}"
        travels = self._travels if self._facts.is_gpu else "the host moves rows"
        # For tuning reports, so that a slow path does not go unnoticed.
        self.transport = f"{type(self).__name__}: memory by {self.backend}; {travels}; no multicast is used"
        self._broken_by = ""
        self.explain: Callable[[], str] = str  # the owner's reason why a peer did not come, or ""
        self._calls = 0  # the number of the last eager call
        self._patience_ticks = as_patience(timeout_s)
        self._kept: frozenset[str] = frozenset({*vars(self), "_kept"})
        try:
            self._check_dtype(dtype)
            with torch.inference_mode(False):  # else calls outside of it could not write these tensors
                self._failures = FailureRecords(self._memory)
                self._bulletin = Bulletin.open(self._memory)
                self._allocate()
        except BaseException:
            self._memory.abandon()
            raise
        self._streams = StreamOrder()
        self._meeting: Meeting | None = None
        self._is_closed = False
        watch(self)

    @abc.abstractmethod
    def _allocate(self) -> None:
        """Allocate the memory of the calls; collective."""

    def _describe(self, peer: int, failure: Failure) -> str:
        """Return a sentence for the failure record of a peer; "" if `_describe_all` covers it."""
        text = self._failure_kinds.texts.get(failure.kind, self._failure_kinds.late)
        return text.format(peer=peer, seen=failure.seen, rank=self.rank, peers=self._peers())

    def _describe_all(self, failures: dict[int, Failure]) -> list[str]:
        """Return the sentences that cover several peers at once."""
        return []

    def _other_rows(self) -> str:
        """Return how the ranks' rows differ in a recent call, as far as hosts know; "" if they do not."""
        return ""

    def _peers(self) -> str:
        """Return the names of all peers, such as "ranks 0, 2"."""
        others = [str(rank) for rank in range(self.world_size) if rank != self.rank]
        return ("rank " if len(others) == 1 else "ranks ") + ", ".join(others)

    def _take_refusals(self) -> dict[int, Failure]:
        """Return the recorded failures by peer; note and clear those by which peers have refused a call."""
        failures = self._failures.by_rank()
        for peer, failure in [*failures.items()]:
            if (failure.kind, failure.seen) == self._failure_kinds.refusal[:2]:
                del failures[peer]
                self._failures.forget(peer)
                if not self._bulletin.is_shared:  # else the peer has written its reason there
                    self._bulletin.note_refused(self._calls, peer, "or of one before it")
        return failures

    def _error(self) -> Exception | None:
        """Return the exception that the recorded failures call for; None if there are none."""
        failures = self._take_refusals()
        if not failures:
            return None
        texts = [
            f"rank {peer} did not come to the call in time"
            if failure.kind == NOT_COME.value
            else self._describe(peer, failure)
            for peer, failure in failures.items()
        ]
        text = "; ".join([*filter(None, texts), *self._describe_all(failures)])
        text = f"{type(self).__name__}, rank {self.rank}: {text}. "
        next_step = "Close it on all ranks and open another"
        if why := self.explain():
            return ValueError(f"{text}{why}. {next_step}")
        kinds = self._failure_kinds
        if any(failure.kind not in kinds.of_callers for failure in failures.values()):
            if why := self._other_rows():
                return ValueError(f"{text}In an eager call {why}. {kinds.advice}{next_step}")
            waits = " If it waits for a send of this rank, call meet_first()." * (self._meeting is None)
            return PeerTimeout(f"{text}Find out what that rank is doing.{waits} {next_step}")
        return ValueError(f"{text}{kinds.advice}{next_step}")

    def _check_dtype(self, dtype: torch.dtype) -> None:
        supported = [torch.float16, torch.bfloat16, *self._further_dtypes]
        if self.device.type == "cpu":
            supported.append(torch.float32)
        if dtype not in supported:
            raise ValueError(f"dtype {dtype} is not supported on {self.device}; use one of {supported}")

    # ---- what the caller may use

    def check(self) -> None:
        """Wait for the device as `calls.wait_for_device` does; raise failures of the calls so far."""
        self._check_all(self._calls)
        self._raise_refused()

    def _check_all(self, calls: float) -> None:
        """Wait for the device; raise failures but refusals, of peers those in calls up to that number."""
        if not (self._is_closed or self._broken_by):
            self._raise_of_peers(calls)
            self._check_peers()
        if self._facts.is_gpu and not self._is_closed:
            wait_for_device(self)
        self._check_usable(calls)

    def under_way(self) -> UnderWay:
        """Return a probe of the calls so far: whether they are done, or have failed.

        After a failure this rank's kernels may go through W waits, and so may a peer's. A side stream may
        never end: not even a call that was not carried out has a kernel that gives the peer up.
        """
        if self._is_closed:
            return UnderWay(lambda: True, lambda: False, 0.0)
        failures, is_broken = self._failures, self._broken_by != ""
        is_done = self._memory.mark() if self._facts.is_gpu else lambda: True
        longest_wait_s = 2 * self.world_size * self._patience_s()
        return UnderWay(is_done, lambda: is_broken or not failures.are_none(), longest_wait_s)

    def _patience_s(self) -> float:
        return self._patience_ticks * TICK_S

    def raise_known_failure(self) -> None:
        """Raise failures that the host can see without waiting; do nothing if the operation is closed."""
        if not self._is_closed:
            self._check_call()

    @abc.abstractmethod
    def _check_peers(self) -> None:
        """Raise if hosts know that peers made other calls: the device may be waiting for one of them."""

    def meet_first(self) -> None:
        """Start the kernels of each later eager call only once all peers have come to it; collective.

        Needed if ranks also send to each other outside this group, as pipelines do: a kernel that waits for
        a peer may hold all SMs while that peer waits for a send that needs one. It costs a launch, a message
        and the overlap before a call's first wait. See [Note: beside a pipeline].
        """
        self._check_usable()
        if self.world_size > 1 and self._meeting is None:
            with torch.inference_mode(False):
                self._meeting = Meeting(self._memory, self._failures.words)

    def close(self) -> None:
        """Meet the peers, free the memory and raise failures of calls; a second call does nothing."""
        if self._is_closed:
            return
        try:
            self._check_all(math.inf)
            self._memory.close()
        except BaseException:
            self.abandon()
            raise
        bulletin = self._bulletin
        self._end()
        self._raise_refused(bulletin)

    def abandon(self) -> None:
        """Close without meeting the peers: the way out of a rank that has failed."""
        if not self._is_closed:
            leave(self)
            self._memory.abandon()  # never freed, as kernels that still run may write it
            self._end()

    def __del__(self) -> None:
        """Abandon an operation that was not closed: its kernels may still run."""
        if not self._is_closed and self._facts.is_gpu and not sys.is_finalizing():
            self.abandon()

    def refuse(self, reason: str) -> None:
        """Refuse all further calls, for this reason: peers made a call that this rank could not make."""
        self._broken_by = reason

    # ---- what the calls use

    def _end(self) -> None:
        self._is_closed = True
        for name in vars(self).keys() - self._kept:
            delattr(self, name)

    def _check_usable(self, calls: float | None = None) -> None:
        """Raise failures that the host can see; of peers, those in calls up to that number (None: the last).

        A call in which a peer has failed is made nevertheless: that peer may wait for this rank's part.
        """
        if self._is_closed:
            raise RuntimeError(f"this {type(self).__name__} is closed; open another on all ranks")
        if self._broken_by:
            raise RuntimeError(self._text_of_broken())
        if self._bulletin.bell[0]:
            self._raise_of_peers(self._calls if calls is None else calls)
        if not self._failures.are_none():
            error = self._error()
            if error is not None:
                raise error

    def _check_call(self) -> None:
        """Raise failures and refusals of the calls so far that the host can see."""
        self._check_usable(self._calls)
        if self._bulletin.bell[0]:
            self._raise_refused()

    def _text_of_broken(self) -> str:
        name = type(self).__name__
        return f"{name}, rank {self.rank}: {self._broken_by}; close it on all ranks and open another"

    def _raise_of_peers(self, call: float) -> None:
        """Raise the cause if a peer has broken the operation in a call up to that number."""
        if self._bulletin.bell[0]:
            self._bulletin.hear()
        if why := self._bulletin.broken_by(call):
            self._broken_by = why
            raise RuntimeError(self._text_of_broken())

    def _raise_refused(self, bulletin: Bulletin | None = None) -> None:
        """Raise, once, the calls that peers have refused; bulletin: kept from before closing."""
        bulletin = bulletin or self._bulletin
        if bulletin.bell[0]:
            bulletin.hear()
        if why := bulletin.take_refused(self._calls):
            name = type(self).__name__
            raise ValueError(
                f"{name}, rank {self.rank}: {why}. It failed on all ranks; the next one may be made"
            )

    def _follow(self, *, is_capturing: bool) -> None:
        """Order the call after the last one; raise if another device is current."""
        if self._facts.is_gpu:
            here = torch._C._cuda_getDevice()  # what torch.cuda.current_device() asks after three functions
            if here != self.device.index:
                raise ValueError(
                    f"the current device is cuda:{here}, this operation is on {self.device}; set_device"
                )
            self._streams.follow(self.device, is_capturing=is_capturing)

    def _meet(self) -> None:
        assert self._meeting is not None
        self._meeting.attend(self._patience_ticks)

    def _is_capturing(self) -> bool:
        return self._facts.is_gpu and torch.cuda.is_current_stream_capturing()

    def _in_steps(self, *, is_capturing: bool) -> bool:
        """Return whether a scattering call launches its kernel chunk by chunk: in captures it must.

        Also where launches block: one kernel for all chunks waits for pushes that would never be enqueued.
        """
        return is_capturing or self._facts.launches_block
