"""Kernels with known times: tables recorded on one H100, and a model whose fields act nearly apart."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dist_autotune.search.expectation.fields import LaunchMs
from dist_autotune.triton_api.footprint import fill

PROCESSORS = 132
TABLES = Path(__file__).parents[2] / "tests" / "data" / "tables_h100.json.gz"  # tells how it was recorded
SUBJECTS = (
    "norm", "matmul", "many",  # the models' constants were chosen with these
    "norm_again", "persistent", "moe", "swiglu", "swiglu_backward", "cross_entropy",
)  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A key of a kernel, as a session meets it."""

    kernel: str
    key: str
    ms: dict[str, float]  # by the config's text, the first one first
    fills: dict[str, float] = field(default_factory=dict)  # how much of the SMs' time a launch fills


@dataclass(frozen=True)
class Table:
    """A kernel of this project, of Liger or of flash-linear-attention: agreed medians of three samples."""

    name: str
    configs: list[str]
    keys: list[str]
    ms: list[list[float | None]]  # of each key; 0: pruned, None: banned
    programs: list[list[int | None]]

    def candidates(self, key: str) -> list[str]:
        """Return the configs that pruning has left, those that were banned among them."""
        row = self.ms[self.keys.index(key)]
        return [text for text, ms in zip(self.configs, row, strict=True) if ms != 0]

    def told(self, key: str) -> dict[str, float]:
        row, fills = self.ms[self.keys.index(key)], self.fills(key)
        return {text: LaunchMs(ms, fills[text]) for text, ms in zip(self.configs, row, strict=True) if ms}

    def fills(self, key: str) -> dict[str, float]:
        counts = zip(self.configs, self.programs[self.keys.index(key)], strict=True)
        return {text: fill(programs, PROCESSORS) for text, programs in counts if programs}

    def regret(self, key: str, text: str) -> float:
        """Return by how much a config loses; one that was banned: inf."""
        told = self.told(key)
        return told.get(text, math.inf) / min(told.values()) - 1

    def kernel(self, key: str, *, only: str = "") -> Kernel:
        told = {text: ms for text, ms in self.told(key).items() if only in text}
        return Kernel(self.name, key, told, self.fills(key))


@cache
def table(subject: str) -> Table:
    return next(tables(subject))


def tables(subject: str) -> Iterator[Table]:
    kernels = json.loads(gzip.decompress(TABLES.read_bytes()))["kernels"]
    names = "kernel", "configs", "keys", "ms", "programs"
    return (Table(*(each[name] for name in names)) for each in kernels if each["subject"] == subject)


def two_kernels() -> list[Kernel]:
    """Return 32 keys of two kernels: RMSNorm, and the product with some of its configs."""
    norm, product = table("norm"), table("matmul")
    products = (product.kernel(key, only="BLOCK_K: 32") for key in product.keys[:24])
    return [*(norm.kernel(key) for key in norm.keys[:8]), *products]


def third_party(hidden: int) -> list[Kernel]:
    """Return 17 kernels of flash-linear-attention, each with one key, and four of Liger's with 27."""
    kernels = [*tables(f"fla{hidden}")]
    kernels += [table(name) for name in ("block_norm", "swiglu", "swiglu_backward", "cross_entropy")]
    return [each.kernel(key) for each in kernels for key in each.keys if len(each.told(key)) > 1]


def of_fields(seed: int) -> list[Kernel]:
    """Return three keys of a kernel with 192 configs, whose fields act nearly apart."""
    rng = random.Random(seed)
    fields = {"BLOCK_M": (32, 64, 128, 256), "BLOCK_N": (32, 64, 128, 256)}
    fields |= {"num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4)}
    slower = {(name, value): abs(rng.gauss(0, 0.25)) for name, values in fields.items() for value in values}
    kernels = []
    for size in (1024, 2048, 4096):
        here = {of: log_ms * rng.lognormvariate(0, 0.25) for of, log_ms in slower.items()}
        ms = {}
        for values in itertools.product(*fields.values()):
            config = dict(zip(fields, values, strict=True))
            text = ", ".join(f"{name}: {value}" for name, value in config.items())
            ms[text] = 1e-4 * size * math.exp(sum(map(here.__getitem__, config.items())) + rng.gauss(0, 0.02))
        kernels.append(Kernel("k", f"{size}, 'fp16'", ms))
    return kernels
