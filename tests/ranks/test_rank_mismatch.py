"""Ranks that do not run the same thing are told so, all of them: options, versions, functions, kernels."""

import importlib.util
import os
from pathlib import Path

import pytest
import triton
from kernels_for_tests import Bench, launch, numbers
from operation_runs import on_ranks
from rank_programs import SHORT_S, ending, tune, tune_on_disk

import dist_autotune.tuner.function_state
from dist_autotune import RankMismatch
from ranks import assert_all_ok, meet, run_ranks

MS = {16: 1.0, 32: 3.0, 64: 2.0}


@pytest.mark.parametrize(
    ("name", "options", "values"),
    [
        ("n_repeat", ({}, {"n_repeat": 2}), ("1", "2")),
        ("overhead", ({}, {"overhead": 0.3}), ("None", "0.3")),
        ("search", ({"n_repeat": None, "n_warmup": None}, {"search": "racing"}), ("auto", "racing")),
    ],
)
@on_ranks(3)
def test_options_that_differ(rank, name, options, values):
    changed = options[0] | (options[1] if rank == 2 else {})
    text = ending(lambda: tune_on_disk(rank, MS, **{"n_repeat": 1, **changed}))
    told = f"ranks differ in the option {name}: rank 0: {values[0]}; rank 2: {values[1]}. All ranks must"
    assert text.startswith(f"RankMismatch: {told} run")


@pytest.mark.parametrize(
    ("what", "replace"),
    [
        ("the version of dist_autotune", (dist_autotune.tuner.function_state, "__version__", "0.0.0")),
        ("the version of Triton", (triton, "__version__", "3.5.9")),
        ("DIST_AUTOTUNE_MODE", (os.environ, "DIST_AUTOTUNE_MODE", "cached")),
    ],
    ids=["package", "triton", "mode"],
)
def test_versions_that_differ(what, replace, monkeypatch):
    def program(rank):
        if rank == 1:
            where, name, value = replace
            (monkeypatch.setitem if where is os.environ else monkeypatch.setattr)(where, name, value)
        with pytest.raises(RankMismatch, match=f"ranks differ in {what}: rank 0: .*; rank 1: ") as caught:
            tune_on_disk(rank, MS)
        return str(caught.value)

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one


@on_ranks(2)
def test_functions_of_different_source_or_name(rank):
    bench, x = Bench(), numbers()
    kernel = bench.kernel(MS)

    def one(x):
        return launch(kernel, x)

    def other(x):
        return 0 + launch(kernel, x)

    meet()
    by_name = ending(lambda: tune(bench, other if rank else one, timeout_s=3 * SHORT_S)(x))
    by_source = ending(lambda: tune(bench, other if rank else one, name="step")(x))
    assert by_name.startswith("RankMismatch: ranks differ in the tuned function: rank 0: ")
    assert by_source.startswith("RankMismatch: ranks differ in the source of the tuned function: ")


@on_ranks(3)
def test_ranks_that_come_too_late_for_each_other_hear_who_was_missing(rank):
    bench, x = Bench(), numbers()
    kernel = bench.kernel(MS)
    step = tune(bench, lambda: launch(kernel, x), name="step", timeout_s=SHORT_S)
    found = ""
    for late in range(3):
        if late == rank:
            found = ending(step)
        meet()
    assert found.startswith("AgreementTimeout: Rank 0 waited 1 s for ranks [1, 2] to agree")


@on_ranks(2)
def test_functions_of_one_name_are_told_apart_by_their_number(rank):
    bench = Bench()

    def thunk():
        raise ValueError

    steps = [tune(bench, thunk, name="step", timeout_s=3 * SHORT_S) for _ in range(2)]
    ending(steps[0])
    meet()
    found = ending(steps[rank])
    assert found.startswith("RankMismatch: ranks differ in the tuned function: ")
    assert "rank 0: step; rank 1: step (number 2 of that name)" in found


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale(x):
    return x + {one}

@triton.jit
def bump(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, scale(tl.load(x_ptr + offs, mask=offs < n)) + {two}, mask=offs < n)
"""


def bump_of(rank, one, two):
    """Return the `@jit` function of a module that has another version on every rank."""
    path = Path(f"host-{rank}/bump_module.py").absolute()
    path.parent.mkdir()
    path.write_text(KERNEL.format(one=one, two=two))
    spec = importlib.util.spec_from_file_location("bump_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.bump


@pytest.mark.parametrize("where", ["kernel", "helper"])
@pytest.mark.parametrize("late", [False, True], ids=["same run", "another run"])
def test_kernels_of_different_source(where, late):
    def program(rank):
        bench, x, runs = Bench(), numbers(), []
        function = bump_of(rank, one=rank if where == "helper" else 0, two=rank if where == "kernel" else 0)
        kernel = bench.kernel({16: 1.0, 32: 2.0}, function, interpreted=True)
        common = bench.kernel({16: 1.0, 32: 2.0, 64: 3.0})

        def thunk():
            runs.append(None)
            launch(common, x)
            if rank == 0 or len(runs) > 1 or not late:
                launch(kernel, x)

        return ending(tune(bench, thunk))

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    name = "bump" if where == "kernel" else "scale"
    assert zero.startswith(f"RankMismatch: ranks differ in the source of kernel bump_module.{name}: rank 0: ")
