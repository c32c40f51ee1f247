"""What other tools read: which entries have a place in their files, and why the others have none."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from example_files import entry
from kernels_for_tests import launch, no_bench, numbers
from msgspec import structs
from typer.testing import CliRunner

from dist_autotune.cli.commands import app
from dist_autotune.storage.other_formats import NO_ARGUMENTS, files_of
from dist_autotune.storage.winners import Entry, Evidence

BLOCKS = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}


def plain(kwargs: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the arguments of a triton.Config."""
    others = {"num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None, "ir_override": None}
    return {"kwargs": kwargs, **others, **options}


def known(
    arguments: dict[str, Any], config: dict[str, Any], created_at: str = "2026-01-02", **key: Any
) -> Entry:
    made = entry(key=str(arguments), **key)
    evidence = Evidence(config=config, arguments=tuple(arguments.items()))
    return structs.replace(made, evidence=evidence, created_at=created_at)


def moe(
    m: int, config: dict[str, Any] | None = None, created_at: str = "2026-01-02", **arguments: Any
) -> Entry:
    named = {"E": 8, "N": 7168, "M": m, **arguments}
    return known(
        named, plain(BLOCKS) if config is None else config, created_at, device="NVIDIA H100 80GB HBM3"
    )


# ---- vLLM and SGLang


def test_experts_become_a_file_by_sizes_and_device_with_a_config_for_each_number_of_tokens():
    files = files_of([moe(1, plain(BLOCKS, num_warps=8)), moe(64)], "vllm")
    assert files.written == 2
    assert files.contents == {
        "E=8,N=7168,device_name=NVIDIA_H100_80GB_HBM3.json": {
            "1": {**BLOCKS, "num_warps": 8, "num_stages": 3},
            "64": {**BLOCKS, "num_warps": 4, "num_stages": 3},
        }
    }


REFUSED = {
    "no experts": (known({"M": 1, "N": 2}, plain(BLOCKS)), "no fused MoE: its key has no integer E"),
    "a size that is none": (moe(1, E="8"), "no fused MoE: its key has no integer E"),
    "a flag": (moe(1, N=True), "no fused MoE: its key has no integer N"),
    "other blocks": (moe(1, plain({"BLOCK": 64})), "no fused MoE: its config has no integer BLOCK_SIZE_M, "),
    "no warps": (moe(1, {"kwargs": BLOCKS, "num_stages": 3}), "its config has no integer num_warps"),
    "block-wise": (moe(1, block_shape=[128, 128]), "block_shape: vLLM and SGLang name its file differently"),
    "registers": (moe(1, plain(BLOCKS, maxnreg=128)), "such a file has no maxnreg"),
    "another directory": (moe(1, dtype="../x"), "is no name of a file"),
    "no evidence": (entry(), NO_ARGUMENTS),
}


@pytest.mark.parametrize(("refused", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_place_in_a_file_for_experts_is_left_out_with_the_reason(refused, reason):
    files = files_of([refused, moe(64)], "vllm")
    assert files.written == 1
    ((left_out, why),) = files.left_out
    assert left_out is refused
    assert reason in why


# ---- FLA


def test_a_kernel_becomes_a_file_with_its_keys_by_their_digests():
    files = files_of([known({"T": 4096, "x.dtype": "torch.float16"}, plain({"BT": 64}), kernel="fwd")], "fla")
    assert files.contents == {
        "fwd.json": {
            "kernel_name": "fwd",
            "triton_version": "3.6.0",
            "autotune_entries": {
                # md5 of [4096,"torch.float16"]
                "87d169d3e27e5a7e6635b859b9808475": {
                    "autotune_key": [4096, "torch.float16"],
                    "config": plain({"BT": 64}),
                }
            },
        }
    }


@pytest.fixture
def fla_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Give FLA's module that reads configs, in its strict mode; its package needs not be importable."""
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs fla-core: its reader is tried on the files")
    path = Path(found.submodule_search_locations[0]) / "ops" / "utils" / "cache.py"
    monkeypatch.setenv("FLA_CACHE_MODE", "strict")
    monkeypatch.setenv("FLA_CONFIG_DIR", str(tmp_path / "out"))
    spec = importlib.util.spec_from_file_location("fla_cache", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fla_cache", module)
    spec.loader.exec_module(module)
    return module


def test_fla_takes_the_exported_winner_and_benchmarks_nothing(bench, kernel, fla_cache, tmp_path):
    bench.tune(lambda: launch(kernel, numbers()))()
    done = CliRunner().invoke(app, ["cache", "export", "--format", "fla", str(tmp_path / "out")])
    assert "FLA_CACHE_MODE=strict" in done.stdout
    decorate = fla_cache.fla_cache_autotune(kernel.configs, key=["n"], do_bench=no_bench)
    bench.forget()
    tuned = decorate(kernel.fn)
    launch(tuned, numbers())
    assert bench.blocks() == [32]
    with pytest.raises(AssertionError, match="stock benchmarking must not happen"):
        launch(tuned, numbers(128))  # no such key
