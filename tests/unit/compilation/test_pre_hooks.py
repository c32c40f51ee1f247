"""What stands in for the arguments of a launch tells no lie about them, and what is changed there is told."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton

from dist_autotune.compilation.pre_hooks import TensorStub, pickle_arguments, rehearse_one, unpickled
from dist_autotune.triton_api.launch import Launch

Pair = namedtuple("Pair", "left right")


@dataclass
class Descriptor:
    base: Any
    block: list[int]
    layout: str = "rows"


class Tuner:
    arg_names = ("one", "two", "three")


def rehearsed(hook: Callable[[dict[str, Any]], None], *args: Any, **kwargs: Any) -> Launch | str:
    """Return what a hook makes of a launch, or why that is not known."""
    launch, kept = Launch(Tuner, args, kwargs), []
    pickled = pickle_arguments(launch, kept, adds=True)
    outcome = rehearse_one(launch, pickled, kept, triton.Config({}, pre_hook=hook))
    return unpickled(launch, outcome, kept) if isinstance(outcome, bytes) else outcome


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
        lambda tensor: torch.cat([tensor, tensor]).device,
    ],
    ids=["tolist", "item", "bool", "cpu", "numpy", "address of a part", "offset", "storage", "of several"],
)
def test_what_a_stand_in_does_not_know_it_refuses(reads):
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        reads(TensorStub.of(torch.ones(4)))


@pytest.mark.parametrize(
    "change",
    [
        lambda descriptor, tensor: setattr(descriptor, "base", tensor[1:]),
        lambda descriptor, tensor: setattr(descriptor, "more", Pair(tensor + 1, 1)),
        lambda descriptor, tensor: tensor.resize_(1),
        lambda descriptor, tensor: tensor.t_(),
    ],
    ids=["base", "hidden", "resized", "transposed"],
)
def test_a_change_that_cannot_be_handed_over_is_refused(change):
    found = rehearsed(
        lambda arguments: change(arguments["one"], arguments["two"]),
        Descriptor(torch.zeros(4, 2), [1, 1]),
        torch.zeros(2, 4),
    )
    assert found.startswith("NotReproducible: ")
