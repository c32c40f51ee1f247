"""Compiles the Gluon body of `persistent_matmul`."""

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from compiled import BLACKWELL, SHARED_BYTES, compile_for
from triton.experimental.gluon import language as gl

from dist_autotune.kernels.epilogues import NO_ACTIVATION
from dist_autotune.kernels.gemm.body import gemm
from dist_autotune.kernels.gemm.configs import GLUON_CANDIDATES, blocks_of
from dist_autotune.kernels.gemm.pruning import fits
from dist_autotune.kernels.matrices import Block

LANGUAGE_TYPES = {"fp8e4nv": gl.float8e4nv, "bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
SCALES = ("row_scale_ptr", "column_scale_ptr")
OUT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def candidate(variant: str, **wanted: Any) -> triton.Config:
    """Return the first candidate of that variant with these values."""
    return next(
        config
        for config in GLUON_CANDIDATES
        if config.kwargs["VARIANT"] == variant
        and all({**config.kwargs, "warps": config.num_warps}[name] == value for name, value in wanted.items())
    )


def descriptor_type(dtype: str, block: Block) -> str:
    """Return the type of a descriptor argument, as Triton spells it."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), LANGUAGE_TYPES[dtype])
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def compile_gemm(
    config: triton.Config,
    target: Any,
    *,
    dtype: str = "bf16",
    out: str = "bf16",
    trans_a: bool = False,
    trans_b: bool = True,
    bias: str | None = None,
    bias_along: str = "column",
    activation: str = NO_ACTIVATION,
    scaled: bool = False,
    sizes: dict[str, int] | None = None,
) -> Any:
    """Return the compiled Gluon body of a candidate; for whole tiles, or for M and N of `sizes`.

    bias: its type; along the rows of a product that is computed transposed. scaled: by row and by column.
    """
    constants = {
        "TRANS_A": trans_a,
        "TRANS_B": trans_b,
        "TENSOR_MEMORY": target is BLACKWELL,
        "OUT": out,
        "DTYPE": dtype,
        "ACTIVATION": activation,
        **({} if scaled else dict.fromkeys(SCALES)),
        "row_bias_ptr": None,
        "column_bias_ptr": None,
        **config.kwargs,
    }
    kinds = {"a_desc": dtype, "b_desc": dtype, "extra_desc": dtype, "c_desc": out}
    types = {
        name: descriptor_type(kinds[name], block)
        for name, block in blocks_of({**constants, **(sizes or {})}).items()
    }
    types |= {"M": "i32", "N": "i32", "K": "i32"}
    types |= dict.fromkeys(("wanted", "programs"), "i32")
    types |= dict.fromkeys(("a_alignment", "b_alignment", "m_class", "n_class"), "i32")
    types |= dict.fromkeys(SCALES, "*fp32") if scaled else {}
    if bias is not None:
        types[f"{bias_along}_bias_ptr"] = f"*{bias}"
        del constants[f"{bias_along}_bias_ptr"]
    return compile_for(target, gemm, types, constants, any_value=tuple(types), num_warps=config.num_warps)


def usable(target: Any, out: str = "bf16") -> list[triton.Config]:
    """Return the candidates that fit the target."""
    limit = SHARED_BYTES[target]
    return [
        config
        for config in GLUON_CANDIDATES
        if fits(config, OUT_BYTES[out], limit, tensor_memory=target is BLACKWELL)
    ]


def in_parallel(jobs: list[Any]) -> list[Any]:
    """Return what the jobs return; the compiler leaves Python's lock while it works.

    Nothing is collected meanwhile: a finalizer may let the other thread go on while this one parses a kernel,
    and Python 3.11 refuses to parse two at a time.
    """
    gc.disable()
    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda job: job(), jobs))
    finally:
        gc.enable()
