"""What the instructions of a kernel do in the model, for the task whose turn it is; see `gluon_model`."""

from __future__ import annotations

from typing import Any

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


def atomic_xchg(pointer: Pointer, value: int, *, sem: str, scope: str) -> None:
    pointer.set(value)


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
