"""Base class of operations over symmetric memory: allocation, failures of peers, closing.

Candidates may differ between ranks in one call: ranks tell each other about chunks, never about tiles. Every
rank must make the same calls in the same order. A call on another stream than the last one waits for it, on
the device; the host does not see replays of graphs.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ClassVar

import torch
import torch.distributed as dist

from ..configs import INTERPRETED
from ..signals import TICK_S, Failure, as_patience, read_failure
from ..symm import SymmetricMemoryError, open_symmetric_memory
from ..symm.base import Shared
from ..tensors import FP8, check_timeout
from .calls import UnderWay, leave, wait_for_device, watch
from .streams import NOT_COME, Meeting, StreamOrder

INTERPRETED_PROGRAMS = 2  # the interpreter runs them one after the other


class PeerTimeout(TimeoutError):
    """A peer did not do its part of a call in time; the message names rank, chunk and call."""


class Operation(Shared):
    """An operation of all ranks of a group that owns symmetric memory; a context manager.

    A kernel waits `timeout_s` for a peer: seconds on NVIDIA GPUs, elsewhere polls that last about as long.

    Opening and closing are collective. A subclass allocates in `_allocate`, and describes the error records
    that its kernels write, one for each rank. Attributes set there and later are deleted when it closes: a
    closed operation that the caller still holds keeps no memory.
    """

    _wrong_calls: ClassVar[tuple[int, ...]]  # kinds of failure that callers have caused
    _further_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # beside halves
    is_captured = False  # some call was: a graph may replay in its memory
    _is_closed = True  # until it is open
    _mend_calls: ClassVar[str] = "Every rank must pass as many rows. "  # advice for those kinds

    def __init__(
        self, dtype: torch.dtype, group: dist.ProcessGroup | None, backend: str, timeout_s: float
    ) -> None:
        check_timeout(timeout_s)
        # The interpreter copies CUDA tensors to the CPU, where no peer's signal would be seen.
        device = "cpu" if INTERPRETED else None
        self._memory = open_symmetric_memory(group, backend, device, timeout_s=timeout_s)
        self.rank, self.world_size = self._memory.rank, self._memory.world_size
        self.device = self._memory.device
        self._on_gpu = self.device.type == "cuda"  # each call asks, and torch makes a string for each
        self.backend = f"{self._memory.name}: {self._memory.reason}"
        self._broken_by = ""
        self.explain: Callable[[], str] = str  # the owner's reason why peers did not make a call, or ""
        self._calls = 0
        self._patience_ticks = as_patience(timeout_s)
        self._kept: frozenset[str] = frozenset({*vars(self), "_kept"})
        try:
            self._check_dtype(dtype)
            with torch.inference_mode(False):  # other threads and later calls may not write its tensors
                # Pinned, not on the device: the host looks for failures without waiting for the GPU.
                pinned, world = self._on_gpu, self.world_size
                flags = torch.zeros(world, dtype=torch.int64, device="cpu", pin_memory=pinned)
                self._errors = self._memory.hold(flags)
                self._error_records = self._errors.numpy()
                self._no_errors = self._error_records.tobytes()
                self._allocate()
        except BaseException:
            self._memory.abandon()
            raise
        self._read_device(dtype)
        self._streams = StreamOrder()
        self._meeting: Meeting | None = None
        self._is_closed = False
        watch(self)

    @abc.abstractmethod
    def _allocate(self) -> None:
        """Allocate the memory of the calls; collective."""

    @abc.abstractmethod
    def _describe(self, peer: int, failure: Failure) -> str:
        """Return a failure record about a peer in words; "" where `_describe_all` has them."""

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

    def _failure(self) -> Exception | None:
        """Return the exception for the error records, None where there are none."""
        flags = enumerate(self._error_records)
        failures = {peer: found for peer, flag in flags if (found := read_failure(int(flag)))}
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
        if any(failure.kind not in self._wrong_calls for failure in failures.values()):
            if why := self._other_rows():
                return ValueError(f"{text}In an eager call {why}. {self._mend_calls}{next_step}")
            waits = " If it waits for a send of this rank, call meet_first()." * (self._meeting is None)
            return PeerTimeout(f"{text}Find out what that rank is doing.{waits} {next_step}")
        return ValueError(f"{text}{self._mend_calls}{next_step}")

    def _read_device(self, dtype: torch.dtype) -> None:
        """Set the facts of the device that all calls use."""
        capability, self._sms = (0, 0), 0
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self._sms = properties.multi_processor_count
            capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
        self._has_tma = INTERPRETED or capability >= (9, 0)
        self._needs_fence = capability >= (9, 0)  # between signals and TMA loads
        self._upcasts = INTERPRETED and dtype in (torch.bfloat16, FP8)

    def _check_dtype(self, dtype: torch.dtype) -> None:
        supported = [torch.float16, torch.bfloat16, *self._further_dtypes]
        if self.device.type == "cpu":
            supported.append(torch.float32)
        if dtype not in supported:
            raise ValueError(f"dtype {dtype} is not supported on {self.device}; use one of {supported}")

    # ---- what the caller may use

    def check(self) -> None:
        """Wait for the device, see `calls.wait_for_device`, and raise the failures of the calls so far."""
        if not (self._is_closed or self._broken_by):
            self._check_peers()
        if self._on_gpu and not self._is_closed:
            wait_for_device(self)
        self._check_usable()

    def under_way(self) -> UnderWay:
        """Return what tells how far the calls so far are.

        Behind a failed one there may be W waits here, and as many of a peer. A side stream may wait for ever
        also behind a call that was not carried out: no kernel of it gives the peer up.
        """
        if self._is_closed:
            return UnderWay(lambda: True, lambda: False, 0.0)
        records, none, is_broken = self._error_records, self._no_errors, self._broken_by != ""
        is_done = self._memory.mark() if self._on_gpu else lambda: True
        longest_wait_s = 2 * self.world_size * self._patience_ticks * TICK_S
        return UnderWay(is_done, lambda: is_broken or records.tobytes() != none, longest_wait_s)

    def raise_known_failure(self) -> None:
        """Raise the failures that the host can see now; none if the operation is closed."""
        if not self._is_closed:
            self._check_usable()

    def _check_peers(self) -> None:
        """Raise if peers made other calls, as far as hosts can tell: the device may wait for such a peer."""
        return

    def meet_first(self) -> None:
        """Have the kernels of each eager call from now on begin when all peers have come to it; collective.

        For ranks that also send to each other outside of this group, as pipelines do: a kernel that waits
        for a peer may hold all SMs, and that peer may wait for a send that finds none. It costs a launch, a
        message and the overlap before a call's first wait. See [Note: beside a pipeline].
        """
        self._check_usable()
        if self.world_size > 1 and self._meeting is None:
            with torch.inference_mode(False):
                self._meeting = Meeting(self._memory, self._errors)

    def close(self) -> None:
        """Meet the peers, give the memory back and raise failures of calls; a second call does nothing."""
        if self._is_closed:
            return
        try:
            self.check()
            self._memory.close()
        except BaseException:
            self.abandon()
            raise
        self._end()

    def abandon(self) -> None:
        """Close without meeting the peers: the way out of a rank that has failed."""
        if not self._is_closed:
            leave(self)
            self._memory.abandon()  # never freed, as kernels that still run may write it
            self._end()

    def __del__(self) -> None:
        """Abandon what was dropped without being closed: kernels may still run."""
        if not self._is_closed and self._on_gpu and not sys.is_finalizing():
            self.abandon()

    def refuse(self, reason: str) -> None:
        """Take no more calls: peers have made one that this rank could not make."""
        self._broken_by = reason

    # ---- what the calls use

    def _end(self) -> None:
        self._is_closed = True
        for name in vars(self).keys() - self._kept:
            delattr(self, name)

    def _check_usable(self) -> None:
        name = type(self).__name__
        if self._is_closed:
            raise RuntimeError(f"this {name} is closed; open another on all ranks")
        if self._error_records.tobytes() != self._no_errors:  # in every call: `any()` takes microseconds
            error = self._failure()
            if error is not None:
                raise error
        if self._broken_by:
            raise RuntimeError(f"{name}, rank {self.rank}: {self._broken_by}; close it and open another")

    def _follow(self) -> bool:
        """Order the call behind the last one; return whether it is captured. Raises on another device."""
        is_capturing = self._is_capturing()
        if is_capturing:
            self.is_captured = True
        if self._on_gpu:
            here = torch._C._cuda_getDevice()  # what torch.cuda.current_device() asks behind three functions
            if here != self.device.index:
                raise ValueError(
                    f"the current device is cuda:{here}, this operation is on {self.device}; set_device"
                )
            self._streams.follow(self.device, is_capturing=is_capturing)
        return is_capturing

    def _meet(self) -> None:
        if self._meeting is not None and not self._is_capturing():
            self._meeting.attend(self._patience_ticks)

    def _carrying_out(self) -> AbstractContextManager[None]:
        """Return a context that counts a call and, if its block raises, forbids later ones."""
        return _CarryingOut(self)

    def _fail(self, error: BaseException) -> None:
        """Take no more calls after an eager one that has raised; a captured one has done nothing."""
        if not self._is_capturing():
            self._broken_by = f"call {self._calls} was not carried out: {error!r}"
        elif isinstance(error, SymmetricMemoryError):
            raise RuntimeError(f"{type(self).__name__} cannot be captured here: {error}") from error

    def _is_capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _in_steps(self, *, is_capturing: bool) -> bool:
        """Return whether a call that scatters launches its kernel chunk by chunk, as captured ones do."""
        return is_capturing


class _CarryingOut(AbstractContextManager[None]):
    """See `Operation._carrying_out`. No generator: that costs half a microsecond more in each call."""

    __slots__ = ("_operation",)

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        self._operation._calls += 1
        try:
            self._operation._meet()
        except BaseException as error:
            self._operation._fail(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._operation._fail(error)
        elif not self._operation._on_gpu:
            self._operation._check_usable()
