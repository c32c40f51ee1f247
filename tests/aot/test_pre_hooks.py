"""Configs with a `pre_hook` are compiled and loaded before they are tried, as the hook leaves the arguments.

The compiler is real, the device pretended. The kernel compiles only if its descriptor has its config's block.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from candidates import Preflight, arrive, banned, tuned
from candidates import preflight as preflight_launch
from gemm_runs import multiply
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.common.pretended_device import PretendedDevice
from dist_autotune.compilation import pre_hooks
from dist_autotune.compilation import preflight as compiling
from dist_autotune.kernels.compat import GluonASTSource
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.triton_api.launch import Launch
from ranks import assert_all_ok, run_ranks

FIRST, GOOD, TOO_LARGE, ABORTS = 16, 32, 128, 64
SMALLEST = [8, 8]  # the block that a descriptor is made with: no config's

Hook = Callable[[dict[str, Any]], Any]


@triton.jit
def twice(x_desc, y_ptr, BLOCK: tl.constexpr, ABORT: tl.constexpr):
    tl.static_assert(x_desc.block_shape[0] == BLOCK, "not the config's block")
    offs = tl.arange(0, BLOCK)
    if ABORT:
        # No register of the GPU is of class q: LLVM's code generator fails an assertion of its own.
        bad = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=q,q", [offs], tl.int32, is_pure=True, pack=1)
        tl.store(y_ptr + offs, bad)
    else:
        x = x_desc.load([0, 0])
        tl.store(y_ptr + offs, tl.sum(tl.dot(x, tl.trans(x)), axis=1))


def set_blocks(nargs: dict[str, Any]) -> None:
    nargs["x_desc"].block_shape = [nargs["BLOCK"]] * 2


def kernel(*blocks: int, hooks: dict[int, Hook] | None = None) -> Any:
    hooks = {} if hooks is None else hooks
    configs = [
        triton.Config({"BLOCK": b, "ABORT": b == ABORTS}, pre_hook=hooks.get(b, set_blocks)) for b in blocks
    ]
    return triton.autotune(configs, [])(twice)


def then_set(does: Hook) -> Hook:
    """Return a hook that does something besides setting the blocks."""

    def hook(nargs: dict[str, Any]) -> None:
        does(nargs)
        set_blocks(nargs)

    return hook


def arguments() -> tuple[TensorDescriptor, torch.Tensor]:
    """Return a descriptor, and an output in shared memory that is only aligned to its elements."""
    x = torch.zeros(256, 256, dtype=torch.float16)
    return TensorDescriptor.from_tensor(x, list(SMALLEST)), torch.ones(257).share_memory_()[1:]


@pytest.fixture
def fresh(device: Any, compiler: Any) -> Iterator[Any]:
    """Give the pretended device, with nothing compiled."""
    yield device
    forget()


def forget() -> None:
    twice.device_caches.clear()
    gc.collect()


def tuned_kernel(tuner: Any, **options: Any) -> Any:
    args = arguments()
    return tuned(lambda: tuner[(1,)](*args), **options)


def preflight(tuner: Any, *args: Any, **options: Any) -> Preflight:
    return preflight_launch(tuner, *(args or arguments()), **options)


# ---- what is compiled


def test_each_binary_is_compiled_once_in_a_child_and_what_fails_costs_only_its_config(fresh, compiler):
    function = tuned_kernel(kernel(FIRST, ABORTS, TOO_LARGE, GOOD))
    function()
    reasons = banned(function)
    assert reasons.keys() == {ABORTS, TOO_LARGE}
    assert reasons[ABORTS].startswith("rank 0: the compiler was ended by SIGABRT: ")
    assert "out of resource: shared memory" in reasons[TOO_LARGE]
    assert sorted(compiler.compilations()) == sorted([FIRST, ABORTS, TOO_LARGE, GOOD])
    assert compiler.compiled_here() == [FIRST]  # of the first run, which is not preflighted
    assert {constants["BLOCK"] for constants in fresh.launched} == {FIRST, GOOD}


def test_the_candidates_of_the_gluon_gemm_are_compiled_in_children_and_found_by_their_launches(
    monkeypatch, tmp_path
):
    notes = tmp_path / "compilations"
    make_ir = GluonASTSource.make_ir

    def noted(source: Any, *args: Any, **kwargs: Any) -> Any:
        with notes.open("a") as file:
            file.write(f"{os.getpid()} {source.signature['a_desc']}\n")
        return make_ir(source, *args, **kwargs)

    device, tuner = PretendedDevice(), launching.tuned_gemm
    monkeypatch.setattr(GluonASTSource, "make_ir", noted)
    monkeypatch.setattr(driver, "_active", device)
    monkeypatch.setattr(compiling, "current_device", lambda: 0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    sides = (
        {"BLOCK_M": 64, "BLOCK_N": 64},
        {"BLOCK_M": 64, "BLOCK_N": 128},
        {"BLOCK_M": 128, "BLOCK_N": 128},
    )
    pipelined = [config for config in tuner.configs if config.kwargs["VARIANT"] == "pipelined"]
    configs = [next(c for c in pipelined if side.items() <= c.kwargs.items()) for side in sides]
    monkeypatch.setattr(tuner, "configs", configs)
    monkeypatch.setattr(tuner, "cache", {})
    triton.compiler.compiler.max_shared_mem.cache_clear()
    launching.gemm.device_caches.clear()
    a, b, out = (torch.zeros(shape, dtype=torch.float16) for shape in ((576, 320), (320, 448), (576, 448)))
    function = tuned(lambda: multiply(a, b, out, "pipelined"))
    function()
    triton.compiler.compiler.max_shared_mem.cache_clear()
    launching.gemm.device_caches.clear()
    (context,) = function.report.contexts
    assert (context.status, context.banned, len(context.timings)) == ("tuned", {}, 3)
    assert {constants["BLOCK_N"] for constants in device.launched} == {64, 128}
    compiled = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    assert len({signature for _, signature in compiled}) == len(compiled) == 3
    assert [int(pid) == os.getpid() for pid, _ in compiled] == [True, False, False]


# ---- what is left alone


def test_the_hook_runs_once_a_launch_and_never_else(fresh, compiler):
    calls: list[int] = []
    hooks = {block: then_set(lambda nargs: calls.append(nargs["BLOCK"])) for block in (FIRST, GOOD)}
    assert preflight(kernel(FIRST, GOOD, hooks=hooks)).counts.compiled == 2
    assert calls == []
    forget()
    tuned_kernel(kernel(FIRST, GOOD, hooks=hooks))()
    assert calls == [constants["BLOCK"] for constants in fresh.launched]


def test_a_hook_that_zeroes_an_output_touches_no_output(fresh):
    hook = then_set(lambda nargs: (nargs["y_ptr"].zero_(), nargs["x_desc"].base.fill_(3.0)))
    x = torch.ones(256, 256, dtype=torch.float16).share_memory_()  # a child could write to it
    y = torch.ones(256).share_memory_()
    tuner = kernel(GOOD, hooks={GOOD: hook})
    found = preflight(tuner, TensorDescriptor.from_tensor(x, list(SMALLEST)), y)
    assert (found.reasons, found.counts.compiled) == ({}, 1)
    assert bool((x == 1).all())
    assert bool((y == 1).all())


# ---- hooks of which nothing can be told


def wait_for_a_flag(nargs: dict[str, Any]) -> None:
    while True:
        time.sleep(1)


UNTOLD: dict[str, tuple[Hook, str]] = {
    "raises": (lambda nargs: nargs["no such argument"], "KeyError: 'no such argument'"),
    "opens a file": (lambda nargs: Path("calls").write_text("called"), "OSError"),
    "keeps what has no name": (lambda nargs: setattr(nargs["x_desc"], "more", lambda: None), "ickle"),
    "crashes": (lambda nargs: os.abort(), "the hook was ended by SIGABRT"),
    "never ends": (wait_for_a_flag, "the hook did not end within 1 s"),
}


@pytest.mark.parametrize(("does", "why"), UNTOLD.values(), ids=UNTOLD)
def test_a_config_whose_hook_cannot_be_told_is_tuned_at_its_launch(fresh, compiler, monkeypatch, does, why):
    monkeypatch.setattr(pre_hooks, "LIMIT_S", 1.0 if does is wait_for_a_flag else 60.0)
    here = os.getpid()

    def hook(nargs: dict[str, Any]) -> None:
        if os.getpid() != here:
            does(nargs)
        set_blocks(nargs)

    tuner = kernel(FIRST, GOOD, hooks={GOOD: hook})
    function = tuned_kernel(tuner, log_dir=str(Path("logs").resolve()))
    function()
    assert banned(function) == {}
    assert compiler.compiled_here() == [FIRST, GOOD]
    assert {constants["BLOCK"] for constants in fresh.launched} == {FIRST, GOOD}
    text = Path("logs/rank-0.log").read_text()
    assert text.count("1 candidate left to the first launch, as pre_hook could not be rehearsed: ") == 1
    assert why in text
    assert not Path("calls").exists()


# ---- several ranks


@pytest.mark.parametrize("is_same", [True, False], ids=["same hook", "another hook"])
def test_a_rank_finds_the_binary_of_the_arguments_that_its_own_hook_has_made(
    fresh, compiler, tmp_path, is_same
):
    def program(rank: int) -> str:
        def hook(nargs: dict[str, Any]) -> None:
            nargs["x_desc"].block_shape = [GOOD, GOOD if is_same else GOOD >> rank]

        tuner, args = kernel(GOOD, hooks={GOOD: hook}), arguments()
        arrive(tmp_path, rank, 2)
        assert preflight(tuner, *args, local_rank=rank, local_ranks=2).reasons == {}
        launch = Launch(tuner, args, {})
        launch.run_pre_hook(tuner.configs[0])
        compiled = launch.compile(tuner.configs[0])
        assert compiler.compiled_here() == []  # it was there
        return str(compiled.src.signature["x_desc"])

    other = "tensordesc<fp16[32, 32]>" if is_same else "tensordesc<fp16[32, 16]>"
    assert assert_all_ok(run_ranks(program, 2, init="none")) == ["tensordesc<fp16[32, 32]>", other]
