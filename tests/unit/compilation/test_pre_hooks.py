"""What stands in for the arguments of a launch tells no lie about them, and what is changed there is told."""

from __future__ import annotations

import enum
import pickle
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dist_autotune.compilation.pre_hooks import (
    NotReproducible,
    StandIn,
    StandIns,
    _marked,
    holders,
    with_changes,
)
from dist_autotune.triton_api.launch import Launch

Pair = namedtuple("Pair", "left right")


@dataclass
class Descriptor:
    base: Any
    block: list[int]
    layout: str = "rows"


class Colour(enum.Enum):
    RED = 1


def launch_of(*args: Any, **kwargs: Any) -> Launch:
    return Launch(None, args, kwargs)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6, dtype=torch.float16),
        torch.zeros(4, 6).T[1:],
        torch.zeros(8, dtype=torch.int64)[::2],
        torch.zeros(0, 3),
        torch.nn.Parameter(torch.zeros(2, 2)),
    ],
    ids=["plain", "view", "strided", "empty", "parameter"],
)
def test_a_stand_in_has_the_facts_of_its_tensor(tensor):
    stand_in = StandIn.of(tensor)
    for fact in ("shape", "dtype", "device", "is_cuda", "is_cpu", "is_meta", "ndim", "itemsize"):
        assert getattr(stand_in, fact) == getattr(tensor, fact), fact
    for question in ("stride", "numel", "data_ptr", "element_size", "is_contiguous", "get_device", "dim"):
        assert getattr(stand_in, question)() == getattr(tensor, question)(), question


def test_a_stand_in_of_a_tensor_on_a_gpu_is_on_that_gpu():
    stand_in = _marked(torch.empty(4, device="meta"), torch.device("cuda", 1), 4096)
    assert (stand_in.is_cuda, stand_in.is_cpu, stand_in.get_device()) == (True, False, 1)
    assert stand_in[1:].device == torch.empty_like(stand_in).device == torch.device("cuda", 1)


def test_writing_to_a_stand_in_does_nothing_and_returns_it():
    tensor = torch.ones(4, 4)
    stand_in = StandIn.of(tensor)
    assert stand_in.zero_() is stand_in
    stand_in[1:, 0] = 7
    stand_in.copy_(torch.zeros(4, 4))
    assert bool((tensor == 1).all())


@pytest.mark.parametrize(
    "reads",
    [
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor[0].item(),
        lambda tensor: bool(tensor.sum() > 0),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor[1:].data_ptr(),
        lambda tensor: tensor.storage_offset(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: torch.cat([tensor, tensor]),
    ],
    ids=["tolist", "item", "bool", "cpu", "numpy", "address of a part", "offset", "storage", "of several"],
)
def test_what_a_stand_in_does_not_know_it_refuses(reads):
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        reads(StandIn.of(torch.ones(4)))


def test_holders_are_the_distinct_arguments_with_attributes_in_their_order():
    one, two = Descriptor(None, [1]), Descriptor(None, [2])
    args = (3, "text", None, torch.zeros(1), two, (one, (two, len)), torch.float16)
    found = holders(launch_of(*args, grid=lambda meta: (1,), more=one))
    assert [holder is expected for holder, expected in zip(found, (two, one), strict=True)] == [True, True]


def test_what_owns_something_is_not_copied():
    class Owner:
        def __del__(self) -> None:
            ended.append(self)

    ended: list[Owner] = []
    owner = Owner()
    assert StandIns(launch_of(owner)).launch.args == (owner,)
    assert ended == []


def test_changes_are_made_to_copies_of_what_was_changed():
    tensor = torch.zeros(4)
    one, two = Descriptor(tensor, [1, 1]), Descriptor(tensor, [2, 2])
    launch = launch_of(one, Pair(two, tensor), Colour.RED, again=one)
    stand_ins = StandIns(launch)
    first = stand_ins.launch.args[0]
    first.block[1] = 64
    first.layout = "columns"
    assert first is stand_ins.launch.kwargs["again"]
    changes = pickle.loads(stand_ins.changes())
    assert changes == {0: {"block": [1, 64], "layout": "columns"}}
    changed, pair, colour = with_changes(launch, changes).args
    assert changed == Descriptor(tensor, [1, 64], "columns")
    assert changed.base is tensor
    assert pair.left is two
    assert pair.right is tensor
    assert colour is Colour.RED
    assert one == Descriptor(tensor, [1, 1])


def test_a_hook_that_changes_nothing_changes_nothing():
    launch = launch_of(Descriptor(torch.zeros(4), [1, 1]), torch.zeros(2))
    assert pickle.loads(StandIns(launch).changes()) == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda descriptor, tensor: setattr(descriptor, "base", tensor),
        lambda descriptor, tensor: setattr(descriptor, "more", Pair(tensor, 1)),
        lambda descriptor, tensor: delattr(descriptor, "layout"),
        lambda descriptor, tensor: tensor.resize_(1),
        lambda descriptor, tensor: tensor.t_(),
    ],
    ids=["base", "hidden", "deleted", "resized", "transposed"],
)
def test_a_change_that_cannot_be_handed_over_is_refused(change):
    stand_ins = StandIns(launch_of(Descriptor(torch.zeros(4, 2), [1, 1]), torch.zeros(2, 4)))
    change(*stand_ins.launch.args)
    with pytest.raises(NotReproducible):
        stand_ins.changes()
