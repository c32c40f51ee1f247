"""A 128-bit hash of a tensor's elements in logical order, taken by its own device; nothing waits for it."""

from __future__ import annotations

import hashlib

import torch
import triton
import triton.language as tl

BLOCK, MOST_PROGRAMS = 1024, 2048
BYTES = 16
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element

# The factors of SplitMix64 and others like them: odd, so that no bit is lost.
OF_ELEMENT, OF_POSITION = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xD1B54A32D192ED03)
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
AGAIN = tl.constexpr(0xFF51AFD7ED558CCD)


def hash_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return two int64 on the tensor's device; a CPU's are others than a GPU's.

    NaN, infinities and -0.0 count by their bits, dtype and shape not at all.
    """
    words = _as_integers(tensor.detach())
    if not words.is_cuda:
        found = hashlib.blake2b(words.cpu().numpy().data, digest_size=BYTES).digest()
        return torch.frombuffer(bytearray(found), dtype=torch.int64)
    programs = min(max(triton.cdiv(words.numel(), BLOCK), 1), MOST_PROGRAMS)
    partial = torch.empty((programs, 2), dtype=torch.int64, device=words.device)
    with torch.cuda.device(words.device):
        hash_kernel[(programs,)](words, partial, words.numel(), 8 * words.element_size(), BLOCK=BLOCK)
    return partial.sum(0)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in logical order as integers of their size."""
    if tensor.layout is not torch.strided:  # sparse, or MKL-DNN's
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.resolve_neg().contiguous().reshape(-1)
    return flat.view(INTEGERS[flat.element_size()])


@triton.jit
def hash_kernel(words_ptr, partial_ptr, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Store two sums over the elements that this program has; the hash is the sum of all programs'.

    Each element is mixed with its position by the finalizer of SplitMix64, and once more for the second sum.
    Sums modulo 2^64 do not depend on the order in which a device adds.
    """
    first = tl.zeros((BLOCK,), tl.uint64)
    second = tl.zeros((BLOCK,), tl.uint64)
    for block in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        offs = tl.full((BLOCK,), block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < n
        element = tl.load(words_ptr + offs, mask=mask, other=0).to(tl.int64)
        if BITS < 64:
            element = element & ((1 << BITS) - 1)  # the conversion copies the sign
        mixed = element.to(tl.uint64, bitcast=True) * OF_ELEMENT
        mixed += (offs + 1).to(tl.uint64, bitcast=True) * OF_POSITION
        mixed = (mixed ^ (mixed >> 30)) * FIRST
        mixed = (mixed ^ (mixed >> 27)) * SECOND
        mixed = mixed ^ (mixed >> 31)
        again = (mixed ^ (mixed >> 32)) * AGAIN
        again = again ^ (again >> 29)
        first += tl.where(mask, mixed, 0)
        second += tl.where(mask, again, 0)
    sums_ptr = partial_ptr + 2 * tl.program_id(0)
    tl.store(sums_ptr, tl.sum(first, 0).to(tl.int64, bitcast=True))
    tl.store(sums_ptr + 1, tl.sum(second, 0).to(tl.int64, bitcast=True))
