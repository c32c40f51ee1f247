"""The host side of the warp-specialised family: whether it can run, and the way to a launch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..configs import INTERPRETED, take_first
from ..matrices import DESCRIPTORS_KEPT, Matrix, describe
from ..operation import load
from ..persistent_gemm.blocks import blocks_of
from ..settled_launch import SettledLaunches
from .call import Call
from .specialized_candidates import CANDIDATES, fewest_rows, prune
from .specialized_kernel import specialized_all_gather_gemm

TYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
STAMPS_PER_TILE = 4  # see `room_for_stamps`

tuned = triton.autotune(
    configs=CANDIDATES,
    key=["M", "N", "K", "DTYPE"],
    prune_configs_by={"early_config_prune": prune},
    do_bench=take_first,  # outside a tuned function: a launch waits for peers, who would pick another config
)(specialized_all_gather_gemm)


class Shape(NamedTuple):
    """What the choice of a config and the compiled kernel depend on. Each call hashes one: no dataclass."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    world_size: int
    programs: int
    device: torch.device
    stamps: bool

    def sizes(self) -> dict[str, int]:
        """Return the sizes that are in the key of the tuning, in the order of the kernel's parameters."""
        return {"M": self.m, "N": self.n, "K": self.k}

    def constants(self) -> dict[str, Any]:
        """Return the constexprs of the kernel that no config sets, in the order of its parameters."""
        return {
            "WORLD": self.world_size,
            "TENSOR_MEMORY": capability(self.device) == 10,
            "DTYPE": TYPE_NAMES[self.dtype],
            "STAMPS": self.stamps,
        }

    def tiles(self, meta: dict[str, Any]) -> int:
        """Return how many tiles there are under a config."""
        rows = triton.cdiv(self.m // self.world_size, meta["BLOCK_M"])
        return int(self.world_size * rows * triton.cdiv(self.n, meta["BLOCK_N"] + meta["EXTRA_N"]))

    def grid(self, meta: dict[str, Any]) -> tuple[int, int, int]:
        """Return how many programs run under a config."""
        return min(self.programs, self.tiles(meta)), 1, 1


_SETTLED: SettledLaunches[Shape] = SettledLaunches(tuned, blocks_of)


class Addresses(NamedTuple):
    """Where a launch reads and writes: rows that are `k` or `n` long and a pitch apart, in elements."""

    gather: int
    slots_rows: int
    k: int
    weight: int
    n: int
    weight_pitch: int
    out: int
    out_rows: int
    out_pitch: int
    dtype: torch.dtype


@functools.lru_cache
def capability(device: torch.device) -> int:
    """Return the major compute capability of an NVIDIA GPU on which kernels run, else 0."""
    if device.type != "cuda" or INTERPRETED or torch.version.hip:
        return 0
    return int(torch.cuda.get_device_properties(device).major)


def can_run(gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, rows: int) -> bool:
    """Return whether `launch` takes these: a GPU that has a body, TMA's alignment, no chunk below a tile.

    gather [slots, capacity, K], weight [N, K] and out [world_size * rows, N] have contiguous rows. The answer
    depends on addresses and on N: it is this rank's own.
    """
    major = capability(gather.device)
    if major not in (9, 10) or gather.dtype not in TYPE_NAMES:
        return False
    if rows < fewest_rows(tensor_memory=major == 10) or weight.shape[0] == 1:
        return False
    return all(matrix.is_addressable() for matrix in _matrices(_addresses(gather, weight, out)))


def launch(
    gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: Call, *, only_load: bool = False
) -> None:
    """Write the product of all chunks to `out`, on the current stream; only where `can_run`.

    only_load: write nothing, but load what would.
    """
    addresses = _addresses(gather, weight, out)
    m, n, k, stamps = addresses.out_rows, addresses.n, addresses.k, call.stamps
    shape = Shape(m, n, k, addresses.dtype, call.world_size, call.programs, weight.device, stamps is not None)
    words = (call.words, call.errors, call.errors if stamps is None else stamps)
    scalars = (call.capacity, call.rank, call.epoch, call.base, call.pushed, call.patience_ticks)
    settled = _SETTLED.find(shape)
    if settled is not None and only_load:
        return
    if settled is not None:
        descriptors = _descriptors(addresses, settled.blocks)
        settled.run(*descriptors, *words, m, n, k, *scalars, *settled.constants)
        return
    any_block = (8, 64)  # the config's `pre_hook` sets the right ones
    made = [describe(matrix, any_block) for matrix in _matrices(addresses)]
    sizes, constants = shape.sizes(), shape.constants()
    if only_load:
        load(tuned, shape.grid, *made, *words, *sizes.values(), *scalars, **constants)
        return
    compiled = tuned[shape.grid](*made, *words, *sizes.values(), *scalars, **constants)
    dtypes = tuple(str(tensor.dtype) for tensor in words)
    _SETTLED.remember(shape, compiled, shape.grid, sizes, constants, dtypes)


def room_for_stamps(out: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return `Call.stamps` for a call that writes `out`: -1, with a row for each tile under any config.

    Tiles are numbered in the order of visits: chunk `rank` first, then `rank` + 1. A row that stays -1 is of
    no tile. Otherwise: ns before the tile's wait, behind it, and when its stores had been started; the SM.
    """
    m, n = out.shape
    shape = Shape(m, n, 0, out.dtype, world_size, 0, out.device, stamps=True)
    tiles = max(shape.tiles(config.kwargs) for config in tuned.configs)
    return torch.full((tiles, STAMPS_PER_TILE), -1, dtype=torch.int64, device=out.device)


def _addresses(gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Addresses:
    slots, capacity, k = gather.shape
    n = weight.shape[0]
    return Addresses(
        gather.data_ptr(),
        slots * capacity,
        k,
        weight.data_ptr(),
        n,
        weight.stride(0),
        out.data_ptr(),
        out.shape[0],
        out.stride(0),
        weight.dtype,
    )


@functools.lru_cache(maxsize=DESCRIPTORS_KEPT)
def _matrices(at: Addresses) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """Return A, B, B again for its further columns, and C."""
    a = Matrix(at.gather, at.slots_rows, at.k, at.k, at.dtype, transposed=False)
    b = Matrix(at.weight, at.n, at.k, at.weight_pitch, at.dtype, transposed=False)
    c = Matrix(at.out, at.out_rows, at.n, at.out_pitch, at.dtype, transposed=False)
    return a, b, b, c


@functools.lru_cache(maxsize=DESCRIPTORS_KEPT)
def _descriptors(at: Addresses, blocks: tuple[tuple[int, int], ...]) -> tuple[TensorDescriptor, ...]:
    """Return the descriptors of a settled launch; not to be changed."""
    return tuple(describe(matrix, block) for matrix, block in zip(_matrices(at), blocks, strict=True))
