"""Results of configs compared by bits: what cache, bundles and logs keep, and who may use it."""

from __future__ import annotations

import json

from bit_functions import BASE, FAST, SLOW, Function, off_by_one_bit, tuned_config
from kernels_for_tests import (
    entries,
    launch,
    numbers,
    only,
    records,
    winner,
)
from msgspec import structs

from dist_autotune.logs.records import Note
from dist_autotune.storage import bundle
from dist_autotune.storage.winners import Winners


def test_same_uses_only_results_that_hold_the_first_configs_bits(bench, tmp_cache):
    assert tuned_config(bench, bits="any") == ("tuned", FAST, None)
    assert tuned_config(bench, bits="check") == ("cached", FAST, None)
    assert tuned_config(bench, bits="same") == ("tuned", SLOW, 0)
    assert tuned_config(bench, bits="same") == ("cached", SLOW, 0)
    assert tuned_config(bench, bits="any") == ("cached", FAST, None)
    stored = {entry["winner"]: entry for entry in entries(tmp_cache)}
    assert len(stored) == 2
    (same,) = [path for path in tmp_cache.glob("*.json") if json.loads(path.read_text())["bit_class"] == 0]
    assert len(json.loads(same.read_text())["output_digest"]) == 32
    for unknown in (None, 1):
        same.write_text(json.dumps({**json.loads(same.read_text()), "bit_class": unknown}))
        assert tuned_config(bench, bits="same") == ("tuned", SLOW, 0)


def test_same_uses_no_result_of_another_order_of_configs(bench, tmp_cache):
    """Another config is the first one then, and class 0 is that of its bits."""
    fast_first = {FAST: 1.0, SLOW: 2.0, BASE: 3.0}
    first_bits = {SLOW: off_by_one_bit, BASE: off_by_one_bit}
    assert tuned_config(bench, bits="same") == ("tuned", SLOW, 0)
    tuned = bench.tune(Function(bench, fast_first, first_bits), bits="same")
    tuned()
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", FAST)
    assert tuned_config(bench, bits="same") == ("cached", SLOW, 0)
    assert len(entries(tmp_cache)) == 2


def test_a_first_config_that_alone_has_its_bits_is_kept_and_not_compared_again(bench):
    change = {SLOW: off_by_one_bit, FAST: off_by_one_bit}
    for status in ("tuned", "cached"):
        tuned = bench.tune(Function(bench, change=change), bits="same")
        tuned()
        assert (only(tuned.report).status, winner(only(tuned.report))) == (status, BASE)


def test_what_nobody_looks_into_is_named_in_the_log(bench):
    function = Function(bench)
    tuned = bench.tune(lambda: (function(), object()), bits="same")
    tuned()
    remarks = [note.text for note in records(Note)]
    assert remarks == [
        "bits are not compared of the result[1] (a builtins.object): nobody looks into such objects"
    ]


def test_a_bundle_carries_class_and_digest(bench, tmp_cache, tmp_path):
    assert tuned_config(bench, bits="same") == ("tuned", SLOW, 0)
    (stored,) = Winners(tmp_cache).entries()
    bundle.write(tmp_path / "bundle.json", [stored], replaces=False)
    for path in tmp_cache.glob("*.json"):
        path.unlink()
    (carried,) = bundle.read(tmp_path / "bundle.json")
    assert (carried.bit_class, carried.output_digest) == (0, stored.output_digest)
    bundle.merge(Winners(tmp_cache), [carried], replaces=False)
    assert tuned_config(bench, bits="same") == ("cached", SLOW, 0)
    bundle.merge(Winners(tmp_cache), [structs.replace(carried, bit_class=1)], replaces=True)
    assert tuned_config(bench, bits="same") == ("tuned", SLOW, 0)


def test_a_new_key_begins_with_the_first_config_and_not_with_the_nearest_winner(bench):
    function = Function(bench)
    tuned = bench.tune(lambda n: launch(function.kernel, numbers(n)), bits="same")
    tuned(64)
    assert winner(only(tuned.report)) == FAST
    bench.forget()
    tuned(128)
    assert bench.blocks(n=128)[:2] == [BASE, BASE]


def test_same_does_not_take_what_autotuner_cache_holds(bench):
    function = Function(bench)
    free = bench.tune(function, bits="any", cache=False)
    free()
    assert winner(only(free.report)) == FAST
    tuned = bench.tune(function, bits="same", cache=False)
    tuned()
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", SLOW)
