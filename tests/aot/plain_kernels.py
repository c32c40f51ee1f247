"""The kernels in plain Triton of each operation, and how they are compiled for GPUs that are not there."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from compiled import BLACKWELL, CDNA3, HOPPER, SHARED_BYTES, check_fits, compile_for

from dist_autotune.kernels import configs
from dist_autotune.kernels.ag_gemm.plain import all_gather_gemm
from dist_autotune.kernels.epilogues import NO_ACTIVATION
from dist_autotune.kernels.gemm_rs.plain import gemm_reduce_scatter
from dist_autotune.kernels.moe.ag_moe_kernel import GPU_CANDIDATES as DISPATCH_CANDIDATES
from dist_autotune.kernels.moe.ag_moe_kernel import all_gather_moe
from dist_autotune.kernels.moe.moe_rs_kernel import GPU_CANDIDATES as COMBINE_CANDIDATES
from dist_autotune.kernels.moe.moe_rs_kernel import moe_reduce_scatter

TARGETS = {"hopper": HOPPER, "blackwell": BLACKWELL, "cdna3": CDNA3}
ON_EACH = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
SCALES = ("row_scale_ptr", "column_scale_ptr")
SCALED = dict.fromkeys(SCALES, "*fp32")


@dataclass(frozen=True)
class PlainKernel:
    """A tuned kernel: the types of its arguments, and its constants besides a config's."""

    tuner: Any
    candidates: list[Any]
    types: dict[str, str]
    constants: dict[str, Any]
    sizes: dict[str, int]  # of a large call, by which candidates are pruned
    # Bytes of a thread, and on CDNA3 scalar registers, which go to vector ones.
    spilled: dict[Any, int] = field(default_factory=lambda: dict.fromkeys(TARGETS.values(), 0))

    def compile(
        self, config: Any, target: Any = HOPPER, *, types: dict[str, str] | None = None, **constants: Any
    ) -> Any:
        """Return the compiled kernel; `types` and `constants` are what differs from a plain call in bf16."""
        types = self.types | (types or {})
        on_nvidia = target.backend == "cuda"
        made = {"WORLD": 8, "TMA_LEGAL": on_nvidia, "UPCAST": False, "BY_COLUMNS": False} | self.constants
        made |= {"FENCE": on_nvidia} if "FENCE" in self.tuner.arg_names else {}
        made |= config.kwargs | constants
        return compile_for(
            target,
            self.tuner.fn,
            {name: kind for name, kind in types.items() if name not in constants},
            {name: value for name, value in made.items() if name not in types or name in constants},
            any_value=tuple(name for name in self.tuner.fn.do_not_specialize if name not in constants),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def usable_on(self, target: Any) -> list[Any]:
        """Return the candidates that a large call on this device leaves in the race."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(configs, "shared_memory_bytes", lambda: SHARED_BYTES[target])
            patched.setattr(torch.version, "hip", "6.4" if target is CDNA3 else None)
            args = {"a_ptr": torch.empty(1, dtype=torch.bfloat16)} | self.sizes
            return configs.prune_overlapped(self.candidates, args, WORLD=8, TMA_LEGAL=target is not CDNA3)

    def check_fits(self, compiled: Any, target: Any, what: Any = "") -> None:
        check_fits(compiled, target, what, spilled=self.spilled[target])


def in_type(kernel: PlainKernel, dtype: str) -> dict[str, str]:
    """Return the types of the kernel's arguments with another one for bf16."""
    return {name: kind.replace("bf16", dtype) for name, kind in kernel.types.items()}


IN_FP8 = dict.fromkeys(("a_ptr", "b_ptr"), "*fp8e4nv") | SCALED
OF_GEMM = {"M": 8192, "N": 8192, "K": 8192}
OF_EXPERTS = {"size_class": 16384, "N": 4096, "K": 4096}
GATHER = PlainKernel(
    all_gather_gemm,
    configs.GPU_CANDIDATES,
    {
        **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16"),
        **{"flags_ptr": "*i32", "counts_ptr": "*i32", "errors_ptr": "*i64", "table_ptr": "*i64"},
        **dict.fromkeys(("M", "N", "K", "capacity", "stride_b", "stride_cm"), "i32"),
        **dict.fromkeys(("rank", "patience_ticks", "size_class"), "i32"),
    },
    {"bias_ptr": None, "ACTIVATION": NO_ACTIVATION, "STORERS": 0, **dict.fromkeys(SCALES)},
    OF_GEMM,
)
SCATTER = PlainKernel(
    gemm_reduce_scatter,
    configs.GPU_CANDIDATES,
    {
        **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr", "partial_ptr", "staged_ptr", "addend_ptr"), "*bf16"),
        **dict.fromkeys(("flags_ptr", "counts_ptr"), "*i32"),
        **dict.fromkeys(("table_ptr", "errors_ptr"), "*i64"),
        **dict.fromkeys(("M", "N", "K", "capacity", "stride_am", "stride_b", "stride_cm"), "i32"),
        **dict.fromkeys(("first", "chunks", "rank", "patience_ticks", "size_class"), "i32"),
    },
    {"HAS_ADDEND": False, "STORES": False, **dict.fromkeys(SCALES)},
    OF_GEMM,
    {HOPPER: 0, BLACKWELL: 72, CDNA3: 6},  # on Blackwell with tiles of 128 x 256
)
OF_A_PLAN = dict.fromkeys(("rows_ptr", "sources_ptr", "ends_ptr", "tables_ptr", "flags_ptr"), "*i32")
OF_CHOICES = ("size_class", "experts", "topk", "capacity", "rank", "patience_ticks")
SIZES = ("N", "K", "stride_be", "stride_b", "stride_cm")
DISPATCH = PlainKernel(
    all_gather_moe,
    DISPATCH_CANDIDATES,
    {
        **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16"),
        **OF_A_PLAN,
        "errors_ptr": "*i64",
        **dict.fromkeys((*SIZES, *OF_CHOICES), "i32"),
    },
    {"SORTED": False, "HEIGHTS": 4},
    OF_EXPERTS,
)
COMBINE = PlainKernel(
    moe_reduce_scatter,
    COMBINE_CANDIDATES,
    {
        **DISPATCH.types,
        **dict.fromkeys(("products_ptr", "partial_ptr", "staged_ptr"), "*bf16"),
        "weights_ptr": "*fp32",
        **dict.fromkeys(("offsets_ptr", "counters_ptr"), "*i32"),
        **dict.fromkeys(("stride_am", "tokens_per_rank", "first_part", "parts"), "i32"),
        "table_ptr": "*i64",
    },
    {"SORTED": False, "A_TMA_LEGAL": False, "STORES": False},
    OF_EXPERTS,
    {HOPPER: 8, BLACKWELL: 56, CDNA3: 25},  # its many loops; ptxas settles for 128 registers on Blackwell
)
PLAIN = {"gather": GATHER, "scatter": SCATTER, "dispatch": DISPATCH, "combine": COMBINE}
EACH = pytest.mark.parametrize("kernel", PLAIN.values(), ids=PLAIN)
