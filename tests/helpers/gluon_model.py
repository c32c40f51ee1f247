"""Runs the source of a Gluon kernel on the CPU, to find its deadlocks and races; says nothing of its speed.

Triton cannot interpret Gluon. The modules of a kernel are therefore loaded a second time, with stand-ins for
Triton, and their functions run as the Python that they are. All programs and partitions of a launch take
turns, one at a time, in an order drawn from a seed. What the hardware does on its own is done as late, as
early or as much out of turn as it may be:

    TMA load         writes its buffer at some time after it was started, then counts its bytes
    TMA store        reads its buffer at some time before the `store_wait` that asks for it, and writes to
                     memory at some later time, before the `cp.async.bulk.wait_group` that asks for that
    wgmma            reads its operands at some time before the `warpgroup_mma_wait` that asks for it
    PTX of wgmma     the same; see `inline_asm`
    tcgen05          the same, in order; `commit` arrives behind what was started before
    mbarrier         phases with pending arrivals and bytes; one arrival too many is an error

A launch ends, and what it wrote can be compared; or `Deadlock` tells who waits for what. A buffer that is
overwritten too early gives a wrong product. A write that TMA reads without a proxy fence in between, or a
read that it overwrites without one, is an error of its own, and so is a read of what another has written and
not published. Words in global memory are read and written at once; what a task has acquired, itself or
through an mbarrier, and fenced is known, so a test can say what it may load (`may_load`), and can let others
change memory beside the launch. The memory of a program that has ended must not be used.

Not modelled: warps inside a partition, which the compiler's own barriers gather, layouts, and integers that
wrap around.
"""

import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gluon_instructions as instructions
import numpy as np
import pytest
from gluon_instructions import inline_asm
from gluon_machine import Deadlock, Machine, machine, now
from gluon_memory import BarrierLayout, Buffer, Descriptor, Pointer, Tensor, TensorMemory, where

__all__ = ["Deadlock", "Descriptor", "Pointer", "launch", "load_kernel_module"]

KERNELS = Path(__file__).parents[2] / "kernels"


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
        "mbarrier",
        MBarrierLayout=BarrierLayout,
        init=instructions.init,
        wait=instructions.wait,
        arrive=instructions.arrive,
        expect=instructions.expect,
    )
    tma = module("tma", tensor_descriptor=None, store_wait=instructions.store_wait)
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
        zeros=instructions.zeros,
        full=lambda shape, value, dtype, layout: Tensor(np.full(shape, value)),
        max=lambda tensor, axis: int(tensor.array.max()),
        num_warps=lambda: now().warps,
        program_id=lambda axis: now().program,
        num_programs=lambda axis: machine().programs,
        allocate_shared_memory=instructions.allocate,
        warp_specialize=instructions.specialize,
        BlockedLayout=nothing,
        SliceLayout=nothing,
        SwizzledSharedLayout=nothing,
        NVMMADistributedLayout=nothing,
        NVMMASharedLayout=types.SimpleNamespace(get_default_for=nothing),
        DotOperandLayout=nothing,
        join=Tensor.join,
        convert_layout=lambda tensor, layout: tensor,
        atomic_add=instructions.atomic_add,
        atomic_cas=instructions.atomic_cas,
        atomic_xchg=instructions.atomic_xchg,
        load=lambda pointer, **masked: pointer.get(**masked),
        store=lambda pointer, value, **masked: pointer.set(value, **masked),
        arange=lambda start, end, layout: Tensor(np.arange(start, end)),
        where=where,
        minimum=lambda tensor, limit: Tensor(np.minimum(tensor.array, limit)),
        exp=lambda tensor: Tensor(np.exp(tensor.array)),
        erf=lambda tensor: Tensor(np.vectorize(math.erf)(tensor.array)),
        abs=abs,
        cast=lambda value, dtype: value,
        inline_asm_elementwise=instructions.assembly,
        multiple_of=lambda value, divisor: value,
        debug_barrier=nothing,
    )
    gluon = module("gluon", jit=_jit, constexpr_function=_same, language=language)
    hopper = module(
        "hopper",
        mbarrier=mbarrier,
        tma=tma,
        fence_async_shared=instructions.fence,
        warpgroup_mma=instructions.multiply,
        warpgroup_mma_wait=instructions.multiply_wait,
    )
    blackwell = module(
        "blackwell",
        TensorMemoryLayout=nothing,
        allocate_tensor_memory=lambda dtype, shape, layout: TensorMemory(np.full(shape, np.nan)),
        tcgen05_commit=instructions.commit,
        tcgen05_mma=instructions.tcgen05,
        tensor_memory_descriptor=None,
    )
    triton = module(
        "triton",
        jit=_jit,
        constexpr_function=_same,
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
        leave_the_core=None,  # the interpreter's
        inline_asm=inline_asm,
        is_one_warp=lambda: now().warps == 1,
        tma_load=instructions.tma_load,
        tma_store=instructions.tma_store,
        partition_barrier=lambda: None,
        reinterpret=Buffer.reinterpret,
        load_accumulator=Buffer.load,
    )
    with _in_place_of_triton():
        return importlib.import_module(f"{root}.{name}")


def launch(
    kernel: Callable[..., None],
    programs: int,
    *args: Any,
    seed: int,
    warps: int = 4,
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
        machine().start(getattr(body, "__name__", "other"), -1, 1, body)

    for number in range(programs):
        machine().start(f"program {number}", number, warps, lambda: kernel(*args, **options))
    machine().run()


def first_failure(run: Callable[[int], None], seeds: int) -> str:
    """Return how the first of so many orders of a launch fails; empty if none does."""
    for seed in range(seeds):
        try:
            run(seed)
        except (AssertionError, ZeroDivisionError) as error:
            return "deadlock" if isinstance(error, Deadlock) else str(error) or "assertion"
    return ""


def poll_without_acquiring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waits see signals and nothing of what was written before them."""
    signals = importlib.import_module("kernels_in_the_model.signals")
    add = signals.tl.atomic_add
    relaxed = type("tl", (), {**vars(signals.tl)})
    relaxed.atomic_add = staticmethod(
        lambda pointer, value, *, sem, scope: add(pointer, value, sem="relaxed", scope=scope)
    )
    monkeypatch.setattr(signals, "tl", relaxed)
