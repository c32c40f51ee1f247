"""The examples: they end well, and print what they promise."""

import re
from pathlib import Path

import pytest
from programs import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_ag_gemm_is_right_and_comes_from_the_cache_at_the_second_start() -> None:
    first, second = (run_program(EXAMPLES / "ag_gemm.py") for _ in range(2))
    assert "4 candidates" in first
    assert "everything came from the cache: 1 run, nothing tried" in second
    for text in (first, second):
        assert re.search(
            r"^equals all_gather \+ matmul: relative error \d\.\de[-+]\d\d on 2 ranks", text, re.M
        )


def test_overlap_tunes_the_kernel_three_ways(tmp_path: Path) -> None:
    text = run_program(EXAMPLES / "overlap.py", "--rows", "32", "--columns", "32", "--k", "32")
    pick = r"\d+ x \d+ x \d+, \d programs"
    rows = re.findall(rf"^(.+?)  +{pick} +[\d.]+ ms +[\d.]+ ms$", text, re.M)
    assert rows == ["alone", "in the step, by its own time", "in the step, by run time"]
    logged = (tmp_path / ".autotune_logs" / "rank-1.log").read_text()
    for name in ("overlap: GEMM alone", "overlap: by kernel time", "overlap: by run time"):
        assert name in logged


def test_experts_on_different_ranks_learn_while_they_are_tuned() -> None:
    text = run_program(EXAMPLES / "experts.py", "--steps", "16", "--tokens", "16", "--experts", "4")
    assert re.search(r"^\d+ contexts in \d+ runs on 2 ranks", text, re.M), text
    assert "send_tokens[" in text
    found = re.search(r"^16 steps; loss ([\d.]+) at first, ([\d.]+) at the end$", text, re.M)
    assert found is not None, text
    assert float(found[2]) < 0.9 * float(found[1]), text


@pytest.mark.slow
def test_a_transformer_is_trained_as_plain_torch_trains_it() -> None:
    text = run_program(EXAMPLES / "train_transformer.py", "--steps", "3", "--dp", "2", ranks=4)
    assert "3 steps on 2 x 2 ranks, still being tuned" in text
    ends = r"^loss ([\d.]+) at first, ([\d.]+) at the end; at most (\d\.\de-\d\d) from plain torch"
    found = re.search(ends, text, re.M)
    assert found is not None, text
    assert float(found[2]) < float(found[1])
    assert float(found[3]) < 1e-4
    for kernel in ("norm_kernel", "norm_backward_kernel", "rotary_kernel", "cross_entropy_backward_kernel"):
        assert f"{kernel}[" in text
