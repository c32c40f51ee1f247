"""What tests of `persistent_matmul` do: matrices, the Gluon body's launches, its candidates and copies."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from dense_runs import error_ratio as relative_error_ratio
from epilogue_runs import error_ratio
from operation_runs import DEVICE

from dist_autotune.kernels.epilogues import Epilogue
from dist_autotune.kernels.gemm import copies
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.gemm.configs import GLUON_CANDIDATES, NAMES
from dist_autotune.kernels.gemm.pruning import fits
from dist_autotune.kernels.matrices import LINE_BYTES
from dist_autotune.kernels.persistent_gemm import SCHEDULERS, persistent_matmul

HALVES = [torch.float16, torch.bfloat16]
OUTS = [*HALVES, torch.float32]
LAYOUTS = [*itertools.product(("row", "column"), repeat=2)]
SHARED_BYTES = 232448  # the most of one block on Hopper and Blackwell


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str = "row") -> torch.Tensor:
    """Return fresh random numbers, contiguous along rows or columns."""
    if layout == "column":
        return matrix(columns, rows, dtype).T
    return torch.randn(rows, columns, device=DEVICE).to(dtype)


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, columns), math.nan, dtype=dtype, device=DEVICE)


def arguments(m: int = 4096, n: int = 4096, k: int = 4096, **changed: Any) -> dict[str, Any]:
    """Return what the Gluon body is called with: A by rows, a weight, all SMs; one row behind the other."""
    args = {"M": m, "N": n, "K": k, "programs": 132, "wanted": NAMES.index("auto")}
    args |= {"OUT": "bf16", "TRANS_A": False, "TRANS_B": True, "TENSOR_MEMORY": False}
    args |= dict.fromkeys(("a_alignment", "b_alignment"), math.gcd(2 * k, LINE_BYTES))
    return args | changed


def fitting(out_dtype: torch.dtype, suits: Callable[[dict[str, Any]], bool]) -> list[triton.Config]:
    """Return the candidates that suit, by their arguments, and fit this GPU."""
    is_blackwell = torch.cuda.get_device_capability()[0] == 10
    return [
        config
        for config in GLUON_CANDIDATES
        if suits(config.kwargs) and fits(config, out_dtype.itemsize, SHARED_BYTES, tensor_memory=is_blackwell)
    ]


def multiply(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    variant: str = "auto",
    programs: int = 132,
    *,
    tensor_memory: bool = False,
    epilogue: Epilogue = Epilogue(),  # noqa: B008  a frozen one
    times: int = 1,
) -> bool:
    """Write the result to `out` by the Gluon body; return False, with nothing done, if it is not to."""
    options = variant, programs, epilogue.activation
    found = launching.plan_launch(a, b, out, *options, tensor_memory=tensor_memory)
    if found is None:
        return False
    for _ in range(times):
        launching.execute(found, a, b, out, epilogue)
    return True


def check_with(epilogue: Epilogue, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compare one call of `persistent_matmul` with float64, in which torch computes the epilogue."""
    bias, activation, *scales = epilogue
    options |= dict(zip(("scale_a", "scale_b"), scales, strict=True))
    result = persistent_matmul(a, b, bias=bias, activation=activation, **options)
    assert error_ratio(result, a, b.T, epilogue) < 1
    return result


# ---- calls without an epilogue


def check(
    m: int, n: int, k: int, dtype: torch.dtype = torch.float16, *, layouts=("row", "row"), **options: Any
):
    """Compare one call into an output full of NaN with float32."""
    a, b = matrix(m, k, dtype, layouts[0]), matrix(k, n, dtype, layouts[1])
    out = poisoned(m, n, options.pop("out_dtype", dtype))
    assert persistent_matmul(a, b, out, **options) is out
    assert relative_error_ratio(out, a, b.T) < 1


def layouts_and_types(*shape: int) -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    return {
        f"{layouts}, {out_dtype}": (shape, {"layouts": layouts, "out_dtype": out_dtype})
        for layouts, out_dtype in itertools.product(LAYOUTS, OUTS)
    }


def schedules(
    *shape: int, programs: tuple[int | None, ...]
) -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    return {
        f"{scheduler}, {count} programs": (shape, {"scheduler": scheduler, "programs": count})
        for scheduler, count in itertools.product(SCHEDULERS, programs)
    }


# ---- copies in scratch memory


def always_copied(m: int, n: int, k: int) -> bool:
    """Have all copied that TMA cannot address, whatever it takes."""
    return True


def poison_rooms(patched: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Have scratch memory full of NaN; return the list of what is made, padding included."""
    made: list[torch.Tensor] = []
    real = copies.room_for

    def room_for(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pitch = real(rows, columns, dtype, torch.device("meta")).stride(0)
        made.append(torch.full((rows, pitch), math.nan, dtype=dtype, device=device))
        return made[-1][:, :columns]

    patched.setattr(launching, "room_for", room_for)
    return made
