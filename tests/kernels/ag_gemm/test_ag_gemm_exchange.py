"""In which order an `AllGatherGemm` exchanges chunks, and how few calls of a driver that takes."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_autotune.kernels.exchange.flags import FETCHED, FLAGS, READY, ROWS
from dist_autotune.kernels.exchange.pull import BLOCK_ROWS, ChunkProducer
from dist_autotune.kernels.symm import SymmetricMemory, SymmetricMemoryError, SymmetricTensor
from dist_autotune.kernels.symm import cuda as cuda_module
from dist_autotune.kernels.symm.cuda import BATCH, CudaMemory
from dist_autotune.kernels.symm.ranks import SharingRanks

RANK, PIECES, ROWS_OF_CHUNK, K = 1, 3, 3 * BLOCK_ROWS, 4
NAMES = {READY.value: "READY", FETCHED.value: "FETCHED", ROWS.value: "ROWS", ROWS.value + 1: "ROWS'"}
WRITE, WAIT = 2, 1


class Group(SharingRanks):
    """One rank of several that are not there."""

    def __init__(self, world: int) -> None:
        self.group, self.timeout_s = None, 1.0
        self.rank, self.world_size, self.members = RANK % world, world, tuple(range(world))


class Stream:
    handle = 7

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def fork(self) -> None:
        self._log.append("fork")

    def join(self) -> None:
        self._log.append("join")


class Written:
    """What a memory writes down: which flag or chunk of which rank is meant, by its address."""

    def __init__(self, world: int) -> None:
        self.log: list[str] = []
        self.flags, self.gather = self._tensors(world, (FLAGS, world), torch.int32), None
        self.gather = self._tensors(world, (world, ROWS_OF_CHUNK, K), torch.float16)
        self._names: dict[int, str] = {}
        me = RANK % world
        for rank in range(world):
            for row in range(FLAGS):
                for column in range(world):
                    here = NAMES.get(row, "ARRIVED") + (f" of {column}" if rank == me else f" on {rank}")
                    self._names[self.flags.peers[rank][row, column].data_ptr()] = here

    @staticmethod
    def _tensors(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        peers = tuple(torch.zeros(shape, dtype=dtype) for _ in range(world))
        return SymmetricTensor(peers[RANK % world], peers)

    def write(self, address: int, value: int) -> None:
        self.log.append(f"{self._names[address]} := {value}")

    def wait(self, address: int, value: int) -> None:
        self.log.append(f"wait {self._names[address]} >= {value}")

    def copy(self, dst: int, src: int, size: int) -> None:
        for rank, tensor in enumerate(self.gather.peers):
            offset = src - tensor.data_ptr()
            if 0 <= offset < tensor.numel() * 2:
                chunk, row = divmod(offset // (2 * K), ROWS_OF_CHUNK)
                assert (chunk, dst - self.gather.local.data_ptr()) == (rank, offset)
                self.log.append(f"copy {row}..{row + size // (2 * K)} from {rank}")


class OneByOne(SymmetricMemory):
    """Memory that does what it is told step by step, as that of the CPU does."""

    name = "one by one"

    def __init__(self, world: int) -> None:
        super().__init__(Group(world), torch.device("cpu"), "for a test")
        self.written = Written(world)

    def side_stream(self) -> Any:
        return Stream(self.written.log)

    def copy(self, dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        self.written.copy(dst.data_ptr(), src.data_ptr(), dst.numel() * dst.element_size())

    def write_signal(self, flag: torch.Tensor, value: int, stream: Any) -> None:
        self.written.write(flag.data_ptr(), value)

    def wait_signal(self, flag: torch.Tensor, value: int, stream: Any) -> None:
        self.written.wait(flag.data_ptr(), value)

    def _map(self, shape: tuple[int, ...], dtype: torch.dtype) -> SymmetricTensor:
        raise NotImplementedError

    def _synchronize(self) -> None: ...

    def _release(self) -> None: ...


class Operation:
    """The driver's form of an operation."""

    def __init__(self) -> None:
        self.writeValue, self.waitValue = types.SimpleNamespace(), types.SimpleNamespace()


class Driver:
    """The functions of the CUDA driver that an exchange calls; `calls` are their names."""

    CUdeviceptr = CUstream = int
    CUstreamBatchMemOpParams = Operation
    CUstreamBatchMemOpType = types.SimpleNamespace(
        CU_STREAM_MEM_OP_WRITE_VALUE_32=WRITE, CU_STREAM_MEM_OP_WAIT_VALUE_32=WAIT
    )

    def __init__(self, written: Written) -> None:
        self._written = written
        self.calls: list[str] = []
        self.refuses_at = -1

    def cuMemcpyAsync(self, dst: int, src: int, size: int, stream: int) -> tuple[int]:
        return self._called("copy", stream, lambda: self._written.copy(dst, src, size))

    def cuStreamWriteValue32(self, stream: int, address: int, value: int, flags: int) -> tuple[int]:
        assert flags == 0  # with a barrier
        return self._called("write", stream, lambda: self._written.write(address, signed(value)))

    def cuStreamBatchMemOp(
        self, stream: int, count: int, operations: list[Operation], flags: int
    ) -> tuple[int]:
        assert (count, flags) == (len(operations), 0)

        def all_of_them() -> None:
            for made in operations:
                is_write = made.operation == WRITE
                part = made.writeValue if is_write else made.waitValue
                assert (part.operation, part.flags) == (made.operation, 0)
                (self._written.write if is_write else self._written.wait)(part.address, signed(part.value))

        return self._called(f"batch of {count}", stream, all_of_them)

    def _called(self, name: str, stream: int, do: Callable[[], None]) -> tuple[int]:
        assert stream == Stream.handle
        self.calls.append(name)
        do()
        return (700 if len(self.calls) - 1 == self.refuses_at else 0,)


def signed(value: int) -> int:
    assert 0 <= value < 2**32  # as the driver wants it
    return value - 2**32 if value >= 2**31 else value


class Batched(CudaMemory):
    """The memory of GPUs, whose driver writes down what it is told."""

    name = "batched"

    def __init__(self, world: int) -> None:
        SymmetricMemory.__init__(self, Group(world), torch.device("cpu"), "for a test")
        self.written = Written(world)
        self._driver = Driver(self.written)

    side_stream: Any = OneByOne.side_stream
    _map: Any = OneByOne._map
    _release: Any = OneByOne._release


@pytest.fixture
def any_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module, "_handle", lambda stream: stream.handle)


MEMORIES = pytest.mark.parametrize("memory_of", [OneByOne, Batched], ids=["CPU", "GPU"])
pytestmark = pytest.mark.usefixtures("any_stream")


def producer_of(memory: Any) -> ChunkProducer:
    return ChunkProducer(memory, memory.written.gather, memory.written.flags)


def in_order(world: int, pieces: int, epoch: int, base: int, *, announces: bool) -> list[str]:
    """Return what the docstring of `producer` says."""
    peers = [(RANK + step) % world for step in range(1, world)]
    rows = ROWS_OF_CHUNK // pieces
    said = ["fork"]
    if announces:
        said += [f"ROWS{chr(39) * (epoch & 1)} on {peer} := {ROWS_OF_CHUNK}" for peer in peers]
    said += [f"READY on {peer} := {epoch}" for peer in peers]
    for peer in peers:
        said.append(f"wait READY of {peer} >= {epoch}")
        for begin in range(0, ROWS_OF_CHUNK, rows):
            said.append(f"copy {begin}..{begin + rows} from {peer}")
            said.append(f"ARRIVED of {peer} := {base + begin + rows}")
        said.append(f"FETCHED on {peer} := {epoch}")
    return said


@MEMORIES
@pytest.mark.parametrize("pieces", [1, PIECES])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_exchange_is_in_the_order_that_the_proof_is_about(memory_of, world, pieces):
    memory = memory_of(world)
    exchange = producer_of(memory)
    for epoch, base in ((1, 0), (2, 48), (3, 96)):
        memory.written.log.clear()
        exchange.start(ROWS_OF_CHUNK, epoch, base, pieces)
        assert memory.written.log == in_order(world, pieces, epoch, base, announces=epoch < 3)


@MEMORIES
def test_numbers_wrap_as_int32(memory_of):
    memory = memory_of(2)
    producer_of(memory).start(ROWS_OF_CHUNK, 2**31 - 1, 2**31 - 1, 1)
    assert f"ARRIVED of 0 := {-(2**31) + ROWS_OF_CHUNK - 1}" in memory.written.log
    assert f"READY on 0 := {2**31 - 1}" in memory.written.log
    memory.written.log.clear()
    producer_of(memory).start(ROWS_OF_CHUNK, -(2**31), 0, 1)
    assert f"wait READY of 0 >= {-(2**31)}" in memory.written.log


def test_with_one_peer_a_settled_exchange_is_three_calls_of_the_driver():
    memory = Batched(2)
    exchange = producer_of(memory)
    for epoch in (1, 2, 3):
        memory._driver.calls.clear()
        exchange.start(ROWS_OF_CHUNK, epoch, 0, 1)
    assert memory._driver.calls == ["batch of 2", "copy", "batch of 2"]


def test_a_batch_has_no_more_operations_than_the_driver_takes():
    memory = Batched(BATCH + 3)
    producer_of(memory).start(ROWS_OF_CHUNK, 1, 0, 1)
    batches = [int(name.split()[-1]) for name in memory._driver.calls if name.startswith("batch")]
    assert batches[:2] == [BATCH, 3]
    assert memory.written.log == in_order(BATCH + 3, 1, 1, 0, announces=True)


def test_what_the_driver_refuses_is_told():
    memory = Batched(2)
    exchange = producer_of(memory)
    exchange.start(ROWS_OF_CHUNK, 1, 0, 1)
    for refused in range(3):  # the batch, the copy, the other batch
        memory._driver.calls.clear()
        memory._driver.refuses_at = refused
        with pytest.raises(SymmetricMemoryError, match="rank 1 of 2, cpu: the CUDA driver reports 700"):
            exchange.start(ROWS_OF_CHUNK, 3, 0, 1)
        assert len(memory._driver.calls) == refused + 1
