"""Runs the source of a Gluon kernel on the CPU, to find its deadlocks and races; says nothing of its speed.

Triton cannot interpret Gluon. The modules of a kernel are therefore loaded a second time, with stand-ins for
Triton, and their functions run as the Python that they are. All programs and partitions of a launch take
turns, one at a time, in an order drawn from a seed. What the hardware does on its own is done as late, as
early or as much out of turn as it may be:

    TMA load         writes its buffer at some time after it was started, then counts its bytes
    TMA store        reads its buffer at some time before the `store_wait` that asks for it
    wgmma            reads its operands at some time before the `warpgroup_mma_wait` that asks for it
    PTX of wgmma     the same; see `gluon_ptx`
    tcgen05          the same, in order; `commit` arrives behind what was started before
    mbarrier         phases with pending arrivals and bytes; one arrival too many is an error
    several CTAs     each has tasks and memory of its own; what all receive arrives in each at some time

A launch ends, and what it wrote can be compared; or `Deadlock` tells who waits for what. A buffer that is
overwritten too early gives a wrong product. A write that TMA reads without a proxy fence in between, or a
read that it overwrites without one, is an error of its own, and so is a read of what another program has
written and not published. Words in global memory are read and written at once; what a task has acquired and
fenced is known, so a test can say what it may load (`may_load`), and can let others change memory beside the
launch. What the compiler makes of a program of several CTAs is done as it does it: layouts say what each CTA
has of a tensor, CTA 0 starts the loads that all receive, and alone waits for an mbarrier that is of all; they
meet before the first use of an mbarrier and at the end, and memory of a CTA that is gone must not be used.

Not modelled: warps inside a partition, which the compiler's own barriers gather, layouts otherwise, and
integers that wrap around.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gluon_machine import Deadlock, Machine, Program, drain, machine, now
from gluon_memory import (
    Barrier,
    BarrierLayout,
    Barriers,
    Buffer,
    Descriptor,
    Layout,
    Pointer,
    Scalar,
    Tensor,
    TensorMemory,
)
from gluon_ptx import inline_asm

__all__ = ["Deadlock", "Descriptor", "Pointer", "launch", "load_kernel_module"]

KERNELS = Path(__file__).parents[1] / "kernels"
TURN_NS = 10_000  # of the clock, so that there is time for the polls between two looks at it
LATE_TURNS = 30  # of a CTA's start, behind that of the other one


def _allocate(dtype: object, shape: list[int], layout: Layout | None) -> Any:
    cta = now().cta
    if isinstance(layout, BarrierLayout):
        return cta.allocate(lambda: Barriers(shape[0], layout))
    each = (layout or Layout()).share(shape)
    return Buffer(cta.allocate(lambda: np.full([len(cta.program.ctas), *each], np.nan)), cta.rank)


def _zeros(shape: tuple[int, ...], dtype: object, layout: Layout | None) -> Tensor:
    return Tensor(np.zeros((layout or Layout()).share(shape)))


def _wait(bar: Barrier, parity: int, pred: bool = True) -> None:
    now().cta.program.begin()
    if pred and bar.cta is now().cta:
        now().pause(lambda: bar.phase % 2 != parity, f"parity {parity} of an mbarrier in phase {bar.phase}")


def _init(bar: Barrier, count: int) -> None:
    """Begin with a count from each CTA that has no mbarrier of its own."""
    bar.count = bar.pending = count * bar.everywhere.count(bar)


def _arrive(bar: Barrier, *, count: int = 1, pred: bool = True) -> None:
    now().cta.program.begin()
    if pred:
        bar.arrive(count)
    now().pause()


def _expect(bar: Barrier, nbytes: int, pred: bool = True) -> None:
    now().cta.program.begin()
    if pred:
        bar.bytes += nbytes
        bar.arrive(1)


def _must_be_fenced(buf: Buffer, what: str) -> None:
    fenced = all(buf.memory not in task.unfenced for task in machine().tasks)
    assert fenced, f"a {what} needs a proxy fence first"


def _tma_load(
    desc: Descriptor, coord: list[int], bar: Barrier, buf: Buffer, *, multicast: bool = False
) -> None:
    now().cta.program.begin()
    desc.may_load(coord)
    if not multicast:
        _copy(desc, coord, bar, buf)
    elif now().cta.rank == 0:
        for rank, of_cta in enumerate(bar.everywhere):  # there is no saying in which it arrives first
            _copy(desc, coord, of_cta, buf.in_cta(rank))
    now().pause()


def _copy(desc: Descriptor, coord: list[int], bar: Barrier, buf: Buffer) -> None:
    """Start a load."""
    _must_be_fenced(buf, "load")
    assert buf.array.shape == tuple(desc.layout.share(desc.block_type.shape)), "it fills another buffer"
    begin = desc.start_of(coord)

    def copy() -> None:
        bar.cta.must_be_there()
        desc.read(begin, buf.array)
        bar.transfer(-2 * buf.array.size)

    buf.array[...] = np.nan  # from now on nobody may count on what was there
    machine().copies.append(copy)


def _tma_store(desc: Descriptor, coord: list[int], buf: Buffer) -> None:
    _must_be_fenced(buf, "store")
    begin = desc.start_of(coord)
    now().storing.append(lambda: desc.write(begin, buf.array))
    now().pause()


def _store_wait(pendings: int) -> None:
    drain(now().storing, pendings)
    now().pause()


def _multiply(a: Buffer | Tensor, b: Buffer, acc: Tensor, *, is_async: bool) -> Tensor:
    assert is_async

    def finish() -> None:
        acc.array += a.array @ b.array
        acc.in_flight -= 1

    acc.in_flight += 1
    now().multiplying.append(finish)
    now().pause()
    return acc


def _multiply_wait(num_outstanding: int, deps: tuple[Tensor, ...]) -> Any:
    drain(now().multiplying, num_outstanding)
    now().pause()
    return deps[0] if len(deps) == 1 else deps


def _tcgen05(a: Buffer, b: Buffer, acc: TensorMemory, *, use_acc: bool) -> None:
    def finish() -> None:
        acc.array[...] = a.array @ b.array + (acc.array if use_acc else 0)

    machine().queues.setdefault(now().cta, []).append(finish)
    now().pause()


def _commit(bar: Barrier) -> None:
    machine().queues.setdefault(now().cta, []).append(lambda: bar.arrive(1))
    now().pause()


def _specialize(partitions: list[Any], warps: list[int], registers: list[int]) -> None:
    parent = now()
    parent.cta.program.begin()
    for (body, arguments), count in zip(partitions[1:], warps, strict=True):
        name = f"{parent.name}/{body.__name__}{len(machine().tasks)}"
        machine().start(name, parent.cta, count, lambda body=body, arguments=arguments: body(*arguments))
    body, arguments = partitions[0]
    body(*arguments)


def _atomic_add(pointer: Pointer, value: int, *, sem: str, scope: str) -> Scalar:
    before = pointer.get()
    pointer.set(before + value)
    now().order(sem)
    if "acq" in sem:
        now().acquired[pointer.address] = before
    now().pause()
    return before


def _atomic_xchg(pointer: Pointer, value: int, *, sem: str, scope: str) -> None:
    pointer.set(value)


def _assembly(text: str, *arguments: Any, **options: Any) -> Scalar:
    if "fence.proxy.async.global" in text:
        now().visible.update(now().acquired)
        return Scalar(0)
    if "vote.sync.any" in text:  # of the lanes of one warp, which are one here
        return Scalar(arguments[1][0])
    if "%globaltimer" in text:
        time_ns = machine().turns * TURN_NS
        return Scalar(time_ns >> 20 if "shr.u64 now, now, 20" in text else time_ns)
    assert "%smid" in text
    return Scalar(now().program)


def _same(value: Any) -> Any:
    return value


class Constant(int):
    @property
    def value(self) -> int:
        return int(self)


def _constexpr(value: Any) -> Any:
    return Constant(value) if type(value) is int else value


def _jit(function: Any = None, **options: Any) -> Any:
    return function or _same


def _aggregate(cls: Any) -> Any:
    """Return a class whose constructor takes its fields in their order."""
    names = [*cls.__annotations__]

    def init(self: Any, *values: Any) -> None:
        vars(self).update(zip(names, values, strict=True))

    cls.__init__ = init
    return cls


def _check(condition: bool, message: str) -> None:
    assert condition, message


def _fakes() -> dict[str, types.ModuleType]:
    """Return the modules that stand for Triton's, by their names."""

    def module(name: str, **names: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(names)
        return made

    def nothing(*arguments: Any, **options: Any) -> None:
        return None

    mbarrier = module(
        "mbarrier", MBarrierLayout=BarrierLayout, init=_init, wait=_wait, arrive=_arrive, expect=_expect
    )
    tma = module("tma", tensor_descriptor=None, store_wait=_store_wait)
    language = module(
        "language",
        constexpr=_constexpr,
        tensor=None,
        shared_memory_descriptor=None,
        static_range=range,
        static_assert=_check,
        cdiv=lambda a, b: -(-a // b),
        to_tensor=_same,
        int32=None,
        int64=None,
        float32=None,
        bfloat16="bfloat16",
        tuple=None,
        distributed_type=lambda dtype, shape, layout: types.SimpleNamespace(layout=layout),
        zeros=_zeros,
        full=lambda shape, value, dtype, layout: Tensor(np.full(shape, value)),
        max=lambda tensor, axis: int(tensor.array.max()),
        num_warps=lambda: now().warps,
        num_ctas=lambda: len(now().cta.program.ctas),
        program_id=lambda axis: now().program,
        num_programs=lambda axis: machine().programs,
        allocate_shared_memory=_allocate,
        warp_specialize=_specialize,
        BlockedLayout=nothing,
        SliceLayout=nothing,
        SwizzledSharedLayout=nothing,
        NVMMADistributedLayout=lambda cga_layout=(), **options: Layout(cga_layout),
        DotOperandLayout=nothing,
        join=Tensor.join,
        convert_layout=lambda tensor, layout: tensor,
        atomic_add=_atomic_add,
        atomic_xchg=_atomic_xchg,
        load=lambda pointer: pointer.get(),
        store=lambda pointer, value: pointer.set(value),
        arange=lambda start, end, layout: Tensor(np.arange(start, end)),
        where=lambda condition, a, b: a if condition else b,
        cast=lambda value, dtype: value,
        inline_asm_elementwise=_assembly,
    )
    gluon = module("gluon", jit=_jit, constexpr_function=_same, language=language)
    hopper = module(
        "hopper",
        mbarrier=mbarrier,
        tma=tma,
        fence_async_shared=lambda: now().unfenced.clear(),
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_multiply_wait,
    )
    blackwell = module(
        "blackwell",
        TensorMemoryLayout=nothing,
        allocate_tensor_memory=lambda dtype, shape, layout: TensorMemory(np.full([1, *shape], np.nan), 0),
        tcgen05_commit=_commit,
        tcgen05_mma=_tcgen05,
        tensor_memory_descriptor=None,
    )
    triton = module(
        "triton",
        jit=_jit,
        cdiv=language.cdiv,
        next_power_of_2=lambda number: 1 << (number - 1).bit_length(),
        language=language,
    )
    return {
        "triton": triton,
        "triton.language": language,
        "triton.experimental": module("experimental", gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia": module("nvidia", hopper=hopper, blackwell=blackwell),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.language.nvidia.blackwell": blackwell,
    }


@contextmanager
def _in_place_of_triton() -> Iterator[None]:
    fakes = _fakes()
    before = {name: sys.modules.get(name) for name in fakes}
    sys.modules.update(fakes)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def load_kernel_module(name: str) -> Any:
    """Return the module `kernels.<name>`, its source loaded with the stand-ins."""
    root = "kernels_in_the_model"
    for package in (root, *(f"{root}.{path.name}" for path in KERNELS.iterdir() if path.is_dir())):
        if package not in sys.modules:  # without running its __init__, which wants torch and Triton
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(KERNELS / package.removeprefix(root).removeprefix("."))]
    sys.modules[f"{root}.compat"] = types.ModuleType(f"{root}.compat")
    vars(sys.modules[f"{root}.compat"]).update(
        aggregate=_aggregate,
        compiled_for=lambda: "cuda",
        inline_asm=inline_asm,
        is_one_warp=lambda: now().warps == 1,
        tma_load=_tma_load,
        tma_store=_tma_store,
        partition_barrier=lambda: now().barrier(),
        reinterpret=Buffer.reinterpret,
        load_accumulator=Buffer.load,
    )
    with _in_place_of_triton():
        return importlib.import_module(f"{root}.{name}")


@contextmanager
def tma_begins_anywhere() -> Iterator[None]:
    """Have tiles moved back to any column, for tests whose tiles are a few columns wide."""
    problem = load_kernel_module("persistent_gemm.problem")
    aligned = problem.ALIGNED
    problem.ALIGNED = 1
    try:
        yield
    finally:
        problem.ALIGNED = aligned


def launch(
    kernel: Callable[..., None],
    programs: int,
    *args: Any,
    seed: int,
    warps: int = 4,
    ctas: int = 1,
    haste: float | None = None,
    beside: Sequence[Callable[[], None]] = (),
    **options: Any,
) -> None:
    """Run all programs of a launch, and what runs `beside` them, to their ends, in an order of that seed.

    haste: how likely what the hardware does on its own goes on before a program does.
    """
    Machine.running = Machine(seed, haste)
    machine().programs = programs
    for body in beside:
        machine().start(getattr(body, "__name__", "other"), Program(-1).ctas[0], 1, body)

    def program() -> None:
        late = machine().random.choice([0, LATE_TURNS]) if ctas > 1 else 0
        for _ in range(late):
            now().pause()
        kernel(*args, **options)
        now().cta.program.end()

    for number in range(programs):
        for cta in Program(number, ctas).ctas:
            name = f"program {number}" + (f", CTA {cta.rank}" if ctas > 1 else "")
            machine().start(name, cta, warps, program)
    machine().run()
