"""A kernel some of whose configs do not compile, and a compiler that can be made to misbehave."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from process_states import has_ended
from triton.compiler.compiler import ASTSource

from dist_autotune import ContextualAutotuner, contextual_autotune
from dist_autotune.compilation.compiler import CompileCounts, CompileOptions, CompileState
from dist_autotune.compilation.compiler import Compiler as RankCompiler
from dist_autotune.triton_api.launch import Launch

GOOD, ASSERTED, TOO_LARGE, ABORTS = 16, 32, 128, 256
ENDLESS = 32  # where the compiler is told to spin: it does so before it meets the assertion


@triton.jit
def square(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK != 32, "no block of 32")
    if BLOCK == 256:
        offs = tl.arange(0, BLOCK)
        # No register of the GPU is of class q: LLVM's code generator fails an assertion of its own.
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=q,q", [offs], tl.int32, is_pure=True, pack=1)
        tl.store(y_ptr + offs, x)
    else:
        offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + offs)
        tl.store(y_ptr + offs, tl.dot(x, x))


@triton.jit
def shifted(x_ptr, y_ptr, shift, FORM: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(not (FORM == "bad" and BLOCK == 64), "no block of 64 in this form")
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    if shift is not None:
        x += shift
    tl.store(y_ptr + offs, x)


def kernel(*blocks: int) -> Any:
    return triton.autotune([triton.Config({"BLOCK": block}) for block in blocks], [])(square)


def kernel_of_forms(*blocks: int) -> Any:
    """Return a kernel whose key has neither `shift` nor `FORM`."""
    return triton.autotune([triton.Config({"BLOCK": block}) for block in blocks], [])(shifted)


def tuned(function: Callable[[], Any], **options: Any) -> ContextualAutotuner[..., Any]:
    """Return a function that tries each candidate once and writes nothing, save what `options` say."""
    chosen = {"n_warmup": 0, "n_repeat": 1, "log_dir": None, "cache": False, "progress": False}
    return contextual_autotune(function, **chosen | options)


def tuned_kernel(kernel: Any, **options: Any) -> ContextualAutotuner[..., Any]:
    """Return a tuned function of one launch."""
    x, y = torch.zeros(1, dtype=torch.float16), torch.zeros(1)
    return tuned(lambda: kernel[(1,)](x, y), **options)


def settle(function: Any, deadline_s: float = 100.0) -> None:
    """Call until nothing is left to try."""
    deadline = time.monotonic() + deadline_s
    function()
    while not function.settled:
        assert time.monotonic() < deadline
        time.sleep(10e-3)  # shorter steps take the time that compilers need
        function()


def banned(function: Any) -> dict[int, str]:
    """Return why candidates are banned, by their BLOCK."""
    return {
        int(text.split(",")[0].removeprefix("BLOCK: ")): why
        for context in function.report.contexts
        for text, why in context.banned.items()
    }


@dataclass
class Preflight:
    """What compiling and loading the candidates of a launch has shown."""

    reasons: dict[str, str]
    counts: CompileCounts


@dataclass(eq=False)
class _Context:
    """What the compiler asks of a context."""

    name: str = "a"
    bans: dict[str, str] = field(default_factory=dict)
    compile: CompileState = field(default_factory=CompileState)


def preflight(tuner: Any, *args: Any, **options: Any) -> Preflight:
    """Compile and load all candidates of a launch, as a rank does that waits for them."""
    context, launch = _Context(), Launch(tuner, args, {"grid": (1,), "warmup": False})
    no_guard = lambda context, candidate: contextlib.nullcontext()  # noqa: E731
    compiler = RankCompiler(CompileOptions(**options), no_guard)
    compiler.want(context, launch, launch.candidates())
    ((_, counts),) = compiler.advance(math.inf)
    return Preflight(context.bans, counts)


def arrive(directory: Path, rank: int, ranks: int, deadline_s: float = 60.0) -> None:
    """Wait until all ranks are here."""
    (directory / f"arrived-{rank}").touch()
    deadline = time.monotonic() + deadline_s
    while len(list(directory.glob("arrived-*"))) < ranks:
        assert time.monotonic() < deadline, "a rank is missing"
        time.sleep(1e-3)


class Compiler:
    """Triton's own, which notes what it compiles in a file, and misbehaves where it is told to."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.gate = notes.with_suffix(".gate")
        self.manners: dict[int, str] = {}
        self._make_ir = ASTSource.make_ir
        notes.touch()

    def behaves(self, manners: dict[int, str]) -> None:
        """Set what happens by BLOCK: "spin", "sleep", "exit", "raise", or "wait" until `let_go`."""
        self.manners = manners

    def let_go(self) -> None:
        """End the waiting of those that were told to wait."""
        self.gate.touch()

    def stand_in(self) -> Any:
        """Return what to put in place of `ASTSource.make_ir`, which runs for every compilation."""

        def make_ir(source: ASTSource, *args: Any, **kwargs: Any) -> Any:
            constants = {source.fn.arg_names[path[0]]: value for path, value in source.constants.items()}
            block = constants["BLOCK"]
            with self.notes.open("a") as file:
                file.write(f"{os.getpid()} {block}\n")
            self.misbehave(self.manners.get(block, ""))
            return self._make_ir(source, *args, **kwargs)

        return make_ir

    def misbehave(self, manner: str) -> None:
        while manner == "wait" and not self.gate.exists():
            time.sleep(5e-3)
        if manner == "spin":
            while True:
                pass
        if manner == "sleep":
            while True:
                signal.pause()
        if manner == "exit":
            os._exit(3)
        if manner == "raise":
            raise TypeError("an error of the user's")

    def compilations(self) -> list[int]:
        """Return the BLOCK of each compilation that has begun, in all processes."""
        return [int(line.split()[1]) for line in self.notes.read_text().splitlines()]

    def compiled_here(self) -> list[int]:
        """Return the BLOCK of each compilation that this process has begun."""
        lines = map(str.split, self.notes.read_text().splitlines())
        return [int(block) for pid, block in lines if int(pid) == os.getpid()]

    def pids(self) -> set[int]:
        return {int(line.split()[0]) for line in self.notes.read_text().splitlines()}

    def wait_for(self, block: int, deadline_s: float = 60.0) -> None:
        """Return when some process compiles `block`."""
        deadline = time.monotonic() + deadline_s
        while block not in self.compilations():
            assert time.monotonic() < deadline, f"nobody compiles {block}"
            time.sleep(5e-3)

    def processes_left(self, deadline_s: float = 30.0) -> list[int]:
        """Return the compiling processes, this one apart, that are still there at the deadline."""
        deadline = time.monotonic() + deadline_s
        while left := [pid for pid in self.pids() - {os.getpid()} if not has_ended(pid)]:
            if time.monotonic() > deadline:
                break
            time.sleep(5e-3)
        return left
