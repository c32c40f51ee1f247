"""Base class of operations over symmetric memory: allocation, failures of peers, closing.

Candidates may differ between ranks in one call: ranks tell each other about chunks, never about tiles. Every
rank must make the same calls in the same order: see [Note: calls are numbered]. A call on another stream than
the last one waits for it, on the device; the host does not see replays of graphs.
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
from ..tensors import check_timeout
from .calls import UnderWay, leave, wait_for_device, watch
from .flags import NOT_COME
from .streams import Meeting, StreamOrder, launches_block

INTERPRETED_PROGRAMS = 2  # the interpreter runs them one after the other


class DeviceFacts(NamedTuple):
    """What calls must know of the device of an operation."""

    is_gpu: bool = False
    sms: int = 0
    has_tma: bool = INTERPRETED
    needs_fence: bool = False  # between signals and TMA loads
    launches_block: bool = False

    @classmethod
    def of(cls, device: torch.device) -> DeviceFacts:
        if device.type != "cuda":
            return cls()
        found = torch.cuda.get_device_properties(device)
        is_new = found.major >= 9 and not torch.version.hip
        return cls(True, found.multi_processor_count, INTERPRETED or is_new, is_new, launches_block())

    @property
    def programs(self) -> int:
        """Return how many programs of a kernel run at a time."""
        return self.sms or INTERPRETED_PROGRAMS


class Operation(Shared):
    """An operation of all ranks of a group that owns symmetric memory; a context manager.

    A kernel waits `timeout_s` for a peer: seconds on NVIDIA GPUs, elsewhere polls that last about as long.

    Opening and closing are collective. A subclass allocates in `_allocate`. Attributes set there and later
    are deleted when it closes: a closed operation that the caller still holds keeps no memory.
    """

    _failure_kinds: ClassVar[FailureKinds]
    _further_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # beside halves
    _travels: ClassVar[str] = "copy engines move rows beside the kernels"  # on GPUs
    _is_closed = True  # until it is open

    def __init__(
        self, dtype: torch.dtype, group: dist.ProcessGroup | None, backend: str, timeout_s: float
    ) -> None:
        check_timeout(timeout_s)
        # The interpreter copies CUDA tensors to the CPU, where no peer's signal would be seen.
        device = "cpu" if INTERPRETED else None
        self._memory = open_symmetric_memory(group, backend, device, timeout_s=timeout_s)
        self.rank, self.world_size = self._memory.rank, self._memory.world_size
        self.device = self._memory.device
        self._facts = DeviceFacts.of(self.device)
        self.backend = f"{self._memory.name}: {self._memory.reason}"
        travels = self._travels if self._facts.is_gpu else "the host moves rows"
        # What a report says of it: users elsewhere found their overlap off for months.
        self.transport = f"{type(self).__name__}: memory by {self.backend}; {travels}; no multicast is used"
        self._broken_by = ""
        self.explain: Callable[[], str] = str  # the owner's reason why peers did not make a call, or ""
        self._calls = 0  # eager ones: the number of the last
        self._patience_ticks = as_patience(timeout_s)
        self._kept: frozenset[str] = frozenset({*vars(self), "_kept"})
        try:
            self._check_dtype(dtype)
            with torch.inference_mode(False):  # other threads and later calls may not write its tensors
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
        """Return a failure record about a peer in words; "" where `_describe_all` has them."""
        text = self._failure_kinds.texts.get(failure.kind, self._failure_kinds.late)
        return text.format(peer=peer, seen=failure.seen, rank=self.rank, peers=self._peers())

    def _describe_all(self, failures: dict[int, Failure]) -> list[str]:
        """Return sentences about several peers at once."""
        return []

    def _other_rows(self) -> str:
        """Return with which rows ranks came to a call, where they differ and hosts can tell, or ""."""
        return ""

    def _peers(self) -> str:
        """Return all ranks but this one, in words."""
        others = [str(rank) for rank in range(self.world_size) if rank != self.rank]
        return ("rank " if len(others) == 1 else "ranks ") + ", ".join(others)

    def _take_refusals(self) -> dict[int, Failure]:
        """Return the failures by peer, without those that stand for refused calls, which are noted."""
        failures = self._failures.by_rank()
        for peer, failure in [*failures.items()]:
            if (failure.kind, failure.seen) == self._failure_kinds.refusal[:2]:
                del failures[peer]
                self._failures.forget(peer)
                if not self._bulletin.is_shared:  # else the peer has told its reason there
                    self._bulletin.note_refused(self._calls, peer, "or of one before it")
        return failures

    def _error(self) -> Exception | None:
        """Return the exception for the failures on record, None where there are none."""
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
        """Wait for the device, see `calls.wait_for_device`, and raise the failures of the calls so far."""
        self._check_all(self._calls)
        self._raise_refused()

    def _check_all(self, calls: float) -> None:
        """Wait for the device and raise failures, save refused calls; of peers, those up to that call."""
        if not (self._is_closed or self._broken_by):
            self._raise_of_peers(calls)
            self._check_peers()
        if self._facts.is_gpu and not self._is_closed:
            wait_for_device(self)
        self._check_usable(calls)

    def under_way(self) -> UnderWay:
        """Return what tells how far the calls so far are.

        Behind a failed one there may be W waits here, and as many of a peer. A side stream may wait for ever
        also behind a call that was not carried out: no kernel of it gives the peer up.
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
        """Raise the failures that the host can see now; none if the operation is closed."""
        if not self._is_closed:
            self._check_call()

    @abc.abstractmethod
    def _check_peers(self) -> None:
        """Raise if peers made other calls, as far as hosts can tell: the device may wait for such a peer."""

    def meet_first(self) -> None:
        """Have the kernels of each eager call from now on begin when all peers have come to it; collective.

        For ranks that also send to each other outside of this group, as pipelines do: a kernel that waits
        for a peer may hold all SMs, and that peer may wait for a send that finds none. It costs a launch, a
        message and the overlap before a call's first wait. See [Note: beside a pipeline].
        """
        self._check_usable()
        if self.world_size > 1 and self._meeting is None:
            with torch.inference_mode(False):
                self._meeting = Meeting(self._memory, self._failures.words)

    def close(self) -> None:
        """Meet the peers, give the memory back and raise failures of calls; a second call does nothing."""
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
        """Abandon what was dropped without being closed: kernels may still run."""
        if not self._is_closed and self._facts.is_gpu and not sys.is_finalizing():
            self.abandon()

    def refuse(self, reason: str) -> None:
        """Take no more calls: peers have made one that this rank could not make."""
        self._broken_by = reason

    # ---- what the calls use

    def _end(self) -> None:
        self._is_closed = True
        for name in vars(self).keys() - self._kept:
            delattr(self, name)

    def _check_usable(self, calls: float | None = None) -> None:
        """Raise what has failed, as far as the host can see; of peers, up to that call, None: the last one.

        A call in which a peer has failed is made all the same: that peer may wait for its part.
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
        """Raise what has failed in the calls so far, here or on a peer, as far as the host can see."""
        self._check_usable(self._calls)
        if self._bulletin.bell[0]:
            self._raise_refused()

    def _text_of_broken(self) -> str:
        name = type(self).__name__
        return f"{name}, rank {self.rank}: {self._broken_by}; close it on all ranks and open another"

    def _raise_of_peers(self, call: float) -> None:
        """Raise why a peer has broken the operation in a call up to that number."""
        if self._bulletin.bell[0]:
            self._bulletin.hear()
        if why := self._bulletin.broken_by(call):
            self._broken_by = why
            raise RuntimeError(self._text_of_broken())

    def _raise_refused(self, bulletin: Bulletin | None = None) -> None:
        """Raise, once, which calls peers have refused; bulletin: of an operation that is closed now."""
        bulletin = bulletin or self._bulletin
        if bulletin.bell[0]:
            bulletin.hear()
        if why := bulletin.take_refused(self._calls):
            name = type(self).__name__
            raise ValueError(
                f"{name}, rank {self.rank}: {why}. It failed on all ranks; the next one may be made"
            )

    def _follow(self, *, is_capturing: bool) -> None:
        """Order the call behind the last one. Raises on another device."""
        if self._facts.is_gpu:
            here = torch._C._cuda_getDevice()  # what torch.cuda.current_device() asks behind three functions
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
        """Return whether a call that scatters launches its kernel chunk by chunk, as captured ones do.

        Also where launches block: a kernel that ends behind its pushes would never let them be enqueued.
        """
        return is_capturing or self._facts.launches_block
