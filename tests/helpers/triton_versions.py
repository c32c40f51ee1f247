"""Tests that need a newer Triton than the oldest that is supported."""

from __future__ import annotations

import importlib.metadata
import re

import pytest


def installed() -> str:
    return importlib.metadata.version("triton")


def needs_triton(version: str, why: str) -> pytest.MarkDecorator:
    """Skip where Triton is older than `version`, such as "3.9": the one skip that the GPU world allows."""
    reason = f"needs Triton {version}, found {installed()}: {why}"
    return pytest.mark.skipif(_numbers(installed()) < _numbers(version), reason=reason)


def is_explained(reason: str) -> bool:
    """Return whether a skip is one of `needs_triton`, and the Triton here is older than it says."""
    needed = re.search(r"\bneeds Triton (\d+\.\d+),", reason)
    return needed is not None and _numbers(installed()) < _numbers(needed[1])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
