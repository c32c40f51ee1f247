"""Winners as the files that other tools read: stock Triton's own results, configs of FLA, of vLLM and SGLang.

Such files hold neither world size nor constants. Of entries with the same place in a file the newest is
written, and the others are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..codec import to_json
from .winners import Entry

NO_ARGUMENTS = "its key or config is not kept in a form that JSON has, or was tuned before that was kept"


@dataclass
class Files:
    """The files to write, and the entries left out of them."""

    contents: dict[str, Any] = field(default_factory=dict)  # relative path -> JSON
    written: int = 0  # entries
    left_out: list[tuple[Entry, str]] = field(default_factory=list)  # with the reason

    def texts(self) -> dict[str, str]:
        """Return the content of each file, by its relative path."""
        return {path: to_json(content, indent=True) + "\n" for path, content in self.contents.items()}


@dataclass(frozen=True)
class FileEntry:
    """An entry in a file: the path, the names that lead to its value there, and the value."""

    path: str
    names: tuple[str, ...]
    value: Any
    head: Mapping[str, Any] = field(default_factory=dict)  # other fields of a new file


class NotRepresentable(Exception):
    """An entry cannot be written in a format; the message says why."""


def triton_entry(entry: Entry) -> FileEntry:
    """Return the file of `triton.autotune(cache_results=True)`, below Triton's cache directory."""
    evidence = entry.evidence
    if not (evidence.config and re.fullmatch(r"[A-Z2-7]+/\w+\.autotune\.json", evidence.triton_file)):
        raise NotRepresentable(
            "stock Triton keeps no file of it: a config has a hook or is not JSON, or it was interpreted"
        )
    timings = [[dict(evidence.config), 3 * [entry.ms]]]
    return FileEntry(evidence.triton_file, ("configs_timings",), timings, {"key": _values(entry)})


def fla_entry(entry: Entry) -> FileEntry:
    """Return the file of flash-linear-attention for the kernel, and its name of the key."""
    evidence = entry.evidence
    if not (evidence.config and evidence.arguments):
        raise NotRepresentable(NO_ARGUMENTS)
    kernel, key = entry.key.kernel, _values(entry)
    if not re.fullmatch(r"\w+", kernel):
        raise NotRepresentable(f"{kernel!r} is no name of a kernel")
    name = hashlib.md5(json.dumps(key, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
    value = {"autotune_key": key, "config": dict(evidence.config)}
    head = {"kernel_name": kernel, "triton_version": entry.key.triton_version}
    return FileEntry(f"{kernel}.json", ("autotune_entries", name), value, head)


def vllm_entry(entry: Entry) -> FileEntry:
    """Return the file of vLLM and SGLang for experts, and its name of the number of tokens."""
    arguments, config = dict(entry.evidence.arguments), dict(entry.evidence.config)
    if not (arguments and config):
        raise NotRepresentable(NO_ARGUMENTS)
    sizes, blocks = ("E", "N", "M"), ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
    if missing := [name for name in sizes if type(arguments.get(name)) is not int]:
        raise NotRepresentable(f"no fused MoE: its key has no integer {', '.join(missing)}")
    options = ("num_warps", "num_stages")
    value = {**config["kwargs"], **{name: config.get(name) for name in options}}
    if missing := [name for name in (*blocks, *options) if type(value.get(name)) is not int]:
        raise NotRepresentable(f"no fused MoE: its config has no integer {', '.join(missing)}")
    if arguments.get("block_shape"):
        raise NotRepresentable("block_shape: vLLM and SGLang name its file differently")
    others = {"num_ctas": 1, "maxnreg": None, "ir_override": None}
    if kept := [name for name, usual in others.items() if config.get(name, usual) != usual]:
        raise NotRepresentable(f"such a file has no {', '.join(kept)}")
    name = f"E={arguments['E']},N={arguments['N']},device_name={entry.key.device.replace(' ', '_')}"
    if arguments.get("dtype"):
        name += f",dtype={arguments['dtype']}"
    if not re.fullmatch(r"[\w=,.-]+", name):
        raise NotRepresentable(f"{name!r} is no name of a file")
    return FileEntry(f"{name}.json", (str(arguments["M"]),), value)


def _values(entry: Entry) -> list[Any]:
    return [value for _, value in entry.evidence.arguments]


FORMATS: dict[str, Callable[[Entry], FileEntry]] = {
    "triton": triton_entry,
    "fla": fla_entry,
    "vllm": vllm_entry,
}


def files_of(entries: Iterable[Entry], format_name: str) -> Files:
    """Return the files of a format, one of `FORMATS`, for the newest entry of each place."""
    files, owners = Files(), dict[tuple[str, ...], Entry]()
    for entry in sorted(entries, key=lambda entry: entry.created_at, reverse=True):
        try:
            place = FORMATS[format_name](entry)
        except NotRepresentable as reason:
            files.left_out.append((entry, str(reason)))
            continue
        owner = owners.setdefault((place.path, *place.names), entry)
        if owner is not entry:
            files.left_out.append((entry, f"that of {owner.created_at}, {owner.config}, has its place"))
            continue
        files.written += 1
        inner = files.contents.setdefault(place.path, dict(place.head))
        for name in place.names[:-1]:
            inner = inner.setdefault(name, {})
        inner[place.names[-1]] = place.value
    return files
