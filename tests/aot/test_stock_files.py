"""Stock Triton reads what `cache export --format triton` writes, or its cache manager, and times nothing.

The device is pretended, and raises when stock Triton asks it for a benchmark.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from candidates import GOOD, square
from typer.testing import CliRunner

from benchmarks.common.processes import with_benchmarks
from dist_autotune import contextual_autotune
from dist_autotune.cli.commands import app

SLOW, FAST = GOOD, 64
X, Y = torch.zeros(1, dtype=torch.float16), torch.zeros(1)


class Clock:
    """Reads 1 ms for a launch of FAST, 2 ms for others."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def start(self) -> list[float]:
        return []

    def stop(self, mark: list[float]) -> None:
        mark.append(1.0 if self._device.launched[-1]["BLOCK"] == FAST else 2.0)

    def read_ms(self, mark: list[float]) -> float:
        return mark[0]


def tune(kernel: Any, device: Any) -> None:
    chosen = {"clock": Clock(device), "n_warmup": 0, "n_repeat": 1, "log_dir": None, "progress": False}
    contextual_autotune(lambda: kernel[(1,)](X, Y), **chosen)()


def export(directory: Path, *options: str) -> Any:
    return CliRunner().invoke(
        app, ["cache", "export", "--format", "triton", str(directory / "out"), *options]
    )


def kernel_of(**options: Any) -> Any:
    return triton.autotune([triton.Config({"BLOCK": block}, **options) for block in (SLOW, FAST)], [])(square)


def only_good(configs: list[Any], named: Any, **_: Any) -> list[Any]:
    return [config for config in configs if config.kwargs["BLOCK"] in (SLOW, FAST)]


@triton.heuristics({"BLOCK": lambda arguments: arguments["BLOCK"]})
@triton.jit
def with_heuristics(x_ptr, y_ptr, BLOCK: triton.language.constexpr):
    offs = triton.language.arange(0, BLOCK)
    triton.language.store(y_ptr + offs, triton.language.load(x_ptr + offs))


CASES = {
    "plain": (square, (SLOW, FAST), {}),
    "pruned": (square, (SLOW, 128, FAST), {"prune_configs_by": {"early_config_prune": only_good}}),
    "equal configs": (square, (SLOW, FAST, SLOW), {}),
    "heuristics": (with_heuristics, (SLOW, FAST), {}),
}


@pytest.mark.parametrize(("function", "blocks", "options"), CASES.values(), ids=CASES)
def test_stock_triton_takes_the_exported_winner(device, tmp_path, monkeypatch, function, blocks, options):
    def made() -> Any:
        configs = [triton.Config({"BLOCK": block}) for block in blocks]
        return triton.autotune(configs, [], cache_results=True, **options)(function)

    tuned = made()
    tune(tuned, device)
    result = export(tmp_path)
    assert result.stdout.startswith(f"Wrote 1 file for 1 entry to {tmp_path / 'out'}. Set TRITON_CACHE_DIR=")
    stock = made()
    with pytest.raises(AssertionError, match="nothing is benchmarked by stock Triton"):
        stock[(1,)](X, Y)  # without the file it would
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "out"))
    device.forget()
    stock = made()
    stock[(1,)](X, Y)
    assert device.launched[-1]["BLOCK"] == FAST
    assert stock.best_config.kwargs == {"BLOCK": FAST}
    assert stock.configs_timings == {stock.best_config: [1.0, 1.0, 1.0]}


STOCK = """
import candidates, torch, triton
from benchmarks.common.pretended_device import PretendedDevice
device = PretendedDevice(shared_bytes=20 * 1024)
device.install()
kernel = triton.autotune([triton.Config({"BLOCK": block}) for block in (%d, %d)], [])(candidates.square)
kernel[(1,)](torch.zeros(1, dtype=torch.float16), torch.zeros(1))
print(device.launched[-1]["BLOCK"])
"""


def test_a_program_that_names_the_cache_manager_runs_tuned(device, tmp_path):
    kernel = kernel_of()
    tune(kernel, device)

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        environment = with_benchmarks(os.environ | {"TRITON_CACHE_AUTOTUNING": "1"} | environment)
        environment["PYTHONPATH"] += os.pathsep + os.pathsep.join(sys.path)
        command = [sys.executable, "-c", STOCK % (SLOW, FAST)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    manager = {"TRITON_CACHE_MANAGER": "dist_autotune.stock_triton:TunedCache"}
    assert "nothing is benchmarked by stock Triton" in run().stderr
    assert "nothing is benchmarked by stock Triton" in run(WORLD_SIZE="2", **manager).stderr  # tuned on one
    assert run(**manager).stdout == f"{FAST}\n"
    (file,) = (tmp_path / "triton").glob("*/*.autotune.json")
    benchmarked = file.read_text().replace(f'"BLOCK": {FAST}', f'"BLOCK": {SLOW}')
    file.write_text(benchmarked)
    assert (run().stdout, run(**manager).stdout) == (f"{SLOW}\n", f"{FAST}\n")
    assert file.read_text() != benchmarked


def test_configs_with_a_hook_have_no_such_file(device, tmp_path):
    kernel = kernel_of(pre_hook=lambda arguments: None)
    tune(kernel, device)
    result = export(tmp_path)
    assert result.exit_code == 2
    assert (
        "Left out square[float16, float32]: stock Triton keeps no file of it: a config has a" in result.stderr
    )
    assert not (tmp_path / "out").exists()


def test_files_are_overwritten_if_asked_for_only(device, tmp_path):
    kernel = kernel_of()
    tune(kernel, device)
    assert export(tmp_path).exit_code == 0
    (file,) = (tmp_path / "out").glob("*/*.autotune.json")
    file.write_text("mine")
    refused = export(tmp_path)
    assert (refused.exit_code, file.read_text()) == (2, "mine")
    assert refused.stderr == f"{file} is there already, 1 in all: --replace writes over them.\n"
    assert export(tmp_path, "--replace").exit_code == 0
    assert file.read_text() != "mine"
