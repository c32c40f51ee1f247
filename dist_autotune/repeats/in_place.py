"""Finds work in place that nobody declared: a repetition of the first run leaves other values.

Arguments of kernels and tensors that torch changed, if they existed before the call, are copied after the
first run and compared after the second: by their bits, then by value, as sums of floats depend on the order
of atomic additions.
"""

from __future__ import annotations

import contextlib
import os

import torch

from ..launch.written_tensors import Region, WrittenTensors, copy_of, tensor_of

MEMORY_SHARE = 0.25  # of the free memory that the copies may take
ROUNDING_STEPS = {2: 2, 4: 64, 8: 64}  # by bytes of a float: so many of the largest value may be rounding


class InPlaceCheck:
    """The check of one call. `written` has recorded the launches of its first run."""

    def __init__(self, written: WrittenTensors) -> None:
        self._written = written
        self._copies: dict[Region, tuple[str, torch.Tensor]] = {}
        self.remark = ""  # why nothing is compared

    def copy(self) -> None:
        """Copy the tensors that the first run may have changed."""
        named = self._written.changed()
        there = {region: tensor for region in named if (tensor := tensor_of(region)) is not None}
        for device in {tensor.device for tensor in there.values()}:
            needed = sum(tensor.nbytes for tensor in there.values() if tensor.device == device)
            if needed > MEMORY_SHARE * _free_bytes(device):
                self.remark = f"work in place is not looked for: {needed} bytes of {device} would be copied"
                return
        try:
            self._copies = {region: (named[region], copy_of(tensor)) for region, tensor in there.items()}
        except torch.OutOfMemoryError:
            self.remark = "work in place is not looked for: no memory is left for copies"

    @property
    def compares(self) -> bool:
        return bool(self._copies)

    def change(self) -> str:
        """Return the tensors that the second run left with other values than the first one; "": none."""
        for region, (name, before) in self._copies.items():
            after = tensor_of(region)
            if after is not None and _differ(before, after):
                return f"{name}, of shape {region[2]}"
        return ""

    def put_back(self) -> None:
        """Put back the values that the first run left."""
        for region, (_, values) in self._copies.items():
            with torch.inference_mode(False), torch.no_grad():
                if (there := tensor_of(region)) is not None:
                    there.copy_(values)


def _differ(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Return whether two tensors differ by more than rounding."""
    if before.is_complex():
        before, after = torch.view_as_real(before), torch.view_as_real(after)
    if before.is_floating_point() and before.itemsize == 1:
        before, after = before.view(torch.uint8), after.view(torch.uint8)
    is_other = ~((before == after) | ((before != before) & (after != after)))  # NaN equals NaN
    if not is_other.any():
        return False
    steps = ROUNDING_STEPS.get(before.itemsize)
    if not before.is_floating_point() or steps is None:
        return True
    one, other = before[is_other].double(), after[is_other].double()
    largest = torch.cat([one.abs(), other.abs()]).max()
    bound = steps * torch.finfo(before.dtype).eps * largest
    return not bool(largest.isfinite() and ((one - other).abs() <= bound).all())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
