"""Digests of outputs: every bit and every place counts, strides do not, and nothing is left out unsaid."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dist_autotune.bits import tensor_hash
from dist_autotune.bits.outputs import OutputDigests
from dist_autotune.bits.tensor_hash import hash_kernel, hash_tensor

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


def on_gpu(tensor, programs=3, block=64):
    """Return what the GPU's kernel makes of a tensor, in the interpreter."""
    words = tensor_hash._as_integers(tensor)
    partial = torch.empty((programs, 2), dtype=torch.int64)
    hash_kernel[(programs,)](words, partial, words.numel(), 8 * words.element_size(), BLOCK=block)
    return partial.sum(0)


HASHES = pytest.mark.parametrize("hash_of", [hash_tensor, on_gpu], ids=["on the CPU", "by the kernel"])


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


@pytest.mark.gpu
def test_outputs_on_cpu_and_gpu_are_hashed_where_they_are():
    def made(changed=None):
        parts = [torch.arange(6.0).view(2, 3).cuda().t(), torch.ones(4), torch.ones(4).cuda().to_sparse()]
        parts += [
            torch.ones(4).cuda().to(torch.float8_e4m3fn),
            torch.zeros(0).cuda(),
            torch.ones(2).cuda().bool(),
        ]
        if changed is not None:
            parts[changed] = parts[changed].neg() if changed < 3 else parts[changed].float() * 2
        return digests(parts)

    assert made() == made()
    for changed in range(4):
        differing = {path.split("]")[0] for path, digest in made(changed).items() if made()[path] != digest}
        assert differing == {f"the result[{changed}"}


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


DIFFERENT = {
    "shape": (torch.zeros(4), torch.zeros(2, 2)),
    "dtype": (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
    "sign": (0.0, -0.0),
    "type": (1, True),
    "array": (np.zeros(2), np.zeros(2, dtype=np.int64)),
    "NaN": (float("nan"), -float("nan")),
    "sign of an imaginary zero": (complex(0.0, 0.0), complex(0.0, -0.0)),
    "sparse": (torch.ones(4).to_sparse(), torch.zeros(4).to_sparse()),
    "fp8": (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e5m2)),
    "bool": (torch.tensor([True, False]), torch.tensor([True, True])),
    "no elements": (torch.zeros(0, 3), torch.zeros(3, 0)),
    "complex": (torch.zeros(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_has_another_digest(one, other):
    assert digests(one) != digests(other)
    assert digests(one) == digests(one)


def test_views_and_overlapping_elements_count_as_what_they_show():
    base = torch.arange(6.0)
    y = base.as_strided((3, 3), (1, 1))  # elements overlap
    assert digests(y) == digests(y.clone())
    assert digests(base.expand(4, 6)) == digests(base.repeat(4, 1))
    lazy = torch.full((2,), 1j).conj()
    assert lazy.is_conj()
    assert digests(lazy) == digests(lazy.resolve_conj())


class Wrapping(torch.Tensor):
    """A tensor that is made of others, as quantized ones are."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale):
        self.data_part, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_part", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError("it has no memory of its own")


def test_tensors_that_wrap_others_are_compared_by_those():
    data = torch.ones(2, dtype=torch.int8)
    one = digests(Wrapping(data, torch.tensor(1.0)))
    other = digests(Wrapping(data, torch.tensor(2.0)))
    assert [path for path in one if one[path] != other[path]] == ["the result.scale"]


def gathered(mesh):
    """Return what torch has begun to gather; newer versions have another name for it."""
    gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
    return gather(torch.arange(4.0), 0, mesh)


def test_a_collective_under_way_is_waited_for_and_a_dtensor_counts_by_its_own_part():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        y = gathered(mesh)
        assert [*digests(y).values()] == [*digests(torch.arange(4.0)).values()]
        under_way = DTensor.from_local(gathered(mesh), mesh, [Shard(0)])
        assert [*digests(under_way).values()] == [*digests(torch.arange(4.0)).values()]
    finally:
        torch.distributed.destroy_process_group()


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
    found = OutputDigests([torch.ones(1), {"a": object()}], ())
    assert (found.tensors, found.unseen) == (1, ["the result[1]['a'] (a builtins.object)"])
    assert digests([torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), DTensor])


def test_tensors_without_memory_are_not_compared_and_named():
    found = OutputDigests([torch.ones(2, device="meta"), torch.nn.UninitializedParameter()], ())
    assert (found.tensors, len(found.unseen)) == (0, 2)
