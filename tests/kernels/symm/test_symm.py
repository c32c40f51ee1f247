"""One suite for all backends of symmetric memory; those of GPUs run where two are."""

import importlib.util
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from operation_runs import ON_GPUS, cases_of, die, on_ranks

from dist_autotune.kernels import symm
from dist_autotune.kernels.symm import Copy, SymmetricMemoryError, Wait, Write, nvshmem, open_symmetric_memory
from dist_autotune.kernels.symm import shm as shm_module
from dist_autotune.kernels.symm.ranks import SharingRanks
from ranks import meet

BACKENDS = ["shm", pytest.param("torch", marks=pytest.mark.gpu(devices=2))]
if importlib.util.find_spec("nvshmem") or not ON_GPUS:  # there a skip is a failure; its absence has a test
    BACKENDS.append(pytest.param("nvshmem", marks=pytest.mark.gpu(devices=2)))


# ---- what every backend does


def each_rank_reaches_the_memory_of_all(rank, backend):
    with open_symmetric_memory(backend=backend) as memory:
        tensor = memory.allocate((memory.world_size, 3), torch.float16)
        assert not tensor.local.any()
        memory.barrier()
        for peer in tensor.peers:
            peer[rank] = rank + 1
        memory.barrier()
        assert tensor.peers[rank] is tensor.local
        assert (memory.rank, memory.name) == (rank, backend)
        return tensor.local.tolist() == [[1, 1, 1], [2, 2, 2]]


def steps_that_are_prepared_happen_in_order_in_each_run(rank, backend):
    """Pass data on in both directions at once, with steps that are prepared once."""
    with open_symmetric_memory(backend=backend) as memory:
        peer = 1 - rank
        data, words = memory.allocate((4,), torch.int32), memory.allocate((2,), torch.int32)
        got = torch.zeros_like(data.local)
        stream = memory.side_stream()
        run = memory.prepare(
            [
                Write(words.peers[peer][0], 1),  # behind the other way round this would never end
                Wait(words.local[0], 1),
                Write(words.local[0], 0),
                Copy(got, data.peers[peer]),
                Write(words.local[1], 9),
            ],
            stream,
        )
        found = []
        for epoch in range(1, 4):
            if rank == 0:
                time.sleep(0.05)
            data.local.fill_(10 * rank + epoch)
            stream.fork()
            run()
            stream.join()
            found.append([*got.tolist(), *words.local.tolist()])
            memory.barrier()
        return found == [[10 * peer + epoch] * 4 + [0, 9] for epoch in (1, 2, 3)]


def a_barrier_waits_for_the_last_rank(rank, backend):
    note = Path("rank 1 has come")
    with open_symmetric_memory(backend=backend) as memory:
        if rank == 1:
            time.sleep(0.2)  # on purpose: the other is to wait
            note.touch()
        memory.barrier()
        return note.exists()


def a_closed_memory_says_so(rank, backend):
    memory = open_symmetric_memory(backend=backend)
    memory.allocate((4,), torch.int32)
    memory.close()
    memory.close()
    told = f"this {backend} memory of rank {rank} of 2 is closed; open another"
    for use in (lambda: memory.allocate((4,), torch.int32), memory.barrier, memory.side_stream):
        with pytest.raises(SymmetricMemoryError, match=told):
            use()
    return True


def different_shapes_raise_on_every_rank_and_leave_the_memory_usable(rank, backend):
    with open_symmetric_memory(backend=backend) as memory:
        with pytest.raises(ValueError, match="different") as caught:
            memory.allocate((4, rank + 1), torch.float32)
        assert "rank 0: [4, 1] torch.float32; rank 1: [4, 2] torch.float32" in str(caught.value)
        return memory.allocate((2,), torch.int32).local.tolist() == [0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(2)
def test_ranks_share_memory_and_signals(rank, backend):
    functions = (
        each_rank_reaches_the_memory_of_all,
        steps_that_are_prepared_happen_in_order_in_each_run,
        a_barrier_waits_for_the_last_rank,
        a_closed_memory_says_so,
        different_shapes_raise_on_every_rank_and_leave_the_memory_usable,
    )
    return cases_of(functions, rank, backend)


@on_ranks(3)
def test_a_close_of_memory_that_a_peer_has_abandoned_meets_no_later_exchange_of_it(rank):
    """Rank 0 abandons the first of two; all close the second, and share a third."""
    first, second = (open_symmetric_memory(backend="shm") for _ in range(2))
    if rank == 0:
        first.abandon()
    else:
        with pytest.raises(SymmetricMemoryError, match=r"which ranks \[0\] had left after a failure"):
            first.close()
    second.close()
    with open_symmetric_memory(backend="shm") as third:
        word = third.allocate((1,), torch.int32)
        word.local.fill_(rank)
        third.barrier()
        assert [int(each) for each in word.peers] == [0, 1, 2]


# ---- groups


@on_ranks(3)
def test_a_group_may_be_a_subset_of_the_world(rank):
    group = dist.new_group([0, 2])
    with pytest.raises(TypeError, match="group=7: a process group is needed, or None"):
        open_symmetric_memory(7)
    if rank == 1:
        with pytest.raises(ValueError, match="global rank 1 is not a member"):
            open_symmetric_memory(group)
        return
    with open_symmetric_memory(group) as memory:
        tensor = memory.allocate((2,), torch.int32)
        for peer in tensor.peers:
            peer[memory.rank] = 10 + rank
        memory.barrier()
        assert (memory.rank, tensor.local.tolist()) == (rank // 2, [10, 12])


@on_ranks(2)
def test_a_group_across_hosts_is_refused_on_every_rank(rank, tmp_path):
    if rank == 1:
        symm.BOOT_ID = tmp_path / "boot"
        symm.BOOT_ID.write_text("another machine")
    with pytest.raises(SymmetricMemoryError, match=r"^the group spans several hosts \(rank 0 on "):
        open_symmetric_memory()


# ---- which backend


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        pytest.param("mpi", None, "backend 'mpi' is none of 'auto', 'shm', 'nvshmem', 'torch'", id="unknown"),
        pytest.param("shm", "meta", "for cpu and cuda devices, not for meta", id="no such device"),
        pytest.param("torch", "cpu", "backend 'torch' is for cuda devices, not for cpu", id="torch on cpu"),
        pytest.param("nvshmem", None, "'nvshmem' needs a GPU and torch sees none", id="no GPU"),
    ],
)
def test_a_choice_that_cannot_work_is_refused(backend, device, message):
    with pytest.raises((ValueError, SymmetricMemoryError), match=message):
        open_symmetric_memory(backend=backend, device=device)


def test_nvshmem_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # it is asked about before anything else
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = nvshmem.why_unusable(SharingRanks())
    assert reason == "nvshmem4py is not installed; " + nvshmem.INSTALL


# ---- shm


@pytest.fixture
def shm_directory(tmp_path, monkeypatch):
    """Give a directory of this test's own, so that no other process's files are seen."""
    monkeypatch.setattr(shm_module, "DIRECTORY", tmp_path)
    return tmp_path


@pytest.mark.usefixtures("shm_directory")
@on_ranks(2, the_last_is_killed=True)
def test_nothing_has_a_name_once_it_is_mapped_and_a_killed_rank_leaves_nothing(rank):
    with open_symmetric_memory(backend="shm", timeout_s=5) as memory:
        memory.allocate((1000,), torch.float32)
        memory.barrier()
        assert list(shm_module.DIRECTORY.glob("symmetric-*")) == []
        memory.barrier()
        meet()
        if rank == 1:
            die()
        with pytest.raises(SymmetricMemoryError, match=r"^rank 0 of 2 got no answer from all its peers"):
            memory.barrier()
        memory.abandon()
    assert list(shm_module.DIRECTORY.glob("symmetric-*")) == []


@pytest.mark.usefixtures("shm_directory")
@on_ranks(2)
def test_a_rank_without_space_fails_the_allocation_on_every_rank(rank):
    if rank == 1:
        shm_module._new_file = lambda size: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    told = r"failed on 1 of 2 ranks: rank 1: OSError: \[Errno 28\] No space left on device"
    with open_symmetric_memory(backend="shm") as memory:
        with pytest.raises(SymmetricMemoryError, match=told):
            memory.allocate((8,), torch.float32)
        memory.barrier()
    assert list(shm_module.DIRECTORY.glob("symmetric-*")) == []


@on_ranks(1)
def test_a_cpu_stream_ends_its_wait_and_drops_what_follows(rank):
    told = "rank 0 of 1 waited 0.5 s for a signal to reach 3; its value is 0"
    with open_symmetric_memory(backend="shm", timeout_s=0.1) as memory:
        word = memory.allocate((1,), torch.int32).local
        stream, ran = memory.side_stream(), []
        memory.wait_signal(word, 3, stream)
        stream.enqueue(lambda: ran.append("after"))
        for _ in range(2):
            with pytest.raises(TimeoutError, match=f"^{told}$"):
                stream.join()
        memory.abandon()
        assert ran == []
