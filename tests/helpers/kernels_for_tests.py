"""Kernels whose launches are noted and whose times are scripted, so that every pick is known beforehand.

    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0})              # BLOCK of each config -> ms of a launch
    tuned = bench.tune(lambda: add_one(kernel, x))         # one sample of each config, no warm-up
    tuned()
    assert bench.blocks() == [16, 32, 32]                  # trial, trial, the final run

A kernel is a true `triton.autotune` over a true `@triton.jit` function. Between the two stands a
`Probe`, which notes the launch, fails where the test says so, and otherwise writes what the kernel
would write, grid and BLOCK respected: a wrong grid or a stale tensor is a wrong result here too. With
`interpreted=True` it hands the launch on to Triton's interpreter (8 ms instead of 20 us).
"""

import ast
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError

from dist_autotune import contextual_autotune, tunable
from dist_autotune.logs.records import read_records
from dist_autotune.triton_api.interception import INTERCEPTION


@triton.jit
def add(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask) + 1, mask=mask)


@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask) * 2, mask=mask)


@triton.jit
def accumulate(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs, tl.load(y_ptr + offs, mask=mask) + tl.load(x_ptr + offs, mask=mask), mask=mask)


EMULATIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    add: lambda x, y: x + 1,
    double: lambda x, y: x * 2,
    accumulate: lambda x, y: x + y,
}

F32 = "torch.float32"
KEY = (64, F32, F32)  # what stock Triton makes of `launch(kernel, numbers())`

Ms = float | Callable[["Launch"], float]


@dataclass
class Launch:
    """One launch that reached the kernel."""

    kernel: str
    block: int
    n: int
    grid: tuple[int, ...]
    meta: dict[str, Any]  # launch options such as num_warps
    ms: float = 0.0


class ScriptedClock:
    """Reads, of a mark, the scripted times of the launches between its start and its stop."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.marks = 0

    def start(self) -> list[int]:
        self.marks += 1
        return [len(self.launches)]

    def stop(self, mark: list[int]) -> None:
        mark.append(len(self.launches))

    def read_ms(self, mark: list[int]) -> float:
        begin, end = mark
        return sum(launch.ms for launch in self.launches[begin:end])


@dataclass
class Probe:
    """Stands between an Autotuner and its `@jit` function."""

    fn: Any
    name: str
    ms: Mapping[int, Ms]
    launches: list[Launch]
    interpreted: bool = False
    failures: dict[int, Callable[[], BaseException]] = field(default_factory=dict)  # BLOCK -> error

    @property
    def arg_names(self) -> list[str]:
        return list(self.fn.arg_names)

    @property
    def __name__(self) -> str:
        return self.name

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        block = named["BLOCK"]
        if warmup:
            return f"compiled {block}"
        size = grid(named) if callable(grid) else grid
        if block in self.failures:
            raise self.failures[block]()
        meta = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        launch = Launch(self.name, block, named["n"], tuple(size), meta)
        ms = self.ms.get(block, 1.0)
        launch.ms = ms(launch) if callable(ms) else ms
        self.launches.append(launch)
        if self.interpreted:
            return self.fn.run(*args, grid=grid, warmup=False, **kwargs)
        x, y, end = named["x_ptr"].view(-1), named["y_ptr"].view(-1), min(named["n"], math.prod(size) * block)
        y[:end] = EMULATIONS[self.fn](x[:end], y[:end])
        return None

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        return self.run(*args, grid=grid, warmup=True, **kwargs)


class Bench:
    """Kernels of one test, and the clock that knows what their launches take."""

    def __init__(self) -> None:
        self.clock = ScriptedClock()
        self.launches = self.clock.launches

    def kernel(
        self,
        ms: Mapping[int, Ms],
        function: Any = add,
        *,
        key: Sequence[str] = ("n",),
        configs: Sequence[triton.Config] | None = None,
        pre_hooks: Mapping[int, Callable[[dict[str, Any]], Any]] | None = None,
        interpreted: bool = False,
        name: str | None = None,
        probe: type[Probe] = Probe,
        **options: Any,
    ) -> Any:
        """Return an autotuned kernel with one config for each BLOCK in `ms`, in that order."""
        hooks = pre_hooks or {}
        if configs is None:
            configs = [triton.Config({"BLOCK": block}, pre_hook=hooks.get(block)) for block in ms]
        made = probe(function, name or function.__name__, ms, self.launches, interpreted)
        return triton.autotune(list(configs), list(key), **options)(made)

    def tune(self, thunk: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Decorate with this bench's clock; one sample of each config unless `options` say otherwise."""
        chosen = {"clock": self.clock, "n_warmup": 0, "n_repeat": 1, "progress": False, **options}
        decorate = contextual_autotune(**chosen)
        return decorate if thunk is None else decorate(thunk)

    def tuned(self, ms: Mapping[int, Ms], **options: Any) -> Any:
        """Return a tuned function that launches a kernel of its own once."""
        kernel = self.kernel(ms)
        return self.tune(lambda: launch(kernel, numbers()), **options)

    def choosing(self, name: str, ms: Mapping[Any, float]) -> Callable[..., Any]:
        """Return a function that asks for an option, its arguments being the key, and takes its ms."""

        def thunk(*key: Any) -> Any:
            self.spend(ms[chosen := tunable(name, [*ms], key=key)])
            return chosen

        return thunk

    def spend(self, ms: float) -> None:
        """Let the run under way take `ms` more, outside every kernel."""
        self.launches.append(Launch("", 0, 0, (), {}, ms))

    def blocks(self, kernel: str | None = None, n: int | None = None) -> list[int]:
        """Return the BLOCKs launched so far, in order."""
        chosen = [launch for launch in self.launches if launch.kernel]
        return [
            launch.block
            for launch in chosen
            if (kernel is None or launch.kernel == kernel) and (n is None or launch.n == n)
        ]

    def forget(self) -> None:
        """Drop what was noted so far."""
        self.launches.clear()


def grid_of(n: int) -> Callable[[dict[str, Any]], tuple[int]]:
    return lambda meta: (triton.cdiv(n, meta["BLOCK"]),)


def launch(kernel: Any, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Launch `kernel` on `x`; return `y`, or a new tensor that only the kernel has filled."""
    y = torch.full_like(x, -1) if y is None else y
    kernel[grid_of(x.numel())](x, y, x.numel())
    return y


def numbers(n: int = 64) -> torch.Tensor:
    return torch.arange(float(n))


def out_of_resources() -> OutOfResources:
    return OutOfResources(262144, 232448, "shared memory")


# What a config that cannot be compiled or loaded is known by.
FAILURES: dict[str, Callable[[], Exception]] = {
    "OutOfResources": out_of_resources,
    "PTXASError": lambda: PTXASError("`ptxas` failed with error code 255"),
    "CompilationError": lambda: CompilationError(
        "tl.dot(a, b)", ast.parse("x").body[0], "shapes do not match"
    ),
    "static_assert": lambda: CompileTimeAssertionFailure(None, ast.parse("x").body[0], "BLOCK too large"),
    "PassManager": lambda: RuntimeError("PassManager::run failed"),
}


def inject(bench: Bench, where: str, errors: Mapping[int, Callable[[], BaseException]]) -> Any:
    """Return a kernel whose configs fail in their pre_hook, or in the launch."""
    ms = {16: 3.0, 32: 1.0, 64: 2.0}
    if where == "launch":
        kernel = bench.kernel(ms)
        kernel.fn.failures.update(errors)
        return kernel

    def raising(block: int) -> Callable[[dict[str, Any]], None]:
        def hook(arguments: dict[str, Any]) -> None:
            raise errors[block]()

        return hook

    return bench.kernel(ms, pre_hooks={block: raising(block) for block in errors})


class Mine(Exception):
    """What the user's own code raises."""

    __notes__ = ()  # it takes none


def is_outside() -> bool:
    """Return whether no call of a tuned function is under way: launches are stock Triton's."""
    return not INTERCEPTION.calls


def no_bench(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("stock benchmarking must not happen")


def records(kind: type | None = None, directory: str | Path = ".autotune_logs", rank: int = 0) -> list[Any]:
    """Return what a rank has logged, of one kind or of all."""
    skipped: Counter[str] = Counter()
    found = list(read_records(Path(directory) / f"rank-{rank}.jsonl", skipped))
    assert not skipped
    return found if kind is None else [record for record in found if isinstance(record, kind)]


def only(report: Any) -> Any:
    """Return the one context of a report."""
    (context,) = report.contexts
    return context


def block_of(config: Any) -> int:
    return config.kwargs["BLOCK"]


def winner(context: Any) -> int:
    """Return the BLOCK that a context of a report has settled on."""
    return block_of(context.config)


def entries(cache: Path) -> list[dict[str, Any]]:
    """Return what is in the result files of a cache directory."""
    return [json.loads(path.read_text()) for path in sorted(cache.glob("*.json"))]
