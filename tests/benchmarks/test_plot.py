"""The pictures of benchmarks: the bound is what can be reached, each arm of a record has its bar."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.plot import all_gather_gemm_ms, draw


@pytest.mark.parametrize(
    ("gemm_ms", "copies_ms", "ranks", "pieces", "wanted"),
    [
        pytest.param(4.0, 1.0, 2, 1, 4.0, id="the chunk is here before the own one is done"),
        pytest.param(4.0, 3.0, 2, 1, 5.0, id="the chunk is waited for, and multiplied then"),
        pytest.param(4.0, 3.0, 2, 2, 4.0, id="in two pieces nobody waits"),
        pytest.param(4.0, 9.0, 4, 1, 10.0, id="copies are the limit, and one chunk's product behind them"),
        pytest.param(4.0, 9.0, 4, 3, 9.0 + 4 / 12, id="copies are the limit, and a third of that"),
        pytest.param(4.0, 0.0, 1, 1, 4.0, id="one rank gathers nothing"),
    ],
)
def test_the_bound_lets_each_part_be_multiplied_once_it_is_here(gemm_ms, copies_ms, ranks, pieces, wanted):
    assert all_gather_gemm_ms(gemm_ms, copies_ms, ranks, pieces) == pytest.approx(wanted)


def record(op: str = "ag_gemm", **unavailable: str) -> dict[str, Any]:
    times_ms = {"ours": 1.1, "NCCL + GEMM": 1.6, "torch fused": 1.3, "GEMM": 1.0, "copies": 0.4}
    arms = [
        {"name": name, "unavailable": unavailable[name]} if name in unavailable else {"name": name, "ms": ms}
        for name, ms in times_ms.items()
    ]
    return {
        "op": op,
        "title": "All-gather + GEMM",
        "date": "2026-01-02T03:04:05+00:00",
        "hardware": {"world_size": 2, "device": "NVIDIA H200"},
        "cases": [{"case": "1 x 2 x 3", "arms": arms}],
    }


def test_a_picture_has_the_shapes_the_arms_and_the_bound_and_is_the_same_each_time(tmp_path: Path) -> None:
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        draw(record(**{"torch fused": "out of memory"}), picture)
    text, again = (picture.read_text() for picture in pictures)
    assert text == again
    for drawn in ("1 x 2 x 3", "ours", "NCCL + GEMM", "bound", "time / GEMM alone", "2 x NVIDIA H200"):
        assert drawn in text
    assert "torch fused" not in text
