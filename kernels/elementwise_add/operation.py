"""a + b, bit by bit what torch computes, at the speed of the memory: two ways to hide its latency.

pipelined           plain Triton: the loop's next loads are under way while this one's are added
warp_specialized    Gluon, Hopper and Blackwell: partitions that load, add and store (`specialized`)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..configs import INTERPRETED, do_bench
from ..matrices import Block, Matrix, as_matrix, describe, set_block
from ..tensors import check_no_gradient
from .specialized import warp_specialized_add

VARIANTS = ("auto", "pipelined", "warp_specialized")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED_PROGRAMS = 3
FLAT_COLUMNS = 256  # of the matrix that contiguous memory is taken for


def elementwise_add(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, variant: str = "auto"
) -> torch.Tensor:
    """Return a + b for contiguous tensors of one shape, type (fp16, bf16 or fp32) and device.

    `auto` is `warp_specialized` where TMA can address the tensors: on Hopper and Blackwell, with a number of
    elements that is a multiple of 256 or rows of a multiple of 16 bytes, beginning at a multiple of 16 bytes.
    Asked for by name elsewhere, on a GPU, it raises ValueError. On the CPU, in the interpreter, everything is
    `pipelined`.
    """
    check_no_gradient("elementwise_add", a=a, b=b, out=out)
    out = torch.empty_like(a) if out is None else out
    _check(a, b, out, variant)
    if a.numel() == 0:
        return out
    if INTERPRETED or a.device.type != "cuda":
        _add_pipelined(a, b, out, INTERPRETED_PROGRAMS)
        return out
    with torch.cuda.device(a.device):
        properties = torch.cuda.get_device_properties(a.device)
        programs = 2 * properties.multi_processor_count
        rows = [as_rows(tensor) for tensor in (a, b, out)]
        can = not torch.version.hip and properties.major in (9, 10) and None not in rows
        if variant == "warp_specialized" and not can:
            raise ValueError(
                f"TMA cannot address these tensors of shape {tuple(a.shape)} on {properties.name}; "
                "use variant='auto'"
            )
        if can and variant != "pipelined":
            launch_warp_specialized([matrix for matrix in rows if matrix is not None], programs)
        else:
            _add_pipelined(a, b, out, programs)
    return out


def _check(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, variant: str) -> None:
    if variant not in VARIANTS:
        raise ValueError(f"there is no variant {variant!r}; there are {', '.join(map(repr, VARIANTS))}")
    if a.dtype not in DTYPES:
        raise TypeError(f"a is {a.dtype}; elementwise_add takes {', '.join(map(str, DTYPES))}")
    for name, tensor in (("b", b), ("out", out)):
        if tensor.shape != a.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, a has {tuple(a.shape)}; nothing is expanded"
            )
        if tensor.dtype != a.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, a is {a.dtype}; convert one of them")
        if tensor.device != a.device:
            raise ValueError(f"{name} is on {tensor.device}, a is on {a.device}; move one of them")
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; pass {name}.contiguous()")
    if a.device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"a is on {a.device}; move it to a GPU, or set TRITON_INTERPRET=1 before Triton is imported"
        )


def as_rows(tensor: torch.Tensor) -> Matrix | None:
    """Return contiguous memory as rows that TMA can address, if it can."""
    if tensor.numel() % FLAT_COLUMNS == 0:
        return as_matrix(tensor.view(-1, FLAT_COLUMNS))
    matrix = as_matrix(tensor.view(-1, tensor.shape[-1])) if tensor.dim() else None
    return None if matrix is None or matrix.transposed else matrix


# ---- plain Triton


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": block, "STAGES": stages}, num_warps=warps)
        for block, stages, warps in (
            [(256, 1, 4), (64, 2, 4)]
            if INTERPRETED
            else [(2048, 4, 4), (4096, 3, 8), (8192, 2, 8), (1024, 5, 4)]
        )
    ],
    key=["n"],
    do_bench=do_bench,
)
@triton.jit
def pipelined_add(a_ptr, b_ptr, out_ptr, n, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Write out = a + b; STAGES - 1 blocks are loaded ahead."""
    offs = tl.arange(0, BLOCK)
    for block in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(block, tl.int64) * BLOCK + offs
        a = tl.load(a_ptr + at, mask=at < n)
        b = tl.load(b_ptr + at, mask=at < n)
        # In float32: the sum of two halves, rounded once more, is rounded as if once.
        total = a.to(tl.float32) + b.to(tl.float32)
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < n)


def _add_pipelined(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, programs: int) -> None:
    n = a.numel()
    pipelined_add[lambda meta: (min(programs, triton.cdiv(n, meta["BLOCK"])),)](a, b, out, n)


# ---- Gluon


def _set_blocks(args):
    for name in ("a_desc", "b_desc", "out_desc"):
        set_block(args[name], Block(args["ROWS"], args["COLUMNS"]))


# `maxnreg`: without it the compiler gives 8 warps all registers of an SM, and one program is alone on it.
ADD_CANDIDATES = [
    triton.Config(
        {"ROWS": rows, "COLUMNS": columns, "BUFFERS": buffers, "OUT_BUFFERS": out_buffers},
        num_warps=4,
        num_stages=1,
        maxnreg=128,
        pre_hook=_set_blocks,
    )
    for rows, columns, buffers, out_buffers in (
        (32, 64, 4, 2),
        (64, 64, 2, 2),
        (32, 64, 3, 1),
        (16, 64, 6, 4),
    )
]

tuned_warp_specialized_add = triton.autotune(ADD_CANDIDATES, key=["rows", "columns", "DTYPE"])(
    warp_specialized_add
)


def launch_warp_specialized(matrices: list[Matrix], programs: int) -> None:
    """Write the third of the matrices as the sum of the others, on the current stream."""
    a = matrices[0]

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (min(programs, triton.cdiv(a.rows, meta["ROWS"]) * triton.cdiv(a.columns, meta["COLUMNS"])),)

    any_block = Block(8, 64)  # `_set_blocks` sets the right ones
    descriptors = [describe(matrix, any_block) for matrix in matrices]
    tuned_warp_specialized_add[grid](*descriptors, a.rows, a.columns, DTYPE=str(a.dtype))
