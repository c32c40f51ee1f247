"""The contexts without a winner: recorded when launched, gone once they have one."""

from __future__ import annotations

from pathlib import Path

from example_files import entry

from dist_autotune.storage.winners import Winners


def titles(directory: Path) -> list[str]:
    return [each.title for each in Winners(directory).waiting()]


def test_a_context_waits_until_it_has_a_winner(tmp_path: Path) -> None:
    cache = Winners(tmp_path)
    cache.record_waiting(entry(key="8").key, "train.py")
    cache.record_waiting(entry(key="4").key, "train.py")
    assert titles(tmp_path) == ["matmul[4]", "matmul[8]"]
    cache.remove_waiting(entry(key="4").key)
    assert titles(tmp_path) == ["matmul[8]"]
    cache.put(entry(key="8"))  # as an import does
    assert titles(tmp_path) == []


def test_the_first_launch_of_another_source_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for digest in ("k1", "k2"):
        Winners(tmp_path).record_waiting(entry(kernel_digest=digest).key, "train.py")
    Winners(tmp_path).record_waiting(entry(world_size=8).key, "train.py")
    assert [each.key.world_size for each in Winners(tmp_path).waiting()] == [2, 8]


def test_clearing_the_cache_forgets_them(tmp_path: Path) -> None:
    Winners(tmp_path).put(entry(key="1"))
    Winners(tmp_path).record_waiting(entry(key="2").key, "train.py")
    Winners(tmp_path).clear()
    assert titles(tmp_path) == []
