"""After an upgrade of Triton, driver or kernel the three best of an old entry are raced again."""

import dataclasses
import json

import pytest
import triton
from kernels_for_tests import Bench, block_of, entries, launch, numbers, only, out_of_resources, records

from dist_autotune import NotTuned
from dist_autotune.logs.records import ContextAdmitted
from dist_autotune.storage import bundle, winners
from dist_autotune.storage.scope import Device
from dist_autotune.storage.winners import Winners

OLD_MS = {16: 5.0, 32: 1.0, 64: 3.0, 128: 2.0, 256: 4.0}  # 32, 128 and 64 are its best
NEW_MS = {16: 0.5, 32: 5.0, 64: 3.0, 128: 4.0, 256: 0.5}  # 64 is the best of them now


def start(ms, *, mode="replay", **options):
    """Tune as a new process does; return the function, its bench and its kernel."""
    bench = Bench()
    kernel = bench.kernel(ms)
    tuned = bench.tune(lambda: launch(kernel, numbers()), **{"n_repeat": 1, "mode": mode, **options})
    return tuned, bench, kernel


def upgrade_triton(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "99.0")


def upgrade_driver(monkeypatch):
    device = dataclasses.replace(Device.current(), driver="999.1")
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: device))


def said(found_with):
    return f"3 of 5 candidates, the best with {found_with}; raced again after an upgrade"


UPGRADES = [
    pytest.param(upgrade_triton, f"Triton {triton.__version__}", id="Triton"),
    pytest.param(upgrade_driver, "driver unknown", id="driver"),
]


@pytest.mark.parametrize(("upgrade", "found_with"), UPGRADES)
def test_the_three_best_of_an_old_entry_are_raced_and_no_other(tmp_cache, monkeypatch, upgrade, found_with):
    start(OLD_MS)[0]()
    upgrade(monkeypatch)
    tuned, bench, _ = start(NEW_MS)
    tuned()
    context = only(tuned.report)
    assert bench.blocks() == [32, 128, 64, 64]
    assert (context.status, block_of(context.config), context.again) == ("tuned", 64, said(found_with))
    assert f"{context.label}: {said(found_with)}" in str(tuned.report)
    admitted = records(ContextAdmitted)[-1]
    assert (admitted.again, len(admitted.candidates)) == (said(found_with), 5)
    assert len(entries(tmp_cache)) == 2
    again, bench, _ = start(OLD_MS)
    again()
    assert (only(again.report).status, bench.blocks()) == ("cached", [64])


def test_another_source_of_a_kernel_is_an_upgrade(tmp_cache):
    start(OLD_MS)[0]()
    (path,) = tmp_cache.glob("*.json")
    rewrite(path, tmp_cache, kernel_digest="0" * 16 + ".00000000")
    tuned, bench, _ = start(NEW_MS)
    tuned()
    assert bench.blocks() == [32, 128, 64, 64]
    assert only(tuned.report).again == said("an earlier source")


def rewrite(path, cache, **changes):
    """Make an entry one of another key."""
    data = json.loads(path.read_text())
    data["key"].update(changes)
    path.unlink()
    bundle_file = cache / "entries"
    head = {"bundle": bundle.BUNDLE_VERSION, "schema": winners.SCHEMA_VERSION, "entries": [data]}
    bundle_file.write_text(json.dumps(head))
    Winners(cache).clear()
    bundle.merge(Winners(cache), bundle.read(bundle_file), replaces=False)


def test_where_the_best_fail_now_all_candidates_race(tmp_cache, monkeypatch):
    start(OLD_MS)[0]()
    upgrade_triton(monkeypatch)
    tuned, _, kernel = start(NEW_MS)
    kernel.fn.failures.update(dict.fromkeys([32, 64, 128], out_of_resources))
    tuned()
    context = only(tuned.report)
    assert block_of(context.config) in (16, 256)
    assert (context.status, context.ms, context.again) == ("tuned", 0.5, "")


def test_strict_says_what_an_upgrade_has_made_of_the_result(tmp_cache, monkeypatch):
    start(OLD_MS)[0]()
    upgrade_triton(monkeypatch)
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "strict")
    tuned, bench, _ = start(NEW_MS)
    with pytest.raises(NotTuned, match="from before an upgrade"):
        tuned()
    assert bench.blocks() == []
