"""Checks of the tensors of a call, and a cache of what is known of tensors that lie alike."""

from __future__ import annotations

import math
import numbers
import threading
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import torch

KEPT = 8192  # layouts, of about 6 kB each with their launch: what one operation keeps is bounded by 50 MB
FP8 = torch.float8_e4m3fn
MULTIPLE_OF_FP8 = 16  # of the elements of a row: bytes, as TMA wants them
FP8_CAPABILITY = (8, 9)  # of the first NVIDIA GPUs whose tensor cores take it

_ONE_AT_A_TIME = threading.Lock()

Key = TypeVar("Key", bound=Hashable)
Known = TypeVar("Known")


def check_sizes(**sizes: int) -> None:
    """Raise TypeError or ValueError, with all sizes, unless each is an int of at least 1."""
    given = " and ".join(f"{name}={size!r}" for name, size in sizes.items())
    if not all(hasattr(size, "__index__") for size in sizes.values()):
        raise TypeError(f"{given}: must be an int of at least 1")
    if min(sizes.values()) < 1:
        raise ValueError(f"{given}: must be at least 1")


def check_ways(**ways: bool | None) -> None:
    """Raise ValueError unless each is True, False, or None, which leaves it to tuning."""
    for name, way in ways.items():
        if not (way is None or isinstance(way, bool)):  # 0 is not False, which is told by `is`
            raise ValueError(f"{name} is {way!r}; it is True, False, or None, which tunes it")


def check_timeout(timeout_s: float) -> None:
    """Raise TypeError or ValueError, with what was given, unless it is seconds above 0."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, numbers.Real):
        raise TypeError(f"timeout_s={timeout_s!r}: it must be a number of seconds above 0")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s}: it must be a number of seconds above 0")


def check_eps(eps: float) -> None:
    """Raise TypeError or ValueError, with what was given, unless it is a number of at least 0."""
    if not isinstance(eps, (float, numbers.Real)):  # a float asks no abstract class
        raise TypeError(f"eps={eps!r}: it must be a number of at least 0")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps={eps}: it must be a number of at least 0")


def layout_of(tensor: Any, quantum: int = 16) -> Hashable:
    """Return a tensor's alignment, shape, strides, dtype and device; None for None, else the type's name.

    Tensors of one layout differ in their elements, and in their address by a multiple of `quantum` bytes.
    """
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        return str(type(tensor))
    return tensor.data_ptr() % quantum, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class OwnBuffer:
    """A buffer of an operation whose first rows a caller may pass: no copy is made of them then."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.begin, self._bytes = buffer.data_ptr(), buffer.numel() * buffer.element_size()

    def layout_of(self, tensor: Any) -> Hashable:
        """Return a tensor's layout, and its offset in the buffer, in bytes; -1 if it begins outside."""
        if not isinstance(tensor, torch.Tensor):
            return layout_of(tensor)
        address = tensor.data_ptr()
        place = address - self.begin
        place = place if 0 <= place < self._bytes else -1
        return place, address % 16, tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor begins in the buffer."""
        return 0 <= tensor.data_ptr() - self.begin < self._bytes

    def check_beside(self, name: str, tensor: torch.Tensor | None, buffer: str, use: str) -> None:
        """Raise ValueError if a tensor begins in the buffer; `use` says what a call does with that."""
        if tensor is not None and self.holds(tensor):
            raise ValueError(f"{name} lies in {buffer}, which {use} in the call; pass another tensor")


def _bytes_between(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of the last one; 0 if it has none."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class Apart:
    """Refuses a result that overlaps an operand of any kind, which is read while it is written.

    It is made once for a layout; a call then compares addresses only. All may be None.
    """

    def __init__(self, out: torch.Tensor | None, **operands: torch.Tensor | None) -> None:
        self._names = tuple(operands)
        self._before = [0 if each is None else -_bytes_between(each) for each in operands.values()]
        self._behind = 0 if out is None else _bytes_between(out)

    def check(self, out: torch.Tensor | None, *operands: torch.Tensor | None, what: str = "out") -> None:
        """Raise ValueError where `out` overlaps an operand; they come in the order of names, or the first."""
        if out is None:
            return
        begin, behind = out.data_ptr(), self._behind
        for each, before in zip(operands, self._before, strict=False):
            if each is not None and before < each.data_ptr() - begin < behind and _overlap(out, each):
                name = next(name for name, one in zip(self._names, operands, strict=False) if one is each)
                raise ValueError(
                    f"{what} overlaps {name}, which the call reads meanwhile; pass another tensor"
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    distance = other.data_ptr() - one.data_ptr()
    is_near = -_bytes_between(other) < distance < _bytes_between(one)
    return is_near and 0 not in (one.numel(), other.numel()) and not _lie_side_by_side(one, other)


def _lie_side_by_side(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are different columns of one matrix: their bytes are, by their strides."""
    pitch, widths = 0, []
    for each in (one, other):
        size = width = each.element_size()
        for count, step in zip(each.shape, each.stride(), strict=True):
            if step == 1:
                width += (count - 1) * size
            elif count > 1:
                pitch = math.gcd(pitch, step * size)
        widths.append(width)
    if pitch == 0:
        return False
    column = (other.data_ptr() - one.data_ptr()) % pitch
    return column >= widths[0] and column + widths[1] <= pitch


def room_in(gather: torch.Tensor, rank: int, world_size: int, rows: int) -> torch.Tensor:
    """Return where a collective gathers `rows` of each rank, around the first ones of chunk `rank`.

    gather: [chunks, capacity, ...].
    """
    first = rank * (gather.shape[1] - rows)
    return gather.flatten(0, 1)[first : first + world_size * rows]


def remember(known: dict[Key, Known], key: Key, value: Known) -> Known:
    """Return the value, which is in the dict from now on; of KEPT entries the oldest is forgotten.

    Any thread may call this; those that look up need not wait.
    """
    with _ONE_AT_A_TIME:
        if len(known) >= KEPT and key not in known:
            del known[next(iter(known))]
        known[key] = value
    return value


def check_no_gradient(operation: str, **tensors: object) -> None:
    """Raise RuntimeError if autograd would have to follow this call: the result would have no gradient."""
    if not torch.is_grad_enabled():
        return
    asking = []
    for name, tensor in tensors.items():  # in each call: a comprehension is one function more
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            asking.append(name)
    if asking:
        raise RuntimeError(
            f"{operation} has no backward, but grad is enabled and required by {', '.join(asking)}: its "
            f"result would have no gradient. Call it under torch.no_grad(), or pass {asking[0]}.detach()"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    dims: int = 2,
    needed: str = "two dimensions are needed",
    *,
    may_lie_by_columns: bool = False,
) -> None:
    """Raise unless `tensor` has this type, device and number of dimensions, and contiguous rows.

    may_lie_by_columns: contiguous columns will do, as a transposed matrix has them.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; a tensor is needed")
    if tensor.device != device or tensor.dtype != dtype:
        given, wanted = f"{tensor.dtype} on {tensor.device}", f"{dtype} on {device}"
        raise ValueError(f"{name} is {given}; this operation was opened for {wanted}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; {needed}")
    if not lies_by_columns(tensor) or (may_lie_by_columns and 1 in (tensor.stride(-2), tensor.shape[-2])):
        return
    which = "neither the rows nor the columns" if may_lie_by_columns else "the rows"
    verb = "are" if may_lie_by_columns else "are not"
    raise ValueError(f"{which} of {name} {verb} contiguous (strides {tensor.stride()}); call .contiguous()")


def check_rows(name: str, rows: int, limit: str, most: int) -> None:
    """Raise ValueError unless an operation that was opened with `limit` takes so many rows."""
    if not 1 <= rows <= most:
        raise ValueError(f"{name} has {rows} rows; this operation takes 1 to {limit}={most}")


def check_factors(
    a: torch.Tensor, weight: torch.Tensor, m: int, n: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless a @ weight.T is [up to m, n]; weights in fp8 lie by rows."""
    check_tensor("a", a, dtype, device)
    check_tensor("weight", weight, dtype, device, may_lie_by_columns=dtype != FP8)
    check_rows("a", a.shape[0], "m", m)
    if weight.shape[0] != n or weight.shape[1] != a.shape[1] or a.shape[1] == 0:
        given = f"a {list(a.shape)} and weight {list(weight.shape)}"
        raise ValueError(f"{given} must be [M, K] and [n={n}, K] with the same K, at least 1")
    if dtype == FP8:
        check_inner_of_fp8(a.shape[1])


def lies_by_columns(tensor: torch.Tensor) -> bool:
    """Return whether the rows of a checked tensor are not contiguous: then its columns are."""
    return tensor.stride(-1) != 1 and tensor.shape[-1] > 1


def pitch_of(tensor: torch.Tensor) -> int:
    """Return how many elements apart the contiguous rows, or columns, of a checked tensor begin."""
    return tensor.stride(-1 if lies_by_columns(tensor) else -2)


def check_fp8(device: torch.device) -> None:
    """Raise TypeError unless the GPU has tensor cores for float8_e4m3fn."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < FP8_CAPABILITY:
        raise TypeError(
            f"products in {FP8} need compute capability {FP8_CAPABILITY}, {device} has {capability}: convert "
            "the operands to torch.bfloat16"
        )


def check_inner_of_fp8(k: int) -> None:
    """Raise ValueError unless rows of k elements in fp8 are as TMA wants them."""
    if k % MULTIPLE_OF_FP8:
        padded = k + -k % MULTIPLE_OF_FP8
        raise ValueError(f"k={k}: rows of {FP8} are whole {MULTIPLE_OF_FP8} bytes; pad K to {padded}")


def check_scales(
    dtype: torch.dtype,
    device: torch.device,
    scale_a: tuple[torch.Tensor | None, int],
    scale_weight: tuple[torch.Tensor | None, int],
) -> None:
    """Raise unless an operation opened for `dtype` takes these scales, of so many rows each."""
    for name, (scale, rows) in (("scale_a", scale_a), ("scale_weight", scale_weight)):
        if dtype != FP8 and scale is not None:
            raise ValueError(f"scale_a and scale_weight are for {FP8}; this operation was opened for {dtype}")
        check_scale(name, scale, rows, (rows, 1), device)


def check_scale(
    name: str, scale: torch.Tensor | None, count: int, as_matrix: tuple[int, int], device: torch.device
) -> None:
    """Raise TypeError or ValueError unless it is None, or has `count` contiguous float32."""
    if scale is None:
        return
    wanted = f"({count},) or {as_matrix}"
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{name} is a {type(scale).__name__}; it must be a float32 tensor {wanted}, or None")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} is {scale.dtype}; it must be torch.float32")
    if tuple(scale.shape) not in ((count,), as_matrix):
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)}; it must be {wanted}: one scale for all is "
            f"{name}.expand{as_matrix}.contiguous()"
        )
    if scale.device != device:
        raise ValueError(f"{name} is on {scale.device}, the product is on {device}; move one of them")
    if not scale.is_contiguous():
        raise ValueError(f"{name} has strides {scale.stride()}; call .contiguous()")


def check_out(
    out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless `out` is None or a matrix of this shape, type and device."""
    if out is None:
        return
    check_tensor("out", out, dtype, device)
    if list(out.shape) != list(shape):
        raise ValueError(f"out has shape {list(out.shape)}; the result has {list(shape)}")
    check_distinct(out)


def check_distinct(out: torch.Tensor) -> None:
    """Raise ValueError where two elements of a result are one in memory."""
    (rows, columns), (down, along) = out.shape, out.stride()
    # So many rows further down, and so many columns back, lies the same element.
    step = math.gcd(down, along) or 1
    if out.numel() > 1 and along // step < rows and down // step < columns:
        raise ValueError(
            f"out has shape {list(out.shape)} and strides {out.stride()}: elements overlap; pass a tensor "
            "with its own memory"
        )


def check_overlap(
    name: str, tensor: torch.Tensor, shard: torch.Tensor, rows: str, buffer: str = "op.shard"
) -> None:
    """Raise if a matrix lies in a buffer of the operation and is not its first rows."""
    offset, count = tensor.data_ptr() - shard.data_ptr(), tensor.shape[0]
    inside = count > 0 and -_bytes_between(tensor) < offset < shard.numel() * shard.element_size()
    if inside and (offset != 0 or (tensor.stride(0) != shard.shape[1] and count > 1)):
        raise ValueError(f"{name} overlaps {buffer} without being its first rows; pass {buffer}[:{rows}]")


def begin_at_16_bytes(itemsize: int, pointers: tuple[int, ...], row_strides: tuple[int, ...]) -> bool:
    """Return whether TMA can address every row: pointers and strides (in elements) are whole 16 bytes."""
    steps = 0
    for stride in row_strides:
        steps |= stride * itemsize
    for pointer in pointers:
        steps |= pointer
    return steps % 16 == 0
