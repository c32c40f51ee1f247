"""The script that writes winners as files of vLLM and FLA: what has a place there, and what is left out."""

import importlib.util
import json
from pathlib import Path

from kernels_for_tests import launch, numbers
from programs import run_program
from typer.testing import CliRunner

from dist_autotune.cli.commands import app

SCRIPT = Path(__file__).parents[2] / "examples" / "config_tables.py"
BLOCKS = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
OPTIONS = {"num_warps": 4, "num_stages": 3}


def known(arguments: dict, config: dict, created_at: str = "2026-01-02") -> dict:
    evidence = {"arguments": list(arguments.items()), "config": config}
    key = {"kernel": "fwd", "key": str(arguments), "device": "NVIDIA H100", "triton_version": "3.6.0"}
    return {"key": key, "created_at": created_at, "evidence": evidence}


def tables(*entries: dict, name: str) -> tuple:
    spec = importlib.util.spec_from_file_location("config_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tables({"entries": list(entries)}, name)


def test_experts_become_a_file_by_sizes_and_device_of_the_newest_configs():
    sizes, config = {"E": 8, "N": 7168, "M": 1}, {"kwargs": BLOCKS, **OPTIONS}
    old = known(sizes, {**config, "num_warps": 8}, "2025-01-01")
    files, left_out = tables(old, known(sizes, config), name="vllm")
    assert files == {"E=8,N=7168,device_name=NVIDIA_H100.json": {"1": {**BLOCKS, **OPTIONS}}}
    assert left_out == []


def test_a_bundle_becomes_a_file_of_a_kernel_with_keys_by_their_digests(bench, kernel, tmp_path):
    bench.tune(lambda: launch(kernel, numbers()))()
    assert CliRunner().invoke(app, ["cache", "export", "tuned.json"]).exit_code == 0
    text = run_program(SCRIPT, str(tmp_path / "tuned.json"), "fla", str(tmp_path / "out"), ranks=1)
    assert "Wrote 1 files" in text
    (found,) = json.loads((tmp_path / "out" / "add.json").read_text())["autotune_entries"].values()
    assert found["autotune_key"] == [64, "torch.float32", "torch.float32"]
    assert found["config"]["kwargs"] == {"BLOCK": 32}
