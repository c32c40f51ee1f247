"""Calls of the warp-specialised kernels that compute chunks of ranks, for the model: with small tiles."""

import importlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gluon_machine import now
from gluon_memory import Descriptor, Pointer

BLOCK_M, BLOCK_N, BLOCK_K = 4, 8, 2
GIVEN_UP = 1 << 30
KINDS = pytest.mark.parametrize(
    ("variant", "tensor_memory"),
    [("cooperative", False), ("pingpong", False), ("cooperative", True)],
    ids=["cooperative", "pingpong", "blackwell"],
)


@dataclass(frozen=True)
class Tile:
    """A config, and how the weight lies."""

    variant: str = "cooperative"
    blocks: tuple[int, int, int] = (BLOCK_M, BLOCK_N, BLOCK_K)  # the last in words
    extra_n: int = 0
    buffers: int = 3
    store: tuple[int, int] = (4, 1)
    joined: bool = False
    tensor_memory: bool = False
    by_columns: bool = False
    warps: int = 4

    @property
    def width(self) -> int:
        return self.blocks[1] + self.extra_n

    def of_weight(self, weight: np.ndarray, itemsize: int = 2) -> tuple[Descriptor, Descriptor]:
        """Return the descriptors of a weight [N, K] and of its further columns."""
        block_k = self.blocks[2] * 2 // itemsize
        boxes = [self.blocks[1], self.extra_n or self.blocks[1]]
        of_each = [[box & -box if self.joined else box, block_k] for box in boxes]
        if self.by_columns:
            weight, of_each = weight.T.copy(), [block[::-1] for block in of_each]
        first, further = (Descriptor(weight, block, itemsize) for block in of_each)
        return first, further

    def constants(self) -> dict[str, Any]:
        """Return the kernel's constants, and how many warps it has."""
        block_m, block_n, block_k = self.blocks
        store_n, store_buffers = self.store
        return {
            "VARIANT": self.variant, "BLOCK_M": block_m, "BLOCK_N": block_n, "EXTRA_N": self.extra_n,
            "BLOCK_K": block_k, "NUM_BUFFERS": self.buffers, "STORE_N": store_n,
            "STORE_BUFFERS": store_buffers, "GROUP_M": 2, "JOINED": self.joined,
            "TENSOR_MEMORY": self.tensor_memory, "TRANS_B": not self.by_columns, "warps": self.warps,
        }  # fmt: skip


@dataclass
class Call:
    """A call on one rank, and what its peers and it tell each other by."""

    world: int
    rank: int
    m: int
    n: int
    k: int
    seed: int

    def __post_init__(self) -> None:
        self._rows_of_flags = importlib.import_module("kernels_in_the_model.exchange.flags")
        self.random = random.Random(self.seed)
        self.capacity = self.m + 3
        self.flags = np.zeros(self._rows_of_flags.FLAGS * self.world, dtype=np.int64)
        self.errors = np.zeros(self.world, dtype=np.int64)

    def peers(self) -> list[int]:
        """Return the peers in the order of their chunks."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def flag(self, row: str, peer: int) -> Pointer:
        return Pointer(self.flags, getattr(self._rows_of_flags, row) * self.world + peer)

    def wait_a_while(self, *turns: int) -> None:
        for _ in range(self.random.choice(turns)):
            now().pause()
