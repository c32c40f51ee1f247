"""What `persistent_matmul` says when it is called wrongly."""

from __future__ import annotations

from collections.abc import Iterable

import torch

INPUT_DTYPES = (torch.float16, torch.bfloat16)
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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


def check_out(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None) -> None:
    """Raise unless the product can be written to `out`."""
    wanted = (a.shape[0], b.shape[1])
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}; persistent_matmul writes to tensors")
    if tuple(out.shape) != wanted:
        raise ValueError(f"out has shape {tuple(out.shape)}; a @ b has {wanted}")
    if out.device != a.device:
        raise ValueError(f"out is on {out.device}, a is on {a.device}; move one of them")
    check_out_dtype(out.dtype)
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"out is {out.dtype}, out_dtype says {out_dtype}; leave one of them out")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ValueError(
            f"out has strides {out.stride()}: several elements share a place; pass a tensor of its own"
        )


def check_out_dtype(dtype: torch.dtype) -> None:
    """Raise unless the product can be written as that type."""
    if dtype not in OUT_DTYPES:
        raise TypeError(f"out is {dtype}; persistent_matmul writes {_texts(OUT_DTYPES)}")


def check_count(name: str, count: int) -> None:
    """Raise unless it is a whole number of at least 1."""
    if not isinstance(count, int):
        raise TypeError(f"{name} is {count!r}; it must be a whole number")
    if count < 1:
        raise ValueError(f"{name} is {count}; it must be at least 1")


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise unless the name is one of those that there are."""
    if name not in known:
        raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(map(repr, known))}")


def _texts(dtypes: tuple[torch.dtype, ...]) -> str:
    return " and ".join(str(dtype) for dtype in dtypes)
