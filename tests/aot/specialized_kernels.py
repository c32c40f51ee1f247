"""The warp-specialised kernels of each operation, and how they are compiled for GPUs that are not there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import triton
from compiled import BLACKWELL, HOPPER, SHARED_BYTES, check_fits, compile_for, compiled_on
from gemm_compiled import descriptor_type, in_parallel

from dist_autotune.kernels.ag_gemm import specialized as gathering
from dist_autotune.kernels.ag_gemm.specialized_kernel import specialized_all_gather_gemm
from dist_autotune.kernels.compat import HAS_INLINE_PTX
from dist_autotune.kernels.epilogues import NO_ACTIVATION
from dist_autotune.kernels.gemm import pruning
from dist_autotune.kernels.gemm.configs import blocks_of, shared_bytes
from dist_autotune.kernels.gemm.pruning import prune_chunks
from dist_autotune.kernels.gemm_rs import specialized as scattering
from dist_autotune.kernels.gemm_rs.specialized_kernel import specialized_gemm_reduce_scatter

TARGETS = pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
SCALED = dict.fromkeys(("row_scale_ptr", "column_scale_ptr"), "*fp32")
OF_A_CALL = ("M", "N", "K", "capacity", "rank", "patience_ticks", "size_class")


@dataclass(frozen=True, eq=False)
class SpecializedKernel:
    """A kernel with the types of its arguments, descriptors apart, and its constants besides a config's."""

    kernel: Any
    candidates: list[triton.Config]
    blocks_of: Callable[[dict[str, Any]], dict[str, Any]]
    types: dict[str, str]
    optional: tuple[str, ...]  # pointers that a plain call does not pass
    constants: dict[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()  # arguments that are multiples of 16
    spilled_bytes: int = 0  # of a thread of four warps that share a tile on Hopper

    def compile(
        self,
        config: triton.Config,
        target: Any = HOPPER,
        *,
        dtype: str = "bf16",
        types: dict[str, str] | None = None,
        **constants: Any,
    ) -> Any:
        """Return the compiled kernel; `types` and `constants` are what differs from a plain call."""
        made = {"WORLD": 4, "TENSOR_MEMORY": target is BLACKWELL, "DTYPE": dtype, "TRANS_B": True}
        made |= self.constants | config.kwargs | constants
        out = "bf16" if dtype == "fp8e4nv" else dtype
        all_types = {
            name: descriptor_type(out if name == "c_desc" else dtype, block)
            for name, block in self.blocks_of(made).items()
        }
        all_types |= self.types | (types or {})
        made |= {name: None for name in self.optional if name not in all_types}
        any_value = tuple(name for name in all_types if name not in self.aligned)
        warps = config.num_warps
        return compile_for(target, self.kernel, all_types, made, any_value=any_value, num_warps=warps)

    def usable_on(
        self, target: Any, rows: int, n: int = 8192, *, by_rows: bool = True
    ) -> list[triton.Config]:
        """Return the candidates of a call with so many rows of each rank."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(pruning, "shared_memory_bytes", lambda: SHARED_BYTES[target])
            args = {"M": 4 * rows, "N": n, "K": 8192, "TRANS_B": by_rows}
            return prune_chunks(self.candidates, args, WORLD=4, TENSOR_MEMORY=target is BLACKWELL)

    @functools.cache  # noqa: B019 - there are two
    def compiled_for(self, target: Any) -> list[tuple[triton.Config, Any]]:
        """Return candidates of a large call with what they compile to."""
        configs = compiled_on(target, self.usable_on(target, 2048), "num_warps")
        jobs = [lambda config=config: self.compile(config, target) for config in configs]
        return list(zip(configs, in_parallel(jobs), strict=True))

    def check_fits(
        self, config: triton.Config, compiled: Any, target: Any, *, is_estimated: bool = True
    ) -> None:
        shares = target is HOPPER and config.kwargs["VARIANT"] == "cooperative" and config.num_warps == 4
        used = check_fits(compiled, target, config, spilled=self.spilled_bytes if shares else 0)
        estimate = shared_bytes(config.kwargs, 2, tensor_memory=target is BLACKWELL)
        assert not is_estimated or 0 <= estimate - used["shared_bytes"] <= 1024, config
        assert compiled.metadata.global_scratch_size == 0, config  # descriptors come from the host


GATHER = SpecializedKernel(
    specialized_all_gather_gemm,
    gathering.CANDIDATES,
    blocks_of,
    {
        **{"flags_ptr": "*i32", "errors_ptr": "*i64"},
        **dict.fromkeys(OF_A_CALL, "i32"),
    },
    (*SCALED, "bias_ptr"),
    {"ACTIVATION": NO_ACTIVATION},
)
SCATTER = SpecializedKernel(
    specialized_gemm_reduce_scatter,
    scattering.CANDIDATES,
    scattering.blocks_of_all,
    {
        **{"staged_ptr": "*bf16", "flags_ptr": "*i32", "counts_ptr": "*i32", "errors_ptr": "*i64"},
        **dict.fromkeys((*OF_A_CALL, "first", "chunks"), "i32"),
    },
    ("addend_ptr",),
    aligned=("staged_ptr", "addend_ptr", "counts_ptr", "N"),
    spilled_bytes=16 if HAS_INLINE_PTX else 8,  # numbers that are needed once a tile
)
EACH = pytest.mark.parametrize("kernel", [GATHER, SCATTER], ids=["gather", "scatter"])


def candidate(
    kernel: SpecializedKernel, variant: str, blocks: tuple[int, int, int], warps: int
) -> triton.Config:
    """Return the first candidate like that."""

    def values(config: triton.Config) -> tuple[Any, ...]:
        kwargs = config.kwargs
        return kwargs["VARIANT"], kwargs["BLOCK_M"], kwargs["BLOCK_N"], kwargs["BLOCK_K"], config.num_warps

    return next(config for config in kernel.candidates if values(config) == (variant, *blocks, warps))
