"""Symmetric memory of NVSHMEM, through nvshmem4py."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from .base import SymmetricTensor
from .cuda import CudaMemory
from .ranks import RankGroup, SymmetricMemoryError

INSTALL = "install 'nvshmem4py-cu13>=0.3.1,<0.5' (for CUDA 12: nvshmem4py-cu12)"
INITIALIZED = 2  # nvshmem.core.init_status() from here on


class NvshmemMemory(CudaMemory):
    """The symmetric heap of NVSHMEM, which must span exactly the ranks of the group."""

    name = "nvshmem"

    def __init__(self, ranks: RankGroup, device: torch.device, reason: str = "asked for") -> None:
        super().__init__(ranks, device, reason)
        _library.enter(ranks, device)

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        nvshmem = _library.module
        peers: tuple[torch.Tensor, ...] = ()
        error: Exception | None = None
        try:
            local = nvshmem.tensor(shape, dtype)  # collective, and not zeroed
            local.zero_()
            self._synchronize()  # a peer may use it as soon as the next exchange is over
            # Its own entry is `local`: asking for it as a peer's would leak it, by one reference too many.
            peers = tuple(
                local if peer == self.rank else nvshmem.get_peer_tensor(local, peer)
                for peer in range(self.world_size)
            )
        except Exception as caught:  # NVSHMEM's own classes, which need not be importable here
            error = caught
        self._ranks.raise_together(f"allocating {list(shape)} {dtype} from NVSHMEM", error)
        return SymmetricTensor(peers[self.rank], peers)

    def _release(self) -> None:
        for tensor in reversed(self._allocations):
            _library.module.free_tensor(tensor.local)  # collective: the same order on all ranks
        _library.leave()


def why_unusable(ranks: RankGroup) -> str | None:
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
    """The one NVSHMEM of this process, shared by all that is open on it.

    Its set of processes is fixed by the first initialisation, finalised or not: a later one for other
    ranks would be accepted and ignored by the library. So it is refused here.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self._members: tuple[int, ...] | None = None
        self._users = 0

    def why_closed_to(self, ranks: RankGroup) -> str | None:
        import nvshmem.core

        if self._members is not None and self._members != ranks.members:
            ours = f"this process has initialised NVSHMEM for ranks {list(self._members)}"
            return f"{ours} and cannot use it for ranks {list(ranks.members)}"
        if self._users == 0 and nvshmem.core.init_status() >= INITIALIZED:
            return "other code of this process has initialised NVSHMEM"
        return None

    def enter(self, ranks: RankGroup, device: torch.device) -> None:
        reasons = ranks.exchange(why_unusable(ranks))
        if any(reasons):
            text = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
            raise SymmetricMemoryError(f"the nvshmem backend cannot be used. {text}")
        if self._users == 0:
            error: Exception | None = None
            try:
                self._initialize(ranks, device)
            except Exception as caught:  # NVSHMEM's own classes
                error = caught
            ranks.raise_together("initialising NVSHMEM", error)
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self.module.finalize()

    def _initialize(self, ranks: RankGroup, device: torch.device) -> None:
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
        raw[:] = np.frombuffer(bytes.fromhex(ranks.exchange(raw.tobytes().hex())[0]), dtype=np.uint8)
        nvshmem.core.init(
            device=cuda_device,
            uid=unique_id,
            rank=ranks.rank,
            nranks=ranks.world_size,
            initializer_method="uid",
        )
        self.module, self._members = nvshmem.core, ranks.members


_library = _Library()
