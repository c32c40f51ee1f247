"""Operands in fp8 with scales, and how far from float64 a product with an epilogue may be."""

import torch

from dist_autotune.kernels.epilogues import GATED, Epilogue
from dist_autotune.kernels.tensors import FP8


def quantized(
    rows: int, k: int, device: str, largest: float = torch.finfo(FP8).max
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random rows [rows, k] in fp8, of different sizes, and the scale of each, [rows, 1]."""
    values = torch.randn(rows, k, device=device) * torch.logspace(-1, 1, rows, device=device)[:, None]
    scales = values.abs().amax(1, keepdim=True) / largest
    return (values / scales).to(FP8), scales


def error_ratio(result: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue) -> float:
    """Return the largest error against float64 as a multiple of what the arithmetic explains.

    The result is rounded once, by eps of its type (the interpreter truncates bfloat16). Sums of K products,
    which are exact, are off by sqrt(K) float32 eps of what they are of; 4 eps are what exp, erf and a
    division cost, and no activation has a slope above 1.13. Gate and up are both off, each times what the
    other is.

    In fp8 Hopper's tensor cores keep 13 bits behind the largest number that an instruction adds up, of which
    there is one for 32 products: it cuts off up to 2**-13 of a sum so far. That is hardly ever above five
    standard deviations of sums of such products.
    """
    left, right, k = a.double(), weight.double().T, a.shape[1]
    wanted, scaled = epilogue.of(left @ right), epilogue._replace(bias=None, activation=None)
    explained = torch.finfo(result.dtype).eps * wanted.abs()
    sizes = scaled.of(left.abs() @ right.abs()) + 16
    if epilogue.activation in GATED:
        sizes = 2.2 * sizes.amax().square()
    explained += (4 + k**0.5) * torch.finfo(torch.float32).eps * sizes
    if result.device.type == "cuda" and a.dtype == FP8:
        explained += 5 * -(-k // 32) * 2**-13 * scaled.of((left.square() @ right.square()).sqrt())
    return float(((result.double() - wanted).abs() / explained).nan_to_num(nan=torch.inf).amax())
