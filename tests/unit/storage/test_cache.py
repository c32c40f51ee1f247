"""The disk cache: entries survive many writers, killed writers, damaged files and unusable directories."""

import errno
import fcntl
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from example_files import KEY, entry
from msgspec import structs

from dist_autotune.errors import CacheWarning
from dist_autotune.storage.winners import MAX_BYTES, Entry, EntryKey, Winners
from ranks import assert_all_ok, assert_killed, run_ranks

fork = multiprocessing.get_context("fork")


def put_two(cache: Winners) -> None:
    cache.put(entry(key="1"))
    cache.put(entry(key="2"))


def all_of(cache: Winners) -> dict[str, Entry]:
    return {each.key.digest: each for each in cache.entries()}


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


# ---- what an entry is


CHANGES = {
    "kernel": "other", "kernel_digest": "k2", "key": "8192, 'fp16'", "constants": "GROUP=8",
    "candidates": ("c0",), "device": "another device", "capability": "8.0", "triton_version": "3.9.0",
    "world_size": 4, "scope": "layer", "driver": "580",
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in structs.fields(EntryKey)])
def test_an_entry_is_not_used_when_anything_of_its_key_changes(tmp_path: Path, field: str) -> None:
    cache = Winners(tmp_path)
    cache.put(entry())
    assert cache.get(structs.replace(KEY, **{field: CHANGES[field]})) is None


# ---- damaged files

DAMAGED = {
    "empty": ("", "damaged JSON"),
    "truncated": ('{"schema": 2, "key": {"ker', "damaged JSON"),
    "garbage": ("\x00\x01 not json", "damaged JSON"),
    "endless nesting": ("[" * 100_000, "Expected `object`, got `array`"),
    "no object": ("[]", "Expected `object`, got `array`"),
    "empty object": ("{}", "missing required field `schema`"),
    "another schema": ('{"schema": 99}', r"schema 99, expected 2\."),
    "no fields": ('{"schema": 2}', "missing"),
    "wrong type": (
        '{"schema": 2, "key": 5, "winner": "c1", "config": "", "ms": 1}',
        r"Expected `object`, got `int` - at `\$\.key`",
    ),
}


@pytest.mark.parametrize(("content", "reason"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_a_warning_with_its_path_and_a_miss(tmp_path, content, reason):
    path = tmp_path / KEY.file_name
    path.write_text(content)
    cache = Winners(tmp_path)
    with pytest.warns(CacheWarning, match=f"Ignored {path}: .*{reason}"):
        assert cache.get(KEY) is None
    assert all_of(cache) == {}  # the second time there is no warning
    cache.put(entry())
    assert Winners(tmp_path).get(KEY) == entry()


@pytest.mark.parametrize(
    ("field", "value"),
    [("fills", "-0.5"), ("fills", "0.0"), ("fills", "1.5")]
    + [("timings", value) for value in ("-1.0", "0.0", "NaN", "1e999", "null")],
)
def test_an_entry_with_a_figure_that_no_launch_has_is_ignored(tmp_path: Path, field: str, value: str) -> None:
    path, stored = tmp_path / KEY.file_name, structs.replace(entry(), **{field: {"BLOCK=128": 0.375}})
    Winners(tmp_path).put(stored)
    assert Winners(tmp_path).get(KEY) == stored
    path.write_text(path.read_text().replace("0.375", value))
    with pytest.warns(CacheWarning, match=f"Ignored {path}"):
        assert Winners(tmp_path).get(KEY) is None


def test_a_result_that_was_found_anew_replaces_one_with_the_same_winner(tmp_path: Path) -> None:
    cache, later = Winners(tmp_path), structs.replace(entry(), ms=7.0, created_at="2030-01-01T00:00:00+00:00")
    cache.put(entry())
    cache.put(later)
    assert cache.get(KEY) == later
    cache.put(entry(), replaces=False)
    assert cache.get(KEY) == later


def rename_another(path: Path) -> None:
    other = structs.replace(KEY, world_size=4)
    Winners(path.parent).put(structs.replace(entry(), key=other))
    (path.parent / other.file_name).rename(path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "not a regular file"),  # nothing waits for its other end
        (lambda path: (path.touch(), os.truncate(path, 1 << 40)), f"larger than {MAX_BYTES} bytes"),
        (rename_another, "its content belongs in matmul-"),
    ],
    ids=["a pipe", "a file that no memory holds", "another entry"],
)
def test_what_is_no_entry_of_that_name_is_a_miss(tmp_path, make, reason):
    make(tmp_path / KEY.file_name)
    with pytest.warns(CacheWarning, match=reason):
        assert Winners(tmp_path).get(KEY) is None


# ---- many writers


WRITERS = 16


def test_16_processes_writing_at_once_lose_nothing(tmp_path: Path) -> None:
    start, shared = fork.Barrier(WRITERS), [f"shared {i}" for i in range(4)]
    candidates = tuple(f"c{each}" for each in range(WRITERS))

    def put_all(writer: int) -> None:
        cache = Winners(tmp_path)
        start.wait(60)
        for key in [*(f"{writer}.{i}" for i in range(8)), *shared]:
            cache.put(entry(key=key, winner=f"c{writer}", candidates=candidates))

    assert_all_ok(run_ranks(put_all, WRITERS, init="none", timeout_s=120))
    found = all_of(Winners(tmp_path))  # warnings are errors: every file is valid
    own = {f"{writer}.{i}" for writer in range(WRITERS) for i in range(8)}
    assert {each.key.key for each in found.values()} == {*shared, *own}
    assert list(tmp_path.glob("*.tmp")) == []


# ---- killed writers


def test_what_a_writer_killed_mid_write_leaves_is_invisible_and_cleaned_up_later(tmp_path: Path) -> None:
    def put_and_die_before_the_replace(rank: int) -> None:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # in this child only
        Winners(tmp_path).put(entry(winner="c0"))

    Winners(tmp_path).put(entry())
    (killed,) = run_ranks(put_and_die_before_the_replace, 1, init="none")
    assert_killed(killed)
    assert len(list(tmp_path.glob("*.tmp"))) == 1
    assert all_of(Winners(tmp_path)) == {KEY.digest: entry()}
    Winners(tmp_path).put(entry(key="1"))
    assert list(tmp_path.glob("*.tmp")) == []
    assert len(all_of(Winners(tmp_path))) == 2


# ---- directories that cannot be used


def refusing(number: int) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "some file")

    return refuse


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize(("owner", "call"), [(os, "replace"), (Path, "open")], ids=["replace", "open"])
def test_a_directory_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch, number, owner, call):
    cache = Winners(tmp_path)
    monkeypatch.setattr(owner, call, refusing(number))
    with pytest.warns(CacheWarning, match=os.strerror(number)) as caught:
        put_two(cache)
    assert len(caught) == 1
    assert files(tmp_path) == []
    monkeypatch.undo()
    cache.put(entry())  # the disk has space again
    assert cache.get(KEY) == entry()


def test_a_directory_that_cannot_be_read_is_one_warning(tmp_path, monkeypatch):
    cache = Winners(tmp_path)
    monkeypatch.setattr(Path, "stat", refusing(errno.EACCES))
    with pytest.warns(CacheWarning, match="Cannot read the cache in .*: Permission denied") as caught:
        assert [*cache.entries(), *cache.launched_by("layer"), cache.get(KEY)] == [None]
    assert len(caught) == 1


def test_without_locks_on_the_filesystem_entries_are_written_with_one_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    cache = Winners(tmp_path)
    with pytest.warns(CacheWarning, match="No lock on the cache") as caught:
        put_two(cache)
    assert len(caught) == 1
    assert len(all_of(cache)) == 2
