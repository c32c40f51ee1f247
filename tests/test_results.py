"""Where results are kept and found again: Triton's own objects, the disk, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.autotuner import Autotuner

from dist_autotune import CacheWarning, tunable
from dist_autotune.records import ContextSettled, SessionClosed, SessionOpened
from kernels_for_tests import (
    EMULATIONS,
    Bench,
    Probe,
    double,
    grid_of,
    launch,
    numbers,
    only,
    out_of_resources,
    records,
)

F32 = "torch.float32"
KEY = (64, F32, F32)
HAS_LISTENER = "listener" in vars(type(knobs.autotuning))
NEEDS_LISTENER = pytest.mark.skipif(not HAS_LISTENER, reason="knobs.autotuning.listener came with Triton 3.8")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def block_of(config: Any) -> int:
    return config.kwargs["BLOCK"]


def no_bench(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("stock benchmarking must not happen")


def entries(cache: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(cache.glob("*.json"))]


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


def test_a_launch_outside_the_function_uses_the_result(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, do_bench=no_bench)
    bench.tune(lambda: launch(kernel, numbers()))()
    bench.forget()
    assert torch.equal(launch(kernel, numbers()), numbers() + 1)
    assert bench.blocks() == [32]


def test_a_key_first_met_in_a_settled_call_is_not_timed(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)))
    tuned(64)
    marks = bench.clock.marks
    tuned(128)
    assert bench.clock.marks == marks


def test_a_key_first_met_in_a_settled_call_is_left_to_the_next_session_not_to_stock_benchmarking(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, do_bench=no_bench)
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)))
    tuned(64)
    tuned(128)
    assert bench.blocks(n=128) == [16]


def test_a_kernel_pruned_to_one_config_has_it_in_the_cache(bench):
    pruning = {"early_config_prune": lambda configs, args, **kwargs: configs[1:]}
    kernel = bench.kernel({16: 1.0, 32: 2.0}, prune_configs_by=pruning, do_bench=no_bench)
    bench.tune(lambda: launch(kernel, numbers()))()
    launch(kernel, numbers())
    assert bench.blocks() == [32, 32]


def test_a_key_already_in_the_cache_is_respected(bench):
    kernel = bench.kernel({16: 1.0, 32: 3.0})
    kernel.cache[KEY] = kernel.configs[1]
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    assert bench.blocks() == [32]
    assert bench.clock.marks == 0
    assert (only(tuned.report).status, tuned.report.runs) == ("cached", 1)


def test_a_config_of_the_users_own_in_the_cache_is_respected(bench):
    kernel = bench.kernel({16: 1.0, 32: 3.0})
    kernel.cache[KEY] = triton.Config({"BLOCK": 8}, num_warps=1)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    assert torch.equal(tuned(), numbers() + 1)
    tuned()
    assert bench.blocks() == [8, 8]
    assert only(tuned.report).status == "cached"


def test_what_stock_benchmarking_found_is_respected_and_left_as_it_is(bench):
    times = {16: 5.0, 32: 0.5}

    def do_bench(call, quantiles):
        call()
        return [times[bench.blocks()[-1]]] * 3

    kernel = bench.kernel({16: 1.0, 32: 3.0}, do_bench=do_bench)
    launch(kernel, numbers())
    timings, bench_time = kernel.configs_timings, kernel.bench_time
    bench.forget()
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    assert bench.blocks() == [32]
    assert kernel.configs_timings is timings
    assert kernel.bench_time == bench_time


def test_a_provisional_result_is_used_but_not_respected(bench):
    kernel = bench.kernel({16: 3.0, 32: 2.0, 64: 1.0}, do_bench=no_bench)
    first = bench.tune(lambda: launch(kernel, numbers()), max_runs=3)
    first()
    assert only(first.report).status == "partial"
    assert block_of(kernel.cache[KEY]) == 32
    bench.forget()
    second = bench.tune(lambda: launch(kernel, numbers()))
    second()
    assert bench.blocks() == [16, 32, 64, 64]
    assert only(second.report).status == "tuned"


def test_two_functions_share_what_one_has_found(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, numbers()), name="one")()
    bench.forget()
    other = bench.tune(lambda: launch(kernel, numbers()), name="other")
    other()
    assert bench.blocks() == [32]
    assert only(other.report).status == "cached"


def test_without_sharing_each_function_has_its_own_winner(bench):
    fast = {"one": 16, "other": 32}
    now = []
    kernel = bench.kernel(
        {block: lambda made: 1.0 if made.block == fast[now[-1]] else 2.0 for block in (16, 32)}
    )

    def body():
        launch(kernel, numbers())

    def thunk(name):
        return bench.tune(body, name=name, share=False)

    one, other = thunk("one"), thunk("other")
    for name, tuned in (("one", one), ("other", other)) * 2:
        now.append(name)
        tuned()
        assert bench.blocks()[-1] == fast[name]
    bench.forget()
    for name in ("one", "other"):  # and each finds its own on the disk
        now.append(name)
        fresh = thunk(name)
        fresh()
        assert only(fresh.report).status == "cached"
    assert bench.blocks() == [16, 32]


def test_without_sharing_functions_of_one_name_are_told_apart_by_their_source(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    one = bench.tune(lambda: launch(kernel, numbers()), share=False)
    other = bench.tune(lambda: [launch(kernel, numbers())], share=False)
    assert one.__qualname__ == other.__qualname__
    one()
    other()
    assert bench.blocks() == [16, 32, 32] * 2


@pytest.mark.parametrize("shares_first", [True, False], ids=["shared first", "own first"])
def test_what_belongs_to_one_function_alone_is_neither_given_nor_taken(bench, shares_first):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    for share in (shares_first, not shares_first):
        bench.forget()
        tuned = bench.tune(lambda: launch(kernel, numbers()), share=share, name="one")
        tuned()
        assert only(tuned.report).status == "tuned"
        assert bench.blocks() == [16, 32, 32]


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


def test_a_result_is_printed_as_stock_does(bench, monkeypatch, capsys):
    monkeypatch.setattr(knobs.autotuning, "print", True)
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    printed = capsys.readouterr().out
    assert printed.startswith(f"Triton autotuning for function add,\nwith key as {KEY},\nfinished after ")
    assert f"best config selected: {kernel.configs[1]};" in printed
    tuned()
    assert capsys.readouterr().out == ""


def test_nothing_is_printed_unless_asked_for(bench, capsys):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, numbers()))()
    assert capsys.readouterr().out == ""


@NEEDS_LISTENER
def test_the_listener_hears_of_every_final_result(bench, monkeypatch):
    heard = []
    monkeypatch.setattr(knobs.autotuning, "listener", lambda **event: heard.append(event))
    kernel = bench.kernel({16: 3.0, 32: 1.0})
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


@NEEDS_LISTENER
def test_the_listener_hears_nothing_of_what_is_provisional_or_was_known(bench, monkeypatch):
    heard = []
    monkeypatch.setattr(knobs.autotuning, "listener", lambda **event: heard.append(event))
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    bench.tune(lambda: launch(kernel, numbers()), max_runs=2)()
    known = bench.kernel({16: 3.0, 32: 1.0}, double)
    known.cache[KEY] = known.configs[1]
    bench.tune(lambda: launch(known, numbers()))()
    assert heard == []


# ---- on the disk


def test_the_next_start_finds_the_winners(bench, tmp_cache):
    def start():
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        tuned = bench.tune(lambda: [launch(kernel, numbers(n)) for n in (64, 128)])
        tuned()
        return kernel, tuned.report

    start()
    bench.forget()
    kernel, report = start()
    assert bench.blocks() == [32, 32]
    assert report.runs == 1
    assert [(c.status, block_of(c.config), c.ms) for c in report.contexts] == [("cached", 32, 1.0)] * 2
    assert block_of(kernel.cache[KEY]) == 32
    assert len(entries(tmp_cache)) == 2


ANOTHER_PROCESS = """
from kernels_for_tests import Bench, launch, numbers, only

def main():
    bench = Bench()
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    print(bench.blocks(), tuned.report.runs, only(tuned.report).status)

main()
"""


def test_another_process_finds_the_winners(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, numbers()))()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[32] 1 cached"


def test_an_entry_is_one_readable_file(bench, tmp_cache):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, numbers()))()
    (entry,) = entries(tmp_cache)
    (path,) = tmp_cache.glob("add-*.json")
    assert entry["key"]["kernel"] == "add"
    assert entry["key"]["triton_version"] == triton.__version__
    assert entry["key"]["world_size"] == 1
    assert entry["key"]["device"] == "interpreter"
    assert "BLOCK: 32" in entry["config"]
    assert entry["ms"] == 1.0
    assert sorted(entry["timings"].values()) == [1.0, 3.0]
    assert entry["key"]["key"] == f"64, '{F32}', '{F32}'"
    assert path.name.endswith(".json")


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"not json", b'{"schema": 999}', b"[]"],
    ids=["empty", "truncated", "garbage", "other schema", "list"],
)
def test_a_damaged_entry_is_a_warning_with_its_path_and_a_miss(bench, tmp_cache, damage):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, numbers()))()
    (path,) = tmp_cache.glob("*.json")
    path.write_bytes(damage)
    bench.forget()
    fresh = bench.kernel({16: 3.0, 32: 1.0})
    with pytest.warns(CacheWarning, match=path.name):
        bench.tune(lambda: launch(fresh, numbers()))()
    assert bench.blocks() == [16, 32, 32]
    (entry,) = entries(tmp_cache)
    assert "BLOCK: 32" in entry["config"]


def test_a_directory_that_cannot_be_written_is_one_warning_and_tuning_works(bench, tmp_path):
    (tmp_path / "file").write_text("")
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)), cache=tmp_path / "file")
    with pytest.warns(CacheWarning, match="Cannot write the cache"):
        tuned(64)
    for n in (64, 128, 128):  # a second warning would be an error
        tuned(n)
    assert bench.blocks() == [16, 32, 32, 32, 16, 16, 32, 32]


@pytest.mark.parametrize("cache", [False, "chosen"], ids=["no cache", "a directory"])
def test_the_cache_can_be_elsewhere_or_nowhere(bench, tmp_cache, tmp_path, cache):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, numbers()), cache=cache)()
    assert not tmp_cache.exists()
    assert bool(list((tmp_path / "chosen").glob("*.json"))) is (cache == "chosen")


def test_only_tuned_results_are_written(bench, tmp_cache):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    bench.tune(lambda: launch(kernel, numbers()), max_runs=2)()
    assert not tmp_cache.exists() or entries(tmp_cache) == []


def test_a_result_without_a_time_is_not_written(bench, tmp_cache):
    kernel = bench.kernel({16: float("nan"), 32: float("nan")})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    assert (only(tuned.report).ms, block_of(only(tuned.report).config)) == (None, 16)
    assert not tmp_cache.exists() or entries(tmp_cache) == []


@pytest.mark.parametrize(
    "change",
    [{"ms": {16: 3.0, 32: 1.0, 64: 2.0}}, {"function": double}, {"key": ("n", "x_ptr")}],
    ids=["another candidate", "another source", "another key"],
)
def test_an_entry_is_not_used_when_the_kernel_changes(bench, change):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, numbers()))()
    bench.forget()
    changed = bench.kernel(**{"ms": {16: 3.0, 32: 1.0}, **change})
    if "key" in change:
        changed.keys = ["n", "n"]  # as a list of keys it is another, as a key it can be hashed
    bench.tune(lambda: launch(changed, numbers()))()
    assert len(bench.blocks()) == len(changed.configs) + 1


@triton.jit
def plus_one(x):
    return x + 1


@triton.jit
def plus_also_one(x):
    return x + 2 - 1


def applying(helper):
    @triton.jit
    def apply(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + offs, helper(tl.load(x_ptr + offs, mask=offs < n)), mask=offs < n)

    return apply


def applying_otherwise(helper):
    @triton.jit
    def apply(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < n
        tl.store(y_ptr + offs, helper(tl.load(x_ptr + offs, mask=mask)), mask=mask)

    return apply


@pytest.mark.parametrize(
    ("changed", "is_used"),
    [
        (lambda: applying(plus_one), True),
        (lambda: applying(plus_also_one), False),
        (lambda: applying_otherwise(plus_one), False),
    ],
    ids=["the same", "another helper", "another body"],
)
def test_an_entry_is_not_used_when_the_source_changes_under_the_same_name(
    bench, monkeypatch, changed, is_used
):
    first, second = applying(plus_one), changed()
    for function in (first, second):
        monkeypatch.setitem(EMULATIONS, function, lambda x, y: x + 1)
    known = bench.kernel({16: 3.0, 32: 1.0}, first)
    bench.tune(lambda: launch(known, numbers()))()
    bench.forget()
    kernel = bench.kernel({16: 3.0, 32: 1.0}, second)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    assert bench.blocks() == ([32] if is_used else [16, 32, 32])
    assert only(tuned.report).status == ("cached" if is_used else "tuned")


def test_the_order_of_the_configs_does_not_matter(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, numbers()))()
    bench.forget()
    turned = bench.kernel({32: 1.0, 16: 3.0})
    bench.tune(lambda: launch(turned, numbers()))()
    assert bench.blocks() == [32]


@triton.jit
def scaled(x_ptr, y_ptr, n, GROUP: triton.language.constexpr, BLOCK: triton.language.constexpr):
    pass


class Scaled(Probe):
    def run(self, *args, GROUP, **kwargs):
        return Probe(double, "double", self.ms, self.launches).run(*args, **kwargs)


def test_an_entry_holds_for_its_constexpr_arguments_only(bench):
    def start(group):
        bench.forget()
        probe = Scaled(scaled, "scaled", {16: 3.0, 32: 1.0}, bench.launches)
        kernel = triton.autotune([triton.Config({"BLOCK": b}) for b in (16, 32)], ["n"])(probe)
        bench.tune(lambda: kernel[grid_of(64)](numbers(), numbers(), 64, GROUP=group))()
        return bench.blocks()

    assert start(8) == [16, 32, 32]
    assert start(4) == [16, 32, 32]
    assert start(8) == [32]


@pytest.mark.parametrize("first", ["kernel", "thunk"])
def test_what_was_judged_by_launches_does_not_answer_for_whole_runs(bench, first):
    def tuned(objective):
        kernel = bench.kernel({16: 2.0, 32: 1.0})  # anew: as in the next process

        def thunk():
            launch(kernel, numbers())
            bench.spend(10.0 if bench.blocks()[-1] == 32 else 0.0)

        made = bench.tune(thunk, objective=objective)
        made()
        return only(made.report)

    fastest = {"kernel": 32, "thunk": 16}
    for objective in (first, *(fastest.keys() - {first})):
        assert tuned(objective).status == "tuned"
    for objective, block in fastest.items():
        again = tuned(objective)
        assert (again.status, again.config.kwargs["BLOCK"]) == ("cached", block)


def test_a_choice_of_the_host_is_found_again(bench):
    def start():
        def thunk():
            chosen = tunable("slices", [1, 2])
            bench.spend({1: 2.0, 2: 1.0}[chosen])
            return chosen

        tuned = bench.tune(thunk)
        return tuned(), tuned.report

    assert start()[0] == 2
    chosen, report = start()
    assert (chosen, report.runs, only(report).status) == (2, 1, "cached")


# ---- anew


def test_retune_ignores_what_memory_and_disk_hold(bench, tmp_cache):
    ms = {16: 3.0, 32: 1.0}
    kernel = bench.kernel(ms)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    assert tuned.settled
    ms[32] = 9.0
    tuned.retune()
    assert not tuned.settled
    bench.forget()
    tuned()
    assert bench.blocks() == [16, 32, 16]
    assert (only(tuned.report).status, block_of(kernel.cache[KEY])) == ("tuned", 16)
    assert ["BLOCK: 16" in entry["config"] for entry in entries(tmp_cache)] == [True]
    tuned()
    assert bench.blocks() == [16, 32, 16, 16]


def test_retune_in_the_middle_of_a_session_starts_it_anew(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()), mode="online")
    tuned()
    tuned()
    tuned.retune()
    for _ in range(4):
        tuned()
    assert bench.blocks() == [16, 32, 16, 32, 64, 32]
    assert len(records(SessionOpened)) == len(records(SessionClosed)) == 2
    assert tuned.settled


@pytest.mark.parametrize("run", [2, 5], ids=["while tuning", "in a settled call"])
def test_retune_from_inside_a_call_tunes_anew_at_the_next_call(bench, run):
    kernel = bench.kernel({16: 1.0, 32: 2.0})
    runs = []

    def thunk():
        runs.append(launch(kernel, numbers()))
        if len(runs) == run:
            tuned.retune()

    tuned = bench.tune(thunk)
    tuned()
    while len(runs) < run:
        tuned()
    assert bench.blocks() == [16, 32] + [16] * (len(runs) - 2)
    assert not tuned.settled
    bench.forget()
    tuned()
    assert bench.blocks() == [16, 32, 16]
    assert tuned.settled


def test_retune_of_a_function_that_was_never_called_ignores_the_disk(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, numbers()))()
    bench.forget()
    fresh = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: launch(fresh, numbers()))
    tuned.retune()
    tuned()
    assert bench.blocks() == [16, 32, 32]


def test_retune_that_fails_is_still_to_be_done(bench):
    ms = {16: 3.0, 32: 1.0}
    kernel = bench.kernel(ms)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    ms[32] = 9.0
    tuned.retune()
    kernel.fn.failures.update(dict.fromkeys(ms, lambda: KeyError("users")))
    with pytest.raises(KeyError):
        tuned()
    kernel.fn.failures.clear()
    bench.forget()
    tuned()
    assert bench.blocks() == [16, 32, 16]


# ---- the report and what is settled


def test_there_is_no_report_before_the_first_call(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    assert tuned.report is None
    assert not tuned.settled


def test_the_report_says_what_was_found(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    kernel.fn.failures[64] = out_of_resources
    tuned = bench.tune(lambda: launch(kernel, numbers()), n_repeat=2)
    tuned()
    assert tuned.report.runs == 2 + 2 + 1 + 1
    context = only(tuned.report)
    assert (context.kernel, context.key, context.config) == ("add", KEY, kernel.configs[1])
    assert (context.ms, context.status) == (1.0, "tuned")
    texts = [str(config) for config in kernel.configs]
    assert dict(context.timings) == {texts[0]: 3.0, texts[1]: 1.0}
    assert list(context.banned) == [texts[2]]
    assert isinstance(tuned.report.contexts, tuple)


def test_the_report_can_be_read_while_the_session_is_under_way(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    seen = []

    def thunk():
        report = tuned.report
        seen.append((report.runs, [(c.status, dict(c.timings)) for c in report.contexts], tuned.settled))
        launch(kernel, numbers())

    tuned = bench.tune(thunk)
    tuned()
    first, second, final = seen
    texts = [str(config) for config in kernel.configs]
    assert first == (1, [], False)
    assert second == (2, [("tuning", {texts[0]: 3.0})], False)
    assert final == (3, [("tuned", {texts[0]: 3.0, texts[1]: 1.0})], False)
    assert tuned.settled


def test_online_the_report_grows_from_call_to_call(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()), mode="online")
    runs = []
    for _ in range(4):
        tuned()
        runs.append((tuned.report.runs, len(only(tuned.report).timings), tuned.settled))
    assert runs == [(1, 1, False), (2, 2, True), (2, 2, True), (2, 2, True)]


def test_settlements_are_logged_once(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    tuned()
    (settled,) = records(ContextSettled)
    assert (settled.status, settled.config_id, settled.ms) == ("tuned", 1, 1.0)


# ---- modes


def test_mode_cached_uses_what_is_known_and_never_tries(bench, monkeypatch):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: launch(kernel, numbers()))()
    bench.forget()
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
    marks = bench.clock.marks
    fresh = bench.kernel({16: 3.0, 32: 1.0}, do_bench=no_bench)
    tuned = bench.tune(lambda n: launch(fresh, numbers(n)))
    for n in (64, 128, 64, 128, 128):
        assert torch.equal(tuned(n), numbers(n) + 1)
    assert bench.blocks(n=64) == [32, 32]
    assert bench.blocks(n=128) == [16, 16, 16]
    assert bench.clock.marks == marks
    assert tuned.settled


def test_mode_cached_finds_entries_of_keys_that_come_later(bench, monkeypatch):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    bench.tune(lambda: [launch(kernel, numbers(n)) for n in (64, 128)])()
    bench.forget()
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
    fresh = bench.kernel({16: 3.0, 32: 1.0}, do_bench=no_bench)
    tuned = bench.tune(lambda n: launch(fresh, numbers(n)))
    for n in (64, 128, 128):
        tuned(n)
    assert bench.blocks() == [32] * 3


def test_mode_cached_puts_off_a_retune(bench, monkeypatch):
    ms = {16: 3.0, 32: 1.0}
    kernel = bench.kernel(ms)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    ms[32] = 9.0
    tuned.retune()
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
    bench.forget()
    tuned()
    tuned()
    assert bench.blocks() == [32, 32]
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "tune")
    tuned()
    assert bench.blocks() == [32, 32, 16, 32, 16]


def test_mode_off_is_the_bare_function(bench, monkeypatch):
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "off")
    stock = Autotuner.run
    kernel = bench.kernel({16: 3.0, 32: 1.0}, do_bench=lambda call, quantiles: call() or [1.0] * 3)
    seen = []

    def thunk():
        seen.append(Autotuner.run)
        return launch(kernel, numbers())

    tuned = bench.tune(thunk)
    assert torch.equal(tuned(), numbers() + 1)
    assert seen == [stock]
    assert bench.clock.marks == 0
    assert tuned.report is None
    assert not Path(".autotune_logs").exists()


def test_the_mode_may_change_between_calls(bench, monkeypatch):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
    tuned()
    assert bench.blocks() == [16]
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "tune")
    tuned()
    assert bench.blocks() == [16, 16, 32, 32]
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")
    tuned()
    assert bench.blocks()[-1] == 32
