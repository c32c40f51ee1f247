"""A bundle carries winners with their evidence; what is wrong with one is found before anything is stored."""

import json
from pathlib import Path
from typing import Any

import pytest
from example_files import entry
from msgspec import structs

from dist_autotune.storage import bundle
from dist_autotune.storage.winners import Entry, Evidence, Winners

EVIDENCE = Evidence(
    torch_version="2.13.0",
    fastest_rank_ms={"BLOCK=128": 0.2},
    config={"kwargs": {"BLOCK": 128}, "num_warps": 4},
    arguments=(("n", 4096), ("x.dtype", "fp16")),
    triton_file="ABC/matmul.autotune.json",
)


def with_evidence(**key: object) -> Entry:
    return structs.replace(entry(**key), evidence=EVIDENCE)


def written(path: Path, *entries: Entry) -> Path:
    bundle.write(path, entries, replaces=True)
    return path


def changed(data: dict[str, Any], *path: Any, value: Any) -> None:
    *outer, last = path
    for name in outer:
        data = data[name]
    data[last] = value


AT = r" - at `\$\.entries\[1\]"
DAMAGE: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "another bundle": (("bundle",), 2, "not a bundle of version 1: bundle=2"),
    "another schema": (("schema",), 9, "schema 9, expected 2"),
    "no list": (("entries",), {}, r"Expected `array`, got `object` - at `\$\.entries`"),
    "no winner": (("entries", 1, "winner"), None, rf"Expected `str`, got `null`{AT}\.winner`"),
    "foreign winner": (("entries", 1, "winner"), "c9", f"winner: 'c9' is none of its 2 candidates{AT}`"),
    "no time": (("entries", 1, "ms"), 0, f"ms: expected a positive number, found 0.0{AT}`"),
    "too large a number": (("entries", 1, "ms"), 10**400, rf"Number out of range{AT}\.ms`"),
    "no config": (
        ("entries", 1, "evidence"),
        {"config": {"kwargs": []}},
        rf"config: expected kwargs with names, found list{AT}\.evidence`",
    ),
    "twice": (("entries", 1, "key", "key"), "1", r"entry 1: a second one for matmul\[1\]"),
}


@pytest.mark.parametrize(("path", "value", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_bundle_is_refused_with_its_value(tmp_path, path, value, reason):
    file = written(tmp_path / "all.json", with_evidence(key="1"), with_evidence(key="2"))
    data = json.loads(file.read_text())
    changed(data, *path, value=value)
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=reason):
        bundle.read(file)


def test_a_bundle_is_never_read_whole_when_it_is_huge(tmp_path, monkeypatch):
    file = written(tmp_path / "all.json", entry())
    monkeypatch.setattr(bundle, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        bundle.read(file)
    with pytest.raises(ValueError, match="1 entries: more than a bundle's 100 bytes"):
        bundle.write(tmp_path / "more.json", [entry()], replaces=False)
    assert not (tmp_path / "more.json").exists()


def test_a_name_in_a_bundle_leads_nowhere_else(tmp_path: Path) -> None:
    path = written(tmp_path / "all.json", entry(kernel="../../evil"))
    bundle.merge(Winners(tmp_path / "cache"), bundle.read(path), replaces=False)
    assert {file.parent.name for file in tmp_path.rglob("*evil*")} == {"cache", "imported"}
