"""That giving NVSHMEM's memory back ends, whatever NVSHMEM does; the library is pretended here."""

import threading

import pytest
import torch

from dist_autotune.kernels.symm import SymmetricMemoryError, SymmetricTensor, cuda, nvshmem
from dist_autotune.kernels.symm.ranks import SharingRanks

PATIENCE_S = 0.2


class PretendedNvshmem:
    """nvshmem.core: calls whose peers come when `peers_come` is set."""

    def __init__(self, sticks_in: str = "") -> None:
        self.peers_come = threading.Event()
        self.calls: list[str] = []
        self._sticks_in = sticks_in

    def _collective(self, name: str) -> None:
        self.calls.append(name)
        if name == self._sticks_in:
            self.peers_come.wait(60.0)

    def free_tensor(self, tensor: torch.Tensor) -> None:
        self._collective(f"free {list(tensor.shape)}")

    def finalize(self) -> None:
        self._collective("finalize")


class Memory(nvshmem.NvshmemMemory):
    def _map(self, shape, dtype):
        alone = torch.zeros(shape, dtype=dtype)
        return SymmetricTensor(alone, (alone,))

    def _synchronize(self):
        """Nothing to do."""


def opened(monkeypatch, core):
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(cuda, "_load_driver", lambda: None)
    monkeypatch.setattr(cuda, "_abandoned", [])
    library = nvshmem._Library()
    library.module = core

    def enter(ranks, device):
        library._users += 1

    library.enter = enter
    monkeypatch.setattr(nvshmem, "_library", library)
    memory = Memory(SharingRanks(timeout_s=PATIENCE_S), torch.device("cpu"))
    memory.allocate((3,), torch.int32)
    memory.allocate((5, 2), torch.int32)
    return memory, library


@pytest.mark.parametrize(
    ("sticks_in", "told", "calls"),
    [
        ("free [5, 2]", "freeing [5, 2] torch.int32", ["free [5, 2]"]),
        ("free [3]", "freeing [3] torch.int32", ["free [5, 2]", "free [3]"]),
        ("finalize", "finalising", ["free [5, 2]", "free [3]", "finalize"]),
    ],
    ids=["first", "second", "finalising"],
)
def test_a_call_that_does_not_return_is_named_and_nothing_more_is_asked(monkeypatch, sticks_in, told, calls):
    core = PretendedNvshmem(sticks_in)
    memory, library = opened(monkeypatch, core)
    kept = list(memory._allocations)
    with pytest.raises(SymmetricMemoryError) as caught:
        memory.close()
    assert str(caught.value).startswith(
        f"rank 0 of 1: NVSHMEM has not returned from {told} within {PATIENCE_S:g} s, though all"
    )
    memory.close()
    assert core.calls == calls
    assert {id(tensor) for tensor in kept} <= {id(tensor) for tensor in cuda._abandoned}
    assert library.why_closed_to(SharingRanks()) == f"NVSHMEM of this process has not returned from {told}"
    core.peers_come.set()
