"""What the instructions of a kernel do in the model, for the task whose turn it is; see `gluon_model`."""

import re
from typing import Any, NamedTuple

import numpy as np
from gluon_machine import drain, machine, now
from gluon_memory import (
    Barrier,
    BarrierLayout,
    Barriers,
    Buffer,
    Descriptor,
    Pointer,
    Scalar,
    Tensor,
    TensorMemory,
)

# PTX of wgmma: rows of a k block, at an address, and registers. An address counts 16 bytes, of which a row
# has 8: 8 elements, or 16 in fp8. A thread has a register for two columns of each 64 rows of its strip.
ROW_BYTES = 128
PRODUCT = re.compile(
    r"add\.u32 rows, a, (\d+);.*?add\.u32 rows, b, (\d+);.*?wgmma\.mma_async\S*m64n(\d+)k(\d+)\S* \{(.*?)\}",
    re.DOTALL,
)
NEXT_WARPGROUP = re.compile(r"mad\.lo\.u32 a, rows, (\d+), a;")
WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned (\d+);")


class Product(NamedTuple):
    """An instruction: where it begins to read A and B, how many columns it reads, where its sums are."""

    a: int
    b: int
    columns: int
    depth: int  # elements along K
    registers: list[int]


def inline_asm(text: str, constraints: str, operands: tuple[Any, ...], results: tuple[Any, ...]) -> Any:
    """Start a k block's products, if there are any, and wait for all but so many k blocks."""
    sums: tuple[Tensor, ...] = operands
    if "wgmma.commit_group" in text:
        a, b_ring, b_bytes, *before = operands
        # Tensors are values, and may be one value; those with products in flight are registers already.
        sums = tuple(strip if strip.in_flight else Tensor(strip.array.copy()) for strip in before)
        _start(text, a, b_ring, b_bytes, sums)
    registers = sum(strip.array.size for strip in sums) // (32 * now().warps)
    expected = ["=f"] * registers + ["r"] * (len(operands) - len(sums)) + [*map(str, range(registers))]
    assert constraints.split(",") == expected, "registers are missing, or too many"
    assert len(results) == len(sums)
    (outstanding,) = WAIT.findall(text)
    drain(now().multiplying, int(outstanding))
    now().pause()
    return sums


def _start(text: str, a: Buffer, b_ring: Buffer, b_bytes: int, sums: tuple[Tensor, ...]) -> None:
    """Start the products of A's k block and of what lies so many bytes behind the beginning of B's ring."""
    products = [
        Product(*map(int, numbers), [int(name[1:]) for name in registers.split(", ")])
        for *numbers, registers in PRODUCT.findall(text)
    ]
    width = sum(strip.shape[1] for strip in sums)
    assert all(product.columns == width for product in products), "products of other columns than the sums"
    warpgroups = now().warps // 4
    next_warpgroup = int(NEXT_WARPGROUP.findall(text)[0]) if warpgroups > 1 else 0
    b_rows = b_ring.array.reshape(-1, b_ring.shape[-1])  # the boxes lie one behind the other

    def finish() -> None:
        for product in products:
            columns = _rows(b_rows, product.b + b_bytes // 16, product.columns, product.depth)
            for warpgroup in range(warpgroups):
                rows = _rows(a.array, product.a + warpgroup * next_warpgroup, 64, product.depth)
                _add(rows @ columns.T, sums, product.registers, warpgroup, warpgroups)
        for strip in sums:
            strip.in_flight -= 1

    for strip in sums:
        strip.in_flight += 1
    now().multiplying.append(finish)


def _rows(array: np.ndarray, address: int, rows: int, depth: int) -> np.ndarray:
    """Return so many elements, 32 bytes, of each of so many rows; NaNs for what is not there."""
    row, at = divmod(address, ROW_BYTES // 16)
    part = array[row : row + rows, at * depth // 2 : at * depth // 2 + depth]
    return np.pad(part, [(0, rows - part.shape[0]), (0, depth - part.shape[1])], constant_values=np.nan)


def _add(
    product: np.ndarray, sums: tuple[Tensor, ...], registers: list[int], warpgroup: int, warpgroups: int
) -> None:
    """Add 64 rows to the strips, where a warpgroup has them in these registers."""
    rows, columns = sums[0].shape
    reps, each = rows // (64 * warpgroups), columns // 2
    rep = registers[0] // each
    expected = [each * (strip * reps + rep) + i for strip in range(len(sums)) for i in range(each)]
    assert registers == expected, "sums are in other registers"
    first = 64 * (rep * warpgroups + warpgroup)
    for strip, further in zip(sums, np.split(product, len(sums), axis=1), strict=True):
        strip.array[first : first + 64] += further


TURN_NS = 10_000  # of the clock, so that there is time for the polls between two looks at it


def allocate(dtype: object, shape: list[int], layout: object) -> Any:
    return Barriers(shape[0]) if isinstance(layout, BarrierLayout) else Buffer(np.full(shape, np.nan))


def zeros(shape: tuple[int, ...], dtype: object, layout: object) -> Tensor:
    return Tensor(np.zeros(shape))


def wait(bar: Barrier, parity: int, pred: bool = True) -> None:
    if pred:
        now().pause(lambda: bar.phase % 2 != parity, f"parity {parity} of an mbarrier in phase {bar.phase}")
        now().acquired_at = max(now().acquired_at, bar.acquired_at)
        now().acquired.update(bar.told)


def init(bar: Barrier, count: int) -> None:
    bar.count = bar.pending = count


def arrive(bar: Barrier, *, count: int = 1, pred: bool = True) -> None:
    if pred:
        drain(now().plain_stores, 0)
        bar.acquired_at = max(bar.acquired_at, now().acquired_at)
        bar.told.update(now().acquired)
        bar.arrive(count)
    now().pause()


def expect(bar: Barrier, nbytes: int, pred: bool = True) -> None:
    if pred:
        bar.bytes += nbytes
        bar.arrive(1)


def _must_be_fenced(buf: Buffer, what: str) -> None:
    fenced = all(buf.memory not in task.unfenced for task in machine().tasks)
    assert fenced, f"a {what} needs a proxy fence first"


def tma_load(desc: Descriptor, coord: list[int], bar: Barrier, buf: Buffer) -> None:
    desc.may_load(coord)
    _must_be_fenced(buf, "load")
    assert buf.array.shape == tuple(desc.block_type.shape), "it fills another buffer"

    def copy() -> None:
        machine().must_be_running(bar.program)
        desc.read(coord, buf.array)
        bar.transfer(-desc.block_type.nbytes)

    buf.array[...] = np.nan  # from now on nobody may count on what was there
    machine().copies.append(copy)
    now().pause()


def tma_store(desc: Descriptor, coord: list[int], buf: Buffer) -> None:
    _must_be_fenced(buf, "store")
    task = now()

    def read() -> None:
        block = buf.array.copy()
        task.writing.append(lambda: desc.write(coord, block))

    task.storing.append(read)
    task.pause()


def fence() -> None:
    now().unfenced.clear()


def store_wait(pendings: int) -> None:
    drain(now().storing, pendings)
    now().pause()


def multiply(a: Buffer | Tensor, b: Buffer, acc: Tensor, *, is_async: bool) -> Tensor:
    assert is_async

    def finish() -> None:
        acc.array += a.array @ b.array
        acc.in_flight -= 1

    acc.in_flight += 1
    now().multiplying.append(finish)
    now().pause()
    return acc


def multiply_wait(num_outstanding: int, deps: tuple[Tensor, ...]) -> Any:
    drain(now().multiplying, num_outstanding)
    now().pause()
    return deps[0] if len(deps) == 1 else deps


def tcgen05(a: Buffer, b: Buffer, acc: TensorMemory, *, use_acc: bool) -> None:
    def finish() -> None:
        acc.array[...] = a.array @ b.array + (acc.array if use_acc else 0)

    machine().queues.setdefault(now().program, []).append(finish)
    now().pause()


def commit(bar: Barrier) -> None:
    machine().queues.setdefault(now().program, []).append(lambda: bar.arrive(1))
    now().pause()


def specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
    parent = now()
    for (body, arguments), count in zip(partitions[1:], warps, strict=True):
        name = f"{parent.name}/{body.__name__}{len(machine().tasks)}"
        machine().start(name, parent.program, count, lambda body=body, arguments=arguments: body(*arguments))
    body, arguments = partitions[0]
    body(*arguments)


def atomic_add(pointer: Pointer, value: int, *, sem: str, scope: str) -> Scalar:
    before = pointer.get()
    pointer.set(before + value)
    now().order(sem)
    if "acq" in sem:
        now().acquired[pointer.address] = before
    now().pause()
    return before


def atomic_xchg(pointer: Pointer, value: int, *, sem: str, scope: str) -> Scalar:
    before = pointer.get()
    pointer.set(value)
    return before


def atomic_cas(pointer: Pointer, expected: int, value: int, *, sem: str, scope: str) -> Scalar:
    before = pointer.get()
    if before == expected:
        pointer.set(value)
    now().pause()
    return before


def assembly(text: str, *arguments: Any, **options: Any) -> Scalar:
    if "fence.proxy.async.global" in text:
        now().visible.update(now().acquired)
        return Scalar(0)
    if "cp.async.bulk.wait_group 0" in text:
        drain(now().storing, 0)
        drain(now().writing, 0)
        return Scalar(0)
    if "vote.sync.any" in text:  # of the lanes of one warp, which are one here
        return Scalar(arguments[1][0])
    if "%globaltimer" in text:
        time_ns = machine().turns * TURN_NS
        return Scalar(time_ns >> 20 if "shr.u64 now, now, 20" in text else time_ns)
    assert "%smid" in text
    return Scalar(now().program)
