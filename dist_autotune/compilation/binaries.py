"""Binaries in Triton's cache, which the processes of a host share."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

from triton import knobs


def why_not_shared() -> str:
    """Return why a binary that another process compiles would not be found; empty if it is."""
    if knobs.compilation.always_compile:
        return "TRITON_ALWAYS_COMPILE is set"
    if knobs.cache.manager_class is not None:
        return "TRITON_CACHE_MANAGER keeps them elsewhere"
    if getattr(knobs.runtime, "add_stages_inspection_hook", None) is not None:
        return "a hook changes the compiler's stages, and with them the names of binaries"
    return ""


def has_binary(key: str) -> bool:
    """Return whether Triton will find the binary: its list of files, written last, and every file."""
    digest = hashlib.sha256(key.encode()).digest()
    name = base64.b32encode(digest).decode().rstrip("=")
    try:
        (listing,) = (Path(knobs.cache.dir) / name).glob("__grp__*.json")
        paths = json.loads(listing.read_bytes())["child_paths"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(map(os.path.exists, paths))
