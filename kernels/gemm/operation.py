"""`persistent_matmul`: a @ b by persistent kernels, each program of which computes many tiles.

Read it in this order:

    configs, pruning       the candidates, and an estimate of their time
    launch, copies         the host side of the Gluon body
    body, problem, roles   the Gluon body for Hopper and Blackwell: tiles, schedules, warp roles
    operands, mma, any_width, epilogue     its parts

The body in plain Triton is here, for AMD's GPUs, for strides that TMA cannot take, and for the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from ..configs import INTERPRETED, capability, do_bench
from ..epilogues import (
    NO_ACTIVATION,
    Epilogue,
    apply_epilogue,
    apply_scales,
    result_columns,
    sums_of_a_result,
)
from ..launches.settled import TunedKernel, TunedLaunch
from ..matrices import LINE_BYTES
from ..products import multiply
from ..tensors import (
    FP8,
    Apart,
    check_distinct,
    check_fp8,
    check_no_gradient,
    check_scale,
    layout_of,
    remember,
)
from ..tiles import chiplet_number, grouped_tile
from .configs import NAMES, PLAIN_CANDIDATES, class_of_rows
from .launch import INPUT_DTYPES, execute, plan_launch
from .pruning import prune_plain

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SCHEDULERS = ("auto", "grouped", "chiplet")

CHIPLETS = 8  # of an MI300X or MI350X, each with an L2 cache of its own
INTERPRETED_PROGRAMS = 3  # the interpreter runs them one after the other

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Epilogue], None]  # of a, b, out and epilogue

_PLANS: dict[Hashable, tuple[Run, Apart]] = {}  # by the layouts of arguments that have been checked


def persistent_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    variant: str = "auto",
    scheduler: str = "auto",
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """Return activation(scale_a * (a @ b) * scale_b + bias) for a [M, K] and b [K, N]; forward only.

    a and b are fp16, bf16 or float8_e4m3fn. Products are summed, the sums scaled by row (`scale_a`, [M] or
    [M, 1]) and by column (`scale_b`, [N] or [1, N]), `bias` [N] is added and `activation` ("relu", "gelu",
    "gelu_tanh" or "silu") applied in float32; then the result is rounded, once. Scales are contiguous and
    float32; the bias is contiguous, in fp16, bf16 or fp32.

    A gated activation makes activation(gate) * up [M, N / 2] of gate and up: "swiglu" by silu,
    "geglu_tanh" by gelu_tanh. b is the `.T` of a weight of `interleave_gate_up`, and scale_b and the bias are
    interleaved, too; N is a multiple of 16.

    Operands in fp8 are both contiguous along K, as a weight's `weight.T` is. Hopper's tensor cores add up
    their products with fewer bits than float32 has, as in `torch._scaled_mm(..., use_fast_accum=True)`.

    The result has the type of `out`, or `out_dtype`, or a's, bf16 for fp8: fp16, bf16 or fp32. All strides
    are allowed for it, and for operands of 2 bytes. `out` overlaps neither operand, scales nor bias: they are
    read while it is written.

    `variant` is one of VARIANTS or PARTS; `auto` takes the fastest, as tuned. The first launch of a shape
    tunes: in context inside `contextual_autotune`, otherwise Triton tunes it alone. Numbers of rows M are
    tuned in classes, which end at multiples of 16 up to 128, then at 160, 192, 224, 256, 320 and so on, four
    to each doubling. `programs` is the number of programs: by default one on each SM; fewer leave SMs to
    kernels beside it. `scheduler` is the order in which the body in plain Triton takes the tiles (see
    `tiles`): "grouped" or "chiplet", which `auto` takes on AMD's GPUs.

    The variants run on Hopper and Blackwell, where TMA can address a, b and out: each begins at a multiple
    of 16 bytes and has one contiguous dimension, the other's stride being a multiple of 16 bytes. Elsewhere
    every variant is computed by the body in plain Triton: on other GPUs, with other strides, and on the CPU,
    in Triton's interpreter.

    On Hopper, matrices that TMA cannot address pass through scratch memory where that should take less time
    (see `copies`). A call takes it from torch: each matrix with its rows padded to multiples of 128 bytes.

    Raises TypeError or ValueError for arguments that cannot be multiplied.
    """
    tensors = {"a": a, "b": b, "out": out, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    check_no_gradient("persistent_matmul", **tensors)
    check_choices(variant, scheduler, programs)
    if out is None:
        check_operands(a, b)
        out_dtype = out_dtype or (torch.bfloat16 if a.dtype == FP8 else a.dtype)
        check_out_dtype(out_dtype)
        tensors["out"] = out = a.new_empty(result_shape(a, b, activation), dtype=out_dtype)
    lie = (layout_of(each, LINE_BYTES) for each in tensors.values())
    key = (*lie, activation, variant, scheduler, programs)
    epilogue = Epilogue(bias, activation, scale_a, scale_b)
    known = _PLANS.get(key)
    if known is None or out_dtype not in (None, out.dtype):
        planned = _plan(a, b, out, epilogue, out_dtype, variant, scheduler, programs)
        known = remember(_PLANS, key, planned)
    run, apart = known
    apart.check(out, a, b, bias, scale_a, scale_b)
    with _on(a.device):
        run(a, b, out, epilogue)
    return out


def _plan(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue,
    out_dtype: torch.dtype | None,
    variant: str,
    scheduler: str,
    programs: int | None,
) -> tuple[Run, Apart]:
    """Check the arguments; return what runs calls of these layouts, and the check that `out` lies apart."""
    check_operands(a, b)
    (rows, k), columns, (bias, activation, scale_a, scale_b) = a.shape, b.shape[1], epilogue
    epilogue.check(columns, a.device)
    check_out(out, result_shape(a, b, activation), a.device, out_dtype)
    check_scale("scale_a", scale_a, rows, (rows, 1), a.device)
    check_scale("scale_b", scale_b, columns, (1, columns), a.device)
    apart = Apart(out, a=a, b=b, bias=bias, scale_a=scale_a, scale_b=scale_b)
    if 0 in (out.numel(), k):
        return _write_sums_of_nothing, apart
    if not _is_on_gpu(a):
        if not INTERPRETED:
            raise ValueError(
                f"a is on {a.device}; move it to a GPU, or set TRITON_INTERPRET=1 before Triton is imported"
            )
        return _plan_plain(a, b, out, activation, scheduler, programs or INTERPRETED_PROGRAMS), apart
    if a.dtype == FP8:
        check_fp8(a.device)
    major, sms = _device(a.device)
    programs = programs or sms
    if major in (9, 10):
        plan = plan_launch(a, b, out, variant, programs, activation, tensor_memory=major == 10)
        if plan is not None:
            return functools.partial(execute, plan), apart
    return _plan_plain(a, b, out, activation, scheduler, programs), apart


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and not INTERPRETED


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the GPU the current device, which it mostly is."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def _device(device: torch.device) -> tuple[int, int]:
    """Return NVIDIA's major compute capability, 0 for others, and the number of SMs."""
    return capability(device), torch.cuda.get_device_properties(device).multi_processor_count


def _write_sums_of_nothing(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue) -> None:
    out.copy_(epilogue.of(a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float32)))


def _plan_plain(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, activation: str | None, scheduler: str, programs: int
) -> Run:
    """Return what launches the body in plain Triton for tensors of these layouts."""
    rows, columns = a.shape[0], b.shape[1]
    if scheduler == "auto":
        scheduler = "chiplet" if torch.version.hip else "grouped"

    def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
        tiles = triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(columns, meta["BLOCK_N"])
        return min(programs, tiles), 1, 1

    sizes = (rows, columns, a.shape[1], *a.stride(), *b.stride(), *out.stride())
    upcasts = INTERPRETED and a.dtype != torch.float16
    constants = {"SCHEDULE": scheduler, "CHIPLETS": CHIPLETS, "UPCAST": upcasts}
    constants["ACTIVATION"] = activation or NO_ACTIVATION
    launch = TunedLaunch(_KERNEL, grid, constants, numbers=(*sizes, programs, class_of_rows(rows)))

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, epilogue: Epilogue) -> None:
        launch((), (a, b, out, epilogue.scale_a, epilogue.scale_b, epilogue.bias), ())

    return run


# ---- checks of arguments


def check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise unless a @ b is a product that the kernels can compute."""
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; persistent_matmul takes tensors")
        if tensor.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; persistent_matmul takes matrices")
        if tensor.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}; persistent_matmul takes {_texts(INPUT_DTYPES)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a [{a.shape[0]}, {a.shape[1]}] @ b [{b.shape[0]}, {b.shape[1]}]: a has {a.shape[1]} columns, "
            f"b has {b.shape[0]} rows; a weight [N, K] is passed as weight.T"
        )
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype}, b is {b.dtype}; convert one of them")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device}, b is on {b.device}; move one of them")
    if a.dtype != FP8:
        return
    for name, tensor, along_k in (("a", a, 1), ("b", b, 0)):
        if tensor.stride(along_k) != 1 and tensor.shape[along_k] > 1:
            advice = "a.contiguous()" if name == "a" else "weight.T of a weight [N, K], or b.T.contiguous().T"
            raise ValueError(
                f"{name} {list(tensor.shape)} has strides {tensor.stride()}; the tensor cores read fp8 only "
                f"contiguous along K: pass {advice}"
            )


def result_shape(a: torch.Tensor, b: torch.Tensor, activation: str | None) -> tuple[int, int]:
    """Return the shape of the result of a @ b after its activation."""
    return a.shape[0], result_columns(activation, b.shape[1])


def check_out(
    out: torch.Tensor, wanted: tuple[int, int], device: torch.device, out_dtype: torch.dtype | None
) -> None:
    """Raise unless a result of that shape and device can be written to `out`."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}; persistent_matmul writes to tensors")
    if tuple(out.shape) != wanted:
        raise ValueError(f"out has shape {tuple(out.shape)}; the result has {wanted}")
    if out.device != device:
        raise ValueError(f"out is on {out.device}, a is on {device}; move one of them")
    check_out_dtype(out.dtype)
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"out is {out.dtype}, out_dtype says {out_dtype}; leave one of them out")
    check_distinct(out)


def check_out_dtype(dtype: torch.dtype) -> None:
    """Raise unless the product can be written as that type."""
    if dtype not in OUT_DTYPES:
        raise TypeError(f"out is {dtype}; persistent_matmul writes {_texts(OUT_DTYPES)}")


def check_choices(variant: str, scheduler: str, programs: int | None) -> None:
    """Raise unless there are such a variant and scheduler, and `programs` is a number of them or None."""
    for kind, name, known in (("variant", variant, NAMES), ("scheduler", scheduler, SCHEDULERS)):
        if name not in known:
            raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(map(repr, known))}")
    if programs is not None and not isinstance(programs, int):
        raise TypeError(f"programs is {programs!r}; it must be a whole number")
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; it must be at least 1")


def _texts(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


# ---- the body in plain Triton


@triton.autotune(
    configs=PLAIN_CANDIDATES,
    key=[
        *("m_class", "N", "K", "stride_am", "stride_ak", "stride_bk", "stride_bn", "programs", "SCHEDULE"),
        "ACTIVATION",  # and the types of all tensors
    ],
    prune_configs_by={"early_config_prune": prune_plain},
    do_bench=do_bench,
)
@triton.jit(do_not_specialize=["programs", "m_class"])
def plain_gemm(
    a_ptr,
    b_ptr,
    c_ptr,
    row_scale_ptr,  # float32 [M], or None
    column_scale_ptr,  # float32 [N], or None
    bias_ptr,  # [N], or None
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    programs,  # the most that run at once; for the key of the tuning
    m_class,  # of M, see `configs`; for the key of the tuning
    SCHEDULE: tl.constexpr,
    CHIPLETS: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter has no arithmetic in bfloat16 and fp8
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Write activation(row_scale * (A @ B) * column_scale + bias), half as wide if it is gated.

    Each program takes tiles until the schedule has no more for it.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    visit = 0
    number = _number(visit, tiles, SCHEDULE, CHIPLETS)
    while number < tiles:
        pid_m, pid_n = grouped_tile(number, tiles_m, tiles_n, GROUP_M)
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows and columns beyond the edge read the first one: in bounds, and no mask in the K loop.
        a_rows = tl.cast(tl.where(rows < M, rows, 0), tl.int64)
        b_cols = tl.cast(tl.where(cols < N, cols, 0), tl.int64)
        acc = multiply(
            a_ptr + a_rows * stride_am,
            b_ptr + b_cols * stride_bn,
            tl.cast(stride_ak, tl.int64),
            tl.cast(stride_bk, tl.int64),
            K,
            tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
            BLOCK_K,
            UPCAST,
        )
        acc = apply_scales(acc, rows, cols, row_scale_ptr, column_scale_ptr, M, N)
        acc = apply_epilogue(acc, rows, cols, None, bias_ptr, M, N, ACTIVATION)
        SUMS: tl.constexpr = sums_of_a_result(ACTIVATION)
        if SUMS > 1:
            cols = pid_n * (BLOCK_N // SUMS) + tl.arange(0, BLOCK_N // SUMS)
        c_rows = tl.cast(rows, tl.int64)[:, None] * stride_cm
        c_ptrs = c_ptr + c_rows + tl.cast(cols, tl.int64)[None, :] * stride_cn
        inside = (rows < M)[:, None] & (cols < N // SUMS)[None, :]
        tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=inside)
        visit += 1
        number = _number(visit, tiles, SCHEDULE, CHIPLETS)


_KERNEL = TunedKernel(plain_gemm)


@triton.jit
def _number(visit, tiles, SCHEDULE: tl.constexpr, CHIPLETS: tl.constexpr):
    """Return the number of this program's next tile."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if SCHEDULE == "chiplet":
        number = chiplet_number(visit, program, programs, tiles, CHIPLETS, 4 * CHIPLETS)
    else:
        number = program + visit * programs
    return number
