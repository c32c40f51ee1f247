"""Symmetric memory of NVSHMEM, through nvshmem4py."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .base import SymmetricTensor
from .cuda import CudaMemory
from .ranks import SharingRanks, SymmetricMemoryError

INSTALL = "install 'nvshmem4py-cu13>=0.3.1,<0.5' (for CUDA 12: nvshmem4py-cu12)"
INITIALIZED = 2  # nvshmem.core.init_status() from here on

_log = logging.getLogger(__name__)


class NvshmemMemory(CudaMemory):
    """The symmetric heap of NVSHMEM, which must span exactly the ranks of the group."""

    name = "nvshmem"

    def __init__(self, ranks: SharingRanks, device: torch.device, reason: str = "asked for") -> None:
        super().__init__(ranks, device, reason)
        _library.enter(ranks, device)

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        nvshmem = _library.module
        with self._ranks.together(f"allocating {list(shape)} {dtype} from NVSHMEM"):
            local = nvshmem.tensor(shape, dtype)  # collective, and not zeroed
            local.zero_()
            self._synchronize()  # a peer may use it as soon as the next exchange is over
            # Its own entry is `local`: asking for it as a peer's would leak it, by one reference too many.
            peers = tuple(
                local if peer == self.rank else nvshmem.get_peer_tensor(local, peer)
                for peer in range(self.world_size)
            )
        return SymmetricTensor(local, peers)

    def _release(self) -> None:
        for tensor in reversed(self._allocations):  # collective: the same order on all ranks
            what = f"freeing {list(tensor.local.shape)} {tensor.local.dtype}"
            free = functools.partial(_library.module.free_tensor, tensor.local)
            _library.wait_for(free, what, self._ranks, self.device)
        _library.leave(self._ranks, self.device)


def why_unusable(ranks: SharingRanks) -> str | None:
    """Return why this process cannot use NVSHMEM for these ranks; None if it can."""
    # Without a device, NVSHMEM does not raise: it ends the process with exit(255).
    if not torch.cuda.is_available():
        return "NVSHMEM needs a CUDA device and torch sees none"
    if importlib.util.find_spec("nvshmem") is None:
        return f"nvshmem4py is not installed; {INSTALL}"
    try:
        import nvshmem.core

        nvshmem.core.get_version()  # loads libnvshmem_host
    except Exception as error:  # missing libraries, cuda packages of other versions
        return f"nvshmem4py cannot be used ({type(error).__name__}: {error}); {INSTALL}"
    return _library.why_closed_to(ranks)


class _Library:
    """The one NVSHMEM of this process, shared by all memory that is open on it.

    The first initialisation fixes its set of processes, even if it is finalised later: the library would
    accept another set and ignore it. So this class refuses it.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self._members: tuple[int, ...] | None = None
        self._users = 0
        self._stuck = ""  # the call of the library that has not returned, if any

    def why_closed_to(self, ranks: SharingRanks) -> str | None:
        if self._stuck:
            return f"NVSHMEM of this process has not returned from {self._stuck}"
        import nvshmem.core

        if self._members is not None and self._members != ranks.members:
            ours = f"this process has initialised NVSHMEM for ranks {list(self._members)}"
            return f"{ours} and cannot use it for ranks {list(ranks.members)}"
        if self._users == 0 and nvshmem.core.init_status() >= INITIALIZED:
            return "other code of this process has initialised NVSHMEM"
        return None

    def enter(self, ranks: SharingRanks, device: torch.device) -> None:
        reasons = ranks.exchange("opening NVSHMEM", why_unusable(ranks))
        if any(reasons):
            text = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
            raise SymmetricMemoryError(f"the nvshmem backend cannot be used. {text}")
        if self._users == 0:
            with ranks.together("initialising NVSHMEM"):
                self._initialize(ranks, device)
        self._users += 1

    def leave(self, ranks: SharingRanks, device: torch.device) -> None:
        self._users -= 1
        if self._users == 0:
            self.wait_for(self.module.finalize, "finalising", ranks, device)

    def wait_for(
        self, call: Callable[[], object], what: str, ranks: SharingRanks, device: torch.device
    ) -> None:
        """Make a call in which the library waits for all ranks, without a bound of its own.

        After `timeout_s` this raises, leaves the call to a thread and asks nothing more of the library.
        """
        caught: list[BaseException] = []

        def run() -> None:
            try:
                torch.cuda.set_device(device)  # a new thread's current device is the first one
                torch.cuda.synchronize(device)  # which makes its context current, of the first one too
                call()
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=run, name=f"NVSHMEM, {what}", daemon=True)
        with _waiting_without_the_interpreters_lock():
            thread.start()
            thread.join(ranks.timeout_s)
        if thread.is_alive():
            self._stuck = what
            raise SymmetricMemoryError(
                f"{ranks}: NVSHMEM has not returned from {what} within {ranks.timeout_s:g} s, "
                "though all ranks had come to close. Its memory is lost to this process, which cannot use "
                "NVSHMEM again: find out where the other ranks are, or use backend='torch'"
            )
        if caught:
            raise caught[0]

    def _initialize(self, ranks: SharingRanks, device: torch.device) -> None:
        import numpy as np
        import nvshmem.core
        from cuda.core import Device

        # No InfiniBand to look for and no multicast: one host, peer to peer.
        os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        cuda_device = Device(device.index)
        cuda_device.set_current()
        unique_id = nvshmem.core.get_unique_id(empty=ranks.rank != 0)
        raw = unique_id._data.view(np.uint8)
        of_first = ranks.exchange("NVSHMEM's id", raw.tobytes().hex())[0]
        raw[:] = np.frombuffer(bytes.fromhex(of_first), dtype=np.uint8)
        nvshmem.core.init(
            device=cuda_device,
            uid=unique_id,
            rank=ranks.rank,
            nranks=ranks.world_size,
            initializer_method="uid",
        )
        self.module, self._members = nvshmem.core, ranks.members


_library = _Library()


@contextlib.contextmanager
def _waiting_without_the_interpreters_lock() -> Iterator[None]:
    """Have nvshmem4py free and finalise without the interpreter's lock, which it holds (0.3.1 to 0.4.1).

    Under the lock no other thread could end the wait. ctypes calls the same functions without it.
    """
    replaced: list[tuple[Any, str, Any]] = []
    try:
        bindings = importlib.import_module("nvshmem.bindings")
        of_memory = importlib.import_module("nvshmem.core.nvshmem_types")
        address = importlib.import_module("nvshmem.bindings._internal.nvshmem")._inspect_function_pointer
        for module, name, symbol, types in (
            (of_memory, "free", "__nvshmem_free", (ctypes.c_void_p,)),
            (bindings, "hostlib_finalize", "__nvshmemx_hostlib_finalize", ()),
        ):
            function = ctypes.CFUNCTYPE(None, *types)(address(symbol))
            replaced.append((module, name, getattr(module, name)))
            setattr(module, name, function)
    except (ImportError, AttributeError, KeyError) as error:
        _log.warning("this nvshmem4py waits with the interpreter's lock, without a bound (%r)", error)
    try:
        yield
    finally:
        for module, name, before in replaced:
            setattr(module, name, before)
