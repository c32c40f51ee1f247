"""Digests of outputs: every bit and every place counts, strides do not, and nothing is left out unsaid."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dist_autotune.bits import tensor_hash
from dist_autotune.bits.outputs import OutputDigests
from dist_autotune.bits.tensor_hash import hash_kernel, hash_tensor

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def on_gpu(tensor, programs=3, block=64):
    """Return what the GPU's kernel makes of a tensor, in the interpreter."""
    words = tensor_hash._as_integers(tensor)
    partial = torch.empty((programs, 2), dtype=torch.int64)
    hash_kernel[(programs,)](words, partial, words.numel(), 8 * words.element_size(), BLOCK=block)
    return partial.sum(0)


def by_hand(tensor):
    """Return the kernel's hash in Python's whole numbers."""
    words = tensor_hash._as_integers(tensor)
    of_element, of_position, first, second, again = (
        int(getattr(tensor_hash, name).value)
        for name in ("OF_ELEMENT", "OF_POSITION", "FIRST", "SECOND", "AGAIN")
    )
    limit, sums = 1 << 64, [0, 0]
    for position, word in enumerate(words.tolist(), 1):
        mixed = (word % (1 << 8 * words.element_size())) * of_element + position * of_position
        mixed %= limit
        mixed = (mixed ^ (mixed >> 30)) * first % limit
        mixed = (mixed ^ (mixed >> 27)) * second % limit
        mixed ^= mixed >> 31
        other = (mixed ^ (mixed >> 32)) * again % limit
        sums = [sums[0] + mixed, sums[1] + (other ^ (other >> 29))]
    return torch.from_numpy(np.array([each % limit for each in sums], dtype=np.uint64).view(np.int64))


HASHES = pytest.mark.parametrize("hash_of", [hash_tensor, on_gpu], ids=["on the CPU", "by the kernel"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 5, 300])
def test_the_kernel_computes_what_its_arithmetic_says(dtype, size):
    tensor = (torch.randn(size, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    assert torch.equal(on_gpu(tensor), by_hand(tensor))
    assert torch.equal(on_gpu(tensor), on_gpu(tensor, programs=1, block=32))  # sums in another order


@HASHES
def test_every_bit_and_every_place_changes_the_hash(hash_of):
    tensor = torch.arange(12, dtype=torch.int32)
    seen = {tuple(hash_of(tensor).tolist())}
    for place in range(12):
        for bit in range(32):
            flipped = tensor.numpy().copy()
            flipped.view(np.uint32)[place] ^= np.uint32(1 << bit)
            seen.add(tuple(hash_of(torch.from_numpy(flipped)).tolist()))
        if place:
            swapped = tensor.clone()
            swapped[[0, place]] = tensor[[place, 0]]
            seen.add(tuple(hash_of(swapped).tolist()))
    seen.add(tuple(hash_of(torch.cat((tensor, torch.zeros(1, dtype=torch.int32)))).tolist()))
    assert len(seen) == 1 + 12 * 32 + 11 + 1


@HASHES
def test_bits_count_and_not_values(hash_of):
    nan, other_nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert not torch.equal(hash_of(nan), hash_of(other_nan))
    assert torch.equal(hash_of(nan), hash_of(nan.clone()))
    assert not torch.equal(hash_of(torch.tensor([0.0])), hash_of(torch.tensor([-0.0])))


@HASHES
def test_strides_do_not_count(hash_of):
    tensor = torch.randn(6, 8)
    assert torch.equal(hash_of(tensor.t().contiguous().t()), hash_of(tensor))
    assert torch.equal(hash_of(tensor[:, ::2]), hash_of(tensor[:, ::2].contiguous()))
    assert torch.equal(hash_of(torch.ones(1).expand(5)), hash_of(torch.ones(5)))


@pytest.mark.gpu
def test_the_hash_on_a_gpu_is_that_of_the_interpreter():
    for size in (1, 1000, 5_000_001):
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(0))
        again = hash_tensor(tensor.cuda()).cpu()
        assert torch.equal(hash_tensor(tensor.cuda()).cpu(), again)
        if size < 5000:
            assert torch.equal(again, by_hand(tensor))


# ---- what is found


@dataclass
class Output:
    loss: torch.Tensor
    extra: object = None


Pair = namedtuple("Pair", ["a", "b"])


def digests(result, named=()):
    return OutputDigests(result, named).read()


def test_outputs_are_found_in_any_nesting_and_named_by_their_path():
    y = torch.ones(2)
    result = [y, {"a": (y, Output(y, Pair(y, OrderedDict(k=y))))}, None, 3.0, np.ones(2), "text"]
    assert list(digests(result)) == [
        "the result[0]",
        "the result[1]['a'][0]",
        "the result[1]['a'][1].loss",
        "the result[1]['a'][1].extra[0]",
        "the result[1]['a'][1].extra[1]['k']",
        "the result[2]",
        "the result[3]",
        "the result[4]",
        "the result[5]",
    ]
    assert OutputDigests(result, ()).tensors == 6  # the array too


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
        (0.0, -0.0),
        (1, True),
        (np.zeros(2), np.zeros(2, dtype=np.int64)),
        (torch.zeros(2).to_sparse(), torch.ones(2).to_sparse()),
        (torch.zeros(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)),
    ],
    ids=["shape", "dtype", "sign", "type", "array", "sparse", "complex"],
)
def test_what_differs_has_another_digest(one, other):
    assert digests(one) != digests(other)
    assert digests(one) == digests(one)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_parts_of_a_nested_tensor_are_outputs_of_their_own():
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)])
    assert list(digests(nested)) == ["the result[0]", "the result[1]"]


def test_named_state_counts_with_its_gradients():
    model, tensor = torch.nn.Linear(2, 1), torch.zeros(2)
    before = digests(None, [model, tensor])
    assert digests(None, [model, tensor]) == before
    model(torch.ones(2)).backward()
    assert {path for path, digest in digests(None, [model, tensor]).items() if before[path] != digest} == {
        "item 0 of preserve= and outputs=.grad['weight']",
        "item 0 of preserve= and outputs=.grad['bias']",
    }


def test_a_result_that_holds_itself_or_cannot_be_seen_ends():
    ring = [torch.ones(1)]
    ring.append(ring)
    assert list(digests(ring)) == ["the result[0]"]
    assert digests(object()) == digests(iter([torch.ones(1)])) == {}
