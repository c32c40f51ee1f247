"""What operations without a backward say of tensors that ask for one."""

from __future__ import annotations

import torch


def check_no_gradient(operation: str, **tensors: object) -> None:
    """Raise RuntimeError if autograd would have to follow this call: the result would have no gradient."""
    if not torch.is_grad_enabled():
        return
    asking = [
        name for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    ]
    if asking:
        raise RuntimeError(
            f"{operation} has no backward, but grad is enabled and required by {', '.join(asking)}: its "
            f"result would have no gradient. Call it under torch.no_grad(), or pass {asking[0]}.detach()"
        )
