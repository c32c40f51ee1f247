"""State that is put back: copied once, whatever its holder does with what it loads."""

import random
import types
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dist_autotune.repeats.snapshot import Snapshot, check_preserved


class Copies(TorchDispatchMode):
    """Counts the elements of tensors that are copied into new memory in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._to_copy):
            self.elements += result.numel()
        return result


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.rand(8, 64)).sum().backward()
    optimizer.step()


def values(state: Any) -> list[Any]:
    return [
        each.clone() if isinstance(each, torch.Tensor) else each
        for each in torch.utils._pytree.tree_leaves(state)
    ]


def test_putting_back_makes_no_further_copy_of_the_state():
    model, optimizer = trained()
    before = values([model.state_dict(), optimizer.state_dict()])
    with Copies() as kept:
        snapshot = Snapshot([model, optimizer])
    assert kept.elements >= 2 * 64 * 64
    for _ in range(3):
        train(model, optimizer)
        with Copies() as restored:
            snapshot.restore()
        assert restored.elements == 0
        after = values([model.state_dict(), optimizer.state_dict()])
        assert all(
            torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(before, after, strict=True)
        )


class Holder:
    """Keeps the very tensors that it is given to load, as optimizers do."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": dict(self.tensors), "list": [1, [2]], "pair": (3, torch.ones(2))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert (state["list"], state["pair"][0]) == ([1, [2]], 3)
        self.tensors = state["tensors"]


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("a"),
        lambda tensors: tensors.update(a=torch.zeros(3)),
        lambda tensors: tensors.update(a=torch.zeros(2, dtype=torch.float64)),
        lambda tensors: tensors.update(a=torch.zeros(1).expand(2)),
        lambda tensors: tensors.update(c=torch.zeros(2)),
        lambda tensors: tensors["a"].add_(1),
    ],
    ids=["gone", "of another size", "of another type", "expanded", "more of them", "changed"],
)
def test_whatever_a_run_has_made_of_the_state_it_is_what_it_was(change):
    holder = Holder(a=torch.full((2,), 7.0), b=torch.eye(2).to_sparse())
    snapshot = Snapshot([holder])
    for _ in range(2):
        change(holder.tensors)
        snapshot.restore()
        assert sorted(holder.tensors) == ["a", "b"]
        assert torch.equal(holder.tensors["a"], torch.full((2,), 7.0))
        assert torch.equal(holder.tensors["b"].to_dense(), torch.eye(2))
        holder.tensors["a"].mul_(3)


class Slotted:
    __slots__ = ("number", "tensor", "unbound")

    def __init__(self) -> None:
        self.number, self.tensor = 1, torch.ones(2)

    def state_dict(self) -> dict[str, Any]:
        return {}


class SlottedToo(Slotted):
    __slots__ = ()


@pytest.mark.parametrize("kind", [Slotted, SlottedToo, type("WithBoth", (Slotted,), {})])
def test_what_an_object_keeps_in_slots_is_put_back(kind):
    holder = kind()
    tensor = holder.tensor
    check_preserved([holder])
    snapshot = Snapshot([holder])
    tensor.add_(1)
    holder.number, holder.tensor, holder.unbound = 2, torch.zeros(3), [5]
    snapshot.restore()
    assert (holder.number, holder.tensor is tensor, hasattr(holder, "unbound")) == (1, True, False)
    assert torch.equal(tensor, torch.ones(2))
    del holder.number
    snapshot.restore()
    assert holder.number == 1


def made_for_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def with_expanded_gradient() -> torch.Tensor:
    tensor = torch.ones(3, requires_grad=True)
    tensor.grad = torch.ones(1).expand(3)
    return tensor


@pytest.mark.parametrize(
    "make",
    [made_for_inference, with_expanded_gradient, lambda: torch.eye(3).to_sparse()],
    ids=["of inference mode", "with an expanded gradient", "sparse"],
)
def test_a_tensor_of_any_kind_is_put_back(make):
    tensor = make()
    snapshot = Snapshot([tensor])
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.mul_(2)
        if tensor.grad is not None:
            tensor.grad = tensor.grad + 1
    snapshot.restore()
    assert torch.equal(tensor.to_dense(), make().to_dense())
    assert (tensor.grad is None) or torch.equal(tensor.grad, torch.ones(3))


class Adapted(torch.nn.Module):
    """A module of which most is in no state_dict: LoRA's, of experts that count, with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.zeros(2, 2))
        self.register_buffer("counts", torch.zeros(2), persistent=False)
        self.cache, self.caches, self.calls = torch.zeros(2), {"a": [torch.zeros(1)]}, 0
        self.base.weight.main_grad = torch.zeros(2, 2)
        self.operation: Any = None
        self.register_state_dict_post_hook(lambda module, state, *_: state.pop("base.weight"))

    def run(self) -> None:
        self.calls += 1
        self.operation = self.operation or object()
        with torch.no_grad():
            for tensor in (self.base.weight, self.adapter, self.counts, self.base.weight.main_grad):
                tensor.add_(1)
        self.cache, self.caches["b"] = self.cache + 1, []
        self.caches["a"].append(self.caches["a"][0].add_(1))
        self.eval()


def test_what_a_module_keeps_beside_its_state_dict_is_put_back_in_place():
    module = Adapted()
    weight, cache, memory = module.base.weight.detach().clone(), module.cache, module.counts.data_ptr()
    snapshot = Snapshot([module])
    module.run()
    made = module.operation
    snapshot.restore()
    zeros = module.adapter, module.counts, module.cache, module.base.weight.main_grad, module.caches["a"][0]
    assert not any(each.any() for each in zeros)
    assert torch.equal(module.base.weight, weight)
    assert module.cache is cache
    assert module.training
    assert module.base.training
    assert module.counts.data_ptr() == memory
    assert (list(module.caches), len(module.caches["a"]), module.calls) == (["a"], 1, 0)
    assert module.operation is made is not None  # no state: it is not made again in each run


def test_an_optimizer_s_state_keeps_its_dtype_and_its_objects():
    model, optimizer = trained()
    moment = torch.zeros(64, 64, dtype=torch.float64)
    optimizer.state[model[0].weight]["own"] = moment
    optimizer.param_groups[0]["lr"] = 0.25
    snapshot = Snapshot([torch.optim.lr_scheduler.ConstantLR(optimizer)])  # through what holds it
    moment.add_(1)
    optimizer.param_groups[0]["lr"] = 0.5
    train(model, optimizer)
    snapshot.restore()
    assert optimizer.state[model[0].weight]["own"] is moment
    assert moment.dtype == torch.float64
    assert not moment.any()
    assert optimizer.param_groups[0]["lr"] == 0.25 / 3


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(2, generator=g).tolist()),
        (lambda: np.random.default_rng(1), lambda g: g.random(2).tolist()),
        (lambda: np.random.RandomState(1), lambda g: g.rand(2).tolist()),
        (lambda: random.Random(1), lambda g: g.random()),
    ],
    ids=["torch", "numpy", "numpy, legacy", "python"],
)
@pytest.mark.parametrize("is_held", [False, True], ids=["named", "held"])
def test_a_generator_gives_the_same_numbers_again(make, draw, is_held):
    generator = make()
    named = types.SimpleNamespace(held=deque([generator])) if is_held else generator
    check_preserved([named])
    snapshot = Snapshot([named])
    first = draw(generator)
    snapshot.restore()
    assert draw(generator) == first


def test_a_graph_through_a_model_goes_backward_behind_a_call_that_left_the_model_alone():
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
    model, x = torch.nn.Sequential(*layers), torch.rand(2, 4, requires_grad=True)
    loss = model(x).sum()
    snapshot = Snapshot([model])
    model[1].running_mean.data.add_(1)  # as a forward does: autograd does not see it
    snapshot.restore()
    loss.backward()
    assert x.grad is not None
    loss = model(x).sum()
    snapshot = Snapshot([model])
    with torch.no_grad():
        model[2].weight.add_(1)
    snapshot.restore()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
