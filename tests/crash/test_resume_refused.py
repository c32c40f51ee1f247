"""What a crashed session has left and the next one must not go by: other kernels, old or damaged journals."""

import os
import signal
import time

import pytest
import torch
import triton
import triton.language as tl
from crash_programs import EXHAUSTIVE, MS, alone, die, journals, program, scripted, summary, value_of
from kernels_for_tests import EMULATIONS, Bench, double, launch, numbers

from dist_autotune import CacheWarning
from dist_autotune.storage import journal


@triton.jit
def shifted(x_ptr, y_ptr, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=mask) + SHIFT, mask=mask)


EMULATIONS[shifted] = lambda x, y: x + 1


def test_samples_of_another_kernel_source_are_ignored(tmp_cache):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    second = value_of(program, None, EXHAUSTIVE, MS, double)
    assert second["blocks"] == [16] * 3 + [32] * 3 + [64] * 4
    assert second["banned"] == {}
    assert second["warning"] == ""
    assert journals(tmp_cache) == []


def test_samples_and_bans_are_ignored_when_the_configs_have_changed(tmp_cache):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    second = value_of(program, None, EXHAUSTIVE, {16: 3.0, 64: 1.0})
    assert second["blocks"] == [16] * 3 + [64] * 4
    assert second["banned"] == {}
    assert journals(tmp_cache) == []


def test_samples_of_other_constants_are_ignored(tmp_cache):
    def shift(rank, by, dies):
        bench, x = Bench(), numbers()
        kernel = bench.kernel(
            scripted(bench, MS, {(64, 1): lambda: die(signal.SIGKILL)} if dies else {}), shifted
        )

        def thunk():
            kernel[(4,)](x, torch.empty_like(x), x.numel(), SHIFT=by)

        step = bench.tune(thunk, **EXHAUSTIVE)
        step()
        return summary(bench, step)

    everything = [16] * 3 + [32] * 3 + [64] * 4
    assert alone(shift, 1, True).signal == signal.SIGKILL
    assert value_of(shift, 2, False)["blocks"] == everything
    assert alone(shift, 3, True).signal == signal.SIGKILL
    assert value_of(shift, 3, False)["blocks"] == [32]


def test_what_is_older_than_a_day_is_ignored_and_deleted(tmp_cache):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    (path,) = journals(tmp_cache)
    old = time.time() - journal.MAX_AGE_S - 60
    os.utime(path, (old, old))
    assert value_of(program)["blocks"] == [16] * 3 + [32] * 3 + [64] * 4
    assert journals(tmp_cache) == []


def test_retune_ignores_it(tmp_cache):
    def retuned(rank, dies):
        bench, x = Bench(), numbers()
        kernel = bench.kernel(scripted(bench, MS, {(64, 1): lambda: die(signal.SIGKILL)} if dies else {}))

        def thunk():
            return launch(kernel, x)

        step = bench.tune(thunk, **EXHAUSTIVE)
        if not dies:
            step.retune()
        step()
        return summary(bench, step)

    assert alone(retuned, True).signal == signal.SIGKILL
    assert value_of(retuned, False)["blocks"] == [16] * 3 + [32] * 3 + [64] * 4
    assert journals(tmp_cache) == []


def test_a_line_cut_short_is_left_out(tmp_cache):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    (path,) = journals(tmp_cache)
    whole = path.read_bytes().splitlines(keepends=True)
    assert b'"tries"' in whole[-1]
    path.write_bytes(
        b"".join(whole[:-1]) + whole[-1][:40]
    )  # what the seventh run tried: 64, for the first time
    second = value_of(program)
    assert second["blocks"] == [16] + [64] * 4  # a process's first run is no trial
    assert second["banned"] == {}  # what the run before had tried is not to blame


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text.replace('"merged"', '"merged', 1), "damaged journal"),
        (lambda text: text.replace('"schema":1', '"schema":99', 1), "schema 99, expected 1"),
        (lambda text: "", "damaged journal"),
        (lambda text: "[]\n[]\n", "damaged journal"),
        (lambda text: text.replace('"entries":{"', '"entries":["', 1), "damaged journal"),
        (lambda text: text + "[" * 5000 + "\n", "damaged journal"),
    ],
    ids=["a broken line", "another schema", "empty", "no objects", "another type", "endless nesting"],
)
def test_a_damaged_journal_is_a_warning_with_its_path_and_tuning_begins_anew(tmp_cache, damage, reason):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    (path,) = journals(tmp_cache)
    path.write_text(damage(path.read_text()))

    def warned(rank):
        with pytest.warns(CacheWarning, match=f"Ignored and deleted {path}: {reason}") as caught:
            found = program(rank)
        return found["blocks"], len(caught)

    assert value_of(warned) == ([16] * 3 + [32] * 3 + [64] * 4, 1)
    assert journals(tmp_cache) == []


def test_a_journal_that_makes_no_sense_is_a_note_and_tuning_begins_anew(tmp_cache):
    assert alone(program, {(64, 1): lambda: die(signal.SIGKILL)}).signal == signal.SIGKILL
    (path,) = journals(tmp_cache)
    path.write_text(path.read_text().replace('"order":[[', '"disorder":[[', 1))
    second = value_of(program)
    assert second["blocks"] == [16] * 3 + [32] * 3 + [64] * 4
    assert any("cannot be taken up (" in note for note in second["notes"])
    assert journals(tmp_cache) == []
