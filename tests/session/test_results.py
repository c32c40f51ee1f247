"""Where results are found: in Triton's own objects, by its listeners, in the report, on disk."""

import random

import pytest
import torch
import triton
from kernels_for_tests import KEY, Probe, block_of, double, grid_of, launch, no_bench, numbers, only
from triton import knobs
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import PTXASError

from dist_autotune import CacheWarning
from dist_autotune.reports.history import load_history

HAS_LISTENER = "listener" in vars(type(knobs.autotuning))
NEEDS_LISTENER = pytest.mark.skipif(not HAS_LISTENER, reason="knobs.autotuning.listener came with Triton 3.8")


# ---- in Triton's own objects


def test_results_are_where_stock_triton_keeps_them_in_its_types(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    bench.tune(lambda: launch(kernel, numbers()))()
    assert list(kernel.cache) == [KEY]
    assert kernel.cache[KEY] is kernel.best_config is kernel.configs[1]
    assert isinstance(kernel.configs_timings, dict)
    assert kernel.configs_timings == {
        config: [ms] * 3 for config, ms in zip(kernel.configs, (3.0, 1.0, 2.0), strict=True)
    }
    assert isinstance(kernel.bench_time, float)


def test_an_autotuner_that_only_settled_calls_launch_holds_the_result_too(bench):
    kernels = [bench.kernel({16: 3.0, 32: 1.0}) for _ in range(2)]
    tuned = bench.tune(lambda place: launch(kernels[place], numbers()))
    tuned(0)
    tuned(1)
    assert block_of(kernels[1].cache[KEY]) == 32


def test_a_config_of_the_users_own_in_the_cache_is_respected(bench):
    kernel = bench.kernel({16: 1.0, 32: 3.0})
    kernel.cache[KEY] = triton.Config({"BLOCK": 8}, num_warps=1)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    assert torch.equal(tuned(), numbers() + 1)
    tuned()
    assert bench.blocks() == [8, 8]
    assert only(tuned.report).status == "cached"


def test_a_kernel_whose_results_triton_would_store_is_tuned_and_its_own_store_left_alone(bench, monkeypatch):
    monkeypatch.setattr(Autotuner, "check_disk_cache", no_bench)  # there stock Triton reads and writes them
    kernel = bench.kernel({16: 3.0, 32: 1.0}, do_bench=no_bench)
    kernel.cache_results = True  # as `cache_results=True` does, but for the interpreter
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    tuned()
    launch(kernel, numbers())  # outside: stock Triton finds the result in memory
    assert bench.blocks() == [16, 32, 32, 32, 32]
    assert kernel.cache[KEY] is kernel.configs[1]


# ---- who listens


def test_a_result_is_printed_as_stock_does(bench, kernel, monkeypatch, capsys):
    monkeypatch.setattr(knobs.autotuning, "print", True)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    printed = capsys.readouterr().out
    assert printed.startswith(f"Triton autotuning for function add,\nwith key as {KEY},\nfinished after ")
    assert f"best config selected: {kernel.configs[1]};" in printed
    tuned()
    assert capsys.readouterr().out == ""


@NEEDS_LISTENER
def test_the_listener_hears_of_every_final_result(bench, kernel, monkeypatch):
    heard = []
    monkeypatch.setattr(knobs.autotuning, "listener", lambda **event: heard.append(event))
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    tuned()
    (event,) = heard
    assert event["fn"].fn is kernel.base_fn
    assert (event["key"], event["best_config"], event["cache_hit"]) == (KEY, kernel.configs[1], False)
    assert event["configs_timings"] == kernel.configs_timings
    assert event["duration"] == kernel.bench_time
    heard.clear()
    fresh = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(fresh, numbers()))()
    (event,) = heard
    assert (event["cache_hit"], event["duration"], block_of(event["best_config"])) == (True, None, 32)


# ---- the report and what is settled


def noisy(ms):
    """Return samples of this median that spread by 30 %."""
    numbers = random.Random(int(100 * ms))
    return lambda made: ms * numbers.uniform(0.85, 1.15)


@pytest.mark.parametrize(
    ("ms", "why"),
    [
        ({16: 1.005, 32: 1.0}, "a tie within 1 %, to the first"),
        ({16: noisy(1.02), 32: noisy(1.0)}, "within the noise of "),
        ({16: 2.0, 32: 1.0}, ""),
    ],
    ids=["tie", "noise", "much faster"],
)
def test_a_winner_that_is_not_the_fastest_in_its_table_says_why(bench, ms, why):
    tuned = bench.tuned(ms, n_repeat=None, n_warmup=None)
    tuned()
    context = only(tuned.report)
    assert (context.not_fastest.startswith(why), bool(context.not_fastest)) == (True, bool(why))
    assert (f"The winner is not the fastest of {context.label}: {why}" in str(tuned.report)) == bool(why)


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_the_report_has_the_contexts_of_earlier_sessions_too(bench, kernel, mode):
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)), mode=mode)
    for n in (8, 16, 24):
        for _ in range(6):
            tuned(n)
    report = tuned.report
    assert [context.label for context in report.contexts] == [only(report).label]
    assert [context.label.partition(",")[0] for context in report.earlier] == ["add[16", "add[8"]
    assert all(block_of(context.config) == 32 and context.timings for context in report.earlier)
    text = str(report)
    assert (
        text.index("add[24") < text.index("Of earlier sessions") < text.index("add[16") < text.index("add[8")
    )


# ---- what the next process finds on disk, and what it must not use


def test_a_directory_that_cannot_be_written_is_one_warning_and_tuning_works(bench, kernel, tmp_path):
    (tmp_path / "file").write_text("")
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)), cache=tmp_path / "file")
    with pytest.warns(
        CacheWarning, match="Cannot write the cache .* Winners are not kept on disk."
    ) as caught:
        tuned(64)
    assert len(caught) == 1
    for n in (64, 128, 128):  # a second warning would be an error
        tuned(n)
    assert bench.blocks(n=64) == [16, 32, 32, 32]
    assert bench.blocks(n=128) == [32, 32, 16, 32, 32]  # the call that meets it tunes it
    other = bench.kernel({16: 3.0, 32: 1.0}, function=double)
    bench.tune(lambda: launch(other, numbers()), cache=tmp_path / "file")()  # nor does this one warn


@triton.jit
def scaled(x_ptr, y_ptr, n, GROUP: triton.language.constexpr, BLOCK: triton.language.constexpr):
    pass


class Scaled(Probe):
    def run(self, *args, GROUP, **kwargs):
        return Probe(double, "double", self.ms, self.launches).run(*args, **kwargs)


def test_names_and_directories_that_are_no_utf_8_are_told_with_escapes(bench, tmp_path):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    kernel.fn.failures[64] = lambda: PTXASError("in /tmp/caf\udce9")
    places = {"name": "caf\udce9.py", "cache": tmp_path / "caf\udce9", "log_dir": tmp_path / "caf\udce9 too"}
    for _ in range(2):
        tuned = bench.tune(lambda: launch(kernel, numbers()), **places)
        tuned()
    assert (tuned.report.function, only(tuned.report).status) == ("caf\\udce9.py", "cached")
    assert load_history(places["log_dir"]).sessions


def test_an_entry_holds_for_its_constexpr_arguments_only(bench):
    def start(group):
        bench.forget()
        kernel = bench.kernel({16: 3.0, 32: 1.0}, scaled, name="scaled", probe=Scaled)
        bench.tune(lambda: kernel[grid_of(64)](numbers(), numbers(), 64, GROUP=group))()
        return bench.blocks()

    assert start(8) == [16, 32, 32]
    assert start(4) == [16, 32, 32]
    assert start(8) == [32]
