"""Winners as the config files of vLLM, SGLang and flash-linear-attention (FLA): a script to adapt.

    dist-autotune cache export tuned.json
    python examples/config_tables.py tuned.json vllm DIRECTORY
    python examples/config_tables.py tuned.json fla DIRECTORY

vLLM reads them with VLLM_TUNED_CONFIG_FOLDER=DIRECTORY, FLA with FLA_CONFIG_DIR=DIRECTORY and
FLA_CACHE_MODE=strict (by default it reads none). SGLang takes vLLM's files from
$SGLANG_MOE_CONFIG_DIR/configs/triton_3_6_0, a root that replaces all that it ships.

A bundle is one JSON file: of each winner, `evidence` holds the config and the key in parts. The files
know neither world size nor constants of a launch: of several winners for one place the newest is written.
A winner that has no place is left out: vLLM's fused MoE needs E, N and M in its key (experts of a rank,
intermediate size, tokens).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

SIZES = ("E", "N", "M")
BLOCKS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
PLAIN = {"num_ctas": 1, "maxnreg": None, "ir_override": None}  # such a file has no others


def vllm(entry: dict[str, Any], files: dict[str, Any]) -> bool:
    """Put the config of a fused MoE at its number of tokens; SGLang reads the same files."""
    key, config = dict(entry["evidence"]["arguments"]), entry["evidence"]["config"]
    value = {**config["kwargs"], "num_warps": config.get("num_warps"), "num_stages": config.get("num_stages")}
    is_moe = all(type(key.get(name)) is int for name in SIZES) and not key.get("block_shape")
    is_whole = all(type(value.get(name)) is int for name in (*BLOCKS, "num_warps", "num_stages"))
    if not (is_moe and is_whole and all(config.get(name, usual) == usual for name, usual in PLAIN.items())):
        return False
    name = f"E={key['E']},N={key['N']},device_name={entry['key']['device'].replace(' ', '_')}"
    name += f",dtype={key['dtype']}" if key.get("dtype") else ""
    files.setdefault(f"{name}.json", {}).setdefault(str(key["M"]), value)
    return True


def fla(entry: dict[str, Any], files: dict[str, Any]) -> bool:
    """Put a kernel's config at the digest of its key."""
    key, kernel = [value for _, value in entry["evidence"]["arguments"]], entry["key"]["kernel"]
    name = hashlib.md5(json.dumps(key, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
    head = {"kernel_name": kernel, "triton_version": entry["key"]["triton_version"], "autotune_entries": {}}
    value = {"autotune_key": key, "config": entry["evidence"]["config"]}
    files.setdefault(f"{kernel}.json", head)["autotune_entries"].setdefault(name, value)
    return True


FORMATS = {"vllm": vllm, "fla": fla}


def tables(bundle: dict[str, Any], name: str) -> tuple[dict[str, Any], list[str]]:
    """Return the files of a format by name, and the kernels and keys that are left out."""
    files: dict[str, Any] = {}
    left_out = []
    for entry in sorted(bundle["entries"], key=lambda entry: entry["created_at"], reverse=True):
        evidence = entry["evidence"]
        is_known = evidence["config"] and evidence["arguments"] and entry["key"]["kernel"].isidentifier()
        if not (is_known and FORMATS[name](entry, files)):
            left_out.append(f"{entry['key']['kernel']}[{entry['key']['key']}]")
    return files, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    files, left_out = tables(json.loads(options.bundle.read_text()), options.format)
    options.directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (options.directory / name.replace("/", "_")).write_text(json.dumps(content, indent=2) + "\n")
    print(f"Wrote {len(files)} files to {options.directory}; left out: {', '.join(left_out) or 'nothing'}")


if __name__ == "__main__":
    main()
