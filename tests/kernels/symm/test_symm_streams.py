"""What GPU memory keeps when it is abandoned, whose its streams are, what they do, on a pretended driver."""

import contextlib
import gc
import threading
import weakref

import pytest
import torch
from pretended_cuda import HIGHEST, NON_BLOCKING, PretendedDriver, PretendedMemory, install

from dist_autotune.kernels.exchange import operation
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.symm import SymmetricMemoryError, cuda, nvshmem
from dist_autotune.kernels.symm.ranks import SharingRanks


@pytest.fixture
def driver(monkeypatch):
    driver = PretendedDriver()
    install(monkeypatch, driver)
    return driver


def opened(monkeypatch):
    monkeypatch.setattr(operation, "open_symmetric_memory", lambda *_, **__: PretendedMemory())
    return GemmReduceScatter(4, 4, torch.float16)


def what_kernels_write(op):
    written = {"failures": op._failures.words, "partial": op._held.partial, "counts": op._held.counts}
    return {name: weakref.ref(tensor) for name, tensor in written.items()}


def test_what_a_kernel_may_still_write_is_kept_when_the_operation_is_abandoned(driver, monkeypatch):
    op = opened(monkeypatch)
    written = what_kernels_write(op)
    with contextlib.suppress(KeyError), op:
        raise KeyError("the user's own")
    del op
    gc.collect()
    assert [name for name, tensor in written.items() if tensor() is None] == []


def test_side_streams_are_made_for_the_memory_and_destroyed_with_it(driver):
    memory = PretendedMemory()
    handles = [memory.side_stream().handle for _ in range(3)]
    assert driver.made == dict.fromkeys(handles, (NON_BLOCKING, HIGHEST))
    assert driver.destroyed == []
    memory.close()
    memory.close()
    assert sorted(driver.destroyed) == sorted(handles)


# ---- giving NVSHMEM's memory back ends, whatever NVSHMEM does


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
    _map, _synchronize = PretendedMemory._map, PretendedMemory._synchronize


def opened_by_nvshmem(monkeypatch, core):
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
    memory, library = opened_by_nvshmem(monkeypatch, core)
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
