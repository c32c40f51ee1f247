"""That layers made from ordinary ones train as those: gradients, state dicts, beside FSDP2, compiled."""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from operation_runs import message_of, values
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint
from tp_runs import (
    WIDTH,
    Attention,
    FeedForward,
    alike_on_all_ranks,
    assert_close,
    part_of,
    tensor_of,
    whole,
    workspaces,
)

from dist_autotune.kernels import tp
from dist_autotune.kernels.tp import ColumnParallel, RowParallel, SequenceParallel, parallelize

VOCABULARY, LAYERS, SEQUENCES, LENGTH = 20, 1, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward(WIDTH, 3 * WIDTH)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def plan_of(dim, save_gathered=True):
    return {
        "tok_embeddings": SequenceParallel(),
        "layers.*.*_norm": SequenceParallel(),
        "layers.*.attention": ColumnParallel("wq", "wk", "wv", dim=dim, save_gathered=save_gathered),
        "layers.*.attention.wo": RowParallel(dim=dim),
        "layers.*.feed_forward": ColumnParallel("w1", "w3", dim=dim, save_gathered=save_gathered),
        "layers.*.feed_forward.w2": RowParallel(dim=dim),
        "norm": SequenceParallel(),
        "output": SequenceParallel(),
    }


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def trained_beside_plain(rank, dim, how):
    """Train a model and its parallel copy on the same tokens; compare losses, gradients and parameters."""
    dp = 2 if how == "fsdp" else 1
    with workspaces(rank) as world:
        mesh = dist.init_device_mesh("cpu", (dp, world // dp), mesh_dim_names=("dp", "tp"))
        plain = alike_on_all_ranks(Transformer)
        model = parallelize(copy.deepcopy(plain), mesh["tp"], plan_of(dim, how != "gathered again"))
        if how == "fsdp":
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        if how == "checkpointed":
            for layer in model.layers.values():
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        forward = torch.compile(model, fullgraph=True, backend="aot_eager") if how == "compiled" else model
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (plain, model)]
        for _ in range(2):  # the second with parameters that were updated
            tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1))
            wanted = loss_of(plain, tokens)
            own = part_of(tokens, mesh["dp"], 0)
            inputs, labels = (part_of(each, mesh["tp"], dim) for each in (own[:, :-1], own[:, 1:]))
            logits = forward(inputs).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten()) / mesh["tp"].size()
            for optimizer, each in zip(optimizers, (wanted, loss), strict=True):
                optimizer.zero_grad()
                each.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert_close(total / dp, wanted.detach())
            for (name, expected), got in zip(plain.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(
                    whole(got.grad),
                    expected.grad,
                    rtol=1e-3,
                    atol=1e-5,
                    msg=lambda text, n=name: f"{n}: {text}",
                )
            for optimizer in optimizers:
                optimizer.step()
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (plain, model)]
        assert_close(*map(whole, norms))
        tp.release(mesh["tp"])
    return list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("how", "dim"),
    [("eager", 0), ("gathered again", 1), ("checkpointed", 0), ("compiled", 1)],
    ids=str,
)
def test_a_parallel_transformer_trains_as_the_plain_one(how, dim):
    assert values(trained_beside_plain, 2, dim, how) == [True] * 2


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning:torch")
def test_so_it_does_beside_fsdp2():
    assert values(trained_beside_plain, 4, 0, "fsdp") == [True] * 4


def state_dicts(rank):
    """Take a plain state dict into a parallel model and back, and one of the meta device."""
    with workspaces(rank):
        mesh = dist.init_device_mesh("cpu", (2,))
        plain, other = alike_on_all_ranks(Transformer), alike_on_all_ranks(Transformer, seed=1)
        model = parallelize(other, mesh, plan_of(1))
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, plain.state_dict(), options=options)
        back = get_model_state_dict(model, options=options)
        shards = {name: list(each.to_local().shape) for name, each in model.state_dict().items()}
        with torch.device("meta"):
            empty = parallelize(Transformer(), mesh, plan_of(1))
        empty.to_empty(device="cpu")
        empty.load_state_dict(model.state_dict())
        tokens = torch.arange(SEQUENCES * LENGTH // 2).view(SEQUENCES, -1) % VOCABULARY
        with torch.no_grad():
            alike = torch.equal(empty(tokens), model(tokens))
        return (
            alike,
            all(torch.equal(each, back[name]) for name, each in plain.state_dict().items()),
            [shards[f"layers.0.{name}.weight"] for name in ("attention.wq", "attention.wo", "ffn_norm")],
            repr(model.layers["0"].attention.wq),
        )


def test_state_dicts_are_those_of_the_plain_model():
    for alike, same, shapes, text in values(state_dicts, 2):
        assert alike
        assert same
        assert shapes == [[8, 16], [16, 8], [16]]
        assert text == "ColumnParallelLinear(in_features=16, out_features=16, bias=True, dim=1)"


def swiglu(rank):
    with workspaces(rank) as world:
        mesh = dist.init_device_mesh("cpu", (world,))
        plain = alike_on_all_ranks(lambda: FeedForward(WIDTH, 3 * WIDTH))
        x = torch.cat([tensor_of(each, 6, WIDTH) for each in range(world)])
        layer = tp.SwiGLU(plain.w1, plain.w3, plain.w2, mesh, names=("w1", "w3", "w2"))
        own = tensor_of(rank, 6, WIDTH)
        result, wanted = layer(own), plain(x)
        assert_close(result, part_of(wanted, mesh, 0))
        result.square().sum().backward()
        wanted.square().sum().backward()
        for name, parameter in plain.named_parameters():
            assert_close(whole(layer.get_parameter(name).grad), parameter.grad)
        return sorted(layer.state_dict()) == sorted(plain.state_dict())


@pytest.mark.parametrize("world", [1, 3])
def test_a_swiglu_is_made_from_three_linear_layers(world):
    assert values(swiglu, world) == [True] * world


class Tied(nn.Module):
    """An embedding and a head of one weight, and one module at two places."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.head

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x) - 2 * self.again(x.sin())


def tied_gradients(rank):
    with workspaces(rank) as world:
        mesh = dist.init_device_mesh("cpu", (world,))
        plain = Tied()
        with torch.no_grad():
            plain.embedding.weight.copy_(tensor_of(0, 6, WIDTH))
        parallel = parallelize(copy.deepcopy(plain), mesh, {"*": SequenceParallel()})
        tokens = torch.arange(2 * world)
        plain(tokens).square().sum().backward()
        parallel(tokens.chunk(world)[rank]).square().sum().backward()
        (weight,) = parallel.parameters()
        assert_close(weight.grad.full_tensor(), plain.embedding.weight.grad)
        return sorted(parallel.state_dict())


def test_modules_that_share_a_parameter_share_it_still():
    assert values(tied_gradients, 2) == [["again.weight", "embedding.weight", "head.weight"]] * 2


def wrong_plans(rank):
    with workspaces(rank):
        mesh = dist.init_device_mesh("cpu", (2,))

        def told(module, plan):
            return message_of(lambda: parallelize(module, mesh, plan))

        twice = parallelize(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": RowParallel()})
        norm = parallelize(nn.RMSNorm(4), mesh, {"": SequenceParallel()})
        raised = message_of(lambda: norm("no tensor"))
        half_planned = Transformer()
        before = [(name, id(each)) for name, each in half_planned.named_modules()]
        tied = Tied()
        return [
            told(Transformer(), {"layer.*": SequenceParallel()}),
            told(half_planned, {name: style for name, style in plan_of(0).items() if "norm" not in name}),
            told(nn.Sequential(nn.Linear(4, 3)), {"0": ColumnParallel()}),
            told(nn.Sequential(nn.RMSNorm(4)), {"0": RowParallel()}),
            told(nn.Sequential(nn.Linear(4, 4)), {"": SequenceParallel()}),
            told(twice, {"0": RowParallel()}),
            told(nn.Sequential(nn.RMSNorm(4)), {"0": SequenceParallel(), "*": SequenceParallel()}),
            told(nn.Sequential(nn.RMSNorm(4)), {"0": SequenceParallel}),
            told(tied, {"embedding": SequenceParallel()}),
            told(tied, {"embedding": SequenceParallel(), "[ha]*": ColumnParallel()}),
            raised.partition(":")[0],
            isinstance(norm.weight, DTensor),
            before == [(name, id(each)) for name, each in half_planned.named_modules()],
            all(not isinstance(each, DTensor) for each in half_planned.parameters()),
        ]


def test_a_plan_that_cannot_be_carried_out_raises_with_names():
    for texts in values(wrong_plans, 2):
        assert texts == [
            "ValueError: the plan names 'layer.*', and no module has such a name",
            "ValueError: the plan does not reach 3 parameters: layers.0.attention_norm.weight, "
            "layers.0.ffn_norm.weight, norm.weight; SequenceParallel() is for modules that work on each "
            "token alone",
            "ValueError: dimension 0 of a parameter [3, 4] is no multiple of 2 ranks",
            "TypeError: RMSNorm cannot be split by rows or columns; an nn.Linear is needed",
            "ValueError: Sequential has children; name each of them in the plan",
            "ValueError: a parameter of [4, 4] is distributed already: (Shard(dim=1),)",
            "ValueError: the plan reaches '0' twice, the second time by '*'",
            f"TypeError: the plan has {SequenceParallel} for '0'; it must be a style, SequenceParallel()",
            "ValueError: the plan does not reach 2 parameters: head.weight, again.weight; SequenceParallel() "
            "is for modules that work on each token alone",
            "ValueError: 'embedding.weight' and 'head.weight' are one parameter, and the plan gives them "
            "(Replicate(),) and (Shard(dim=0),); give both modules one style, or each its own parameter",
            "TypeError",
            *[True] * 3,
        ]


RECIPE = Path(__file__).parents[3] / "docs" / "tensor_parallel.md"


def recipe(rank, dp):
    """Run the program of the page on a model, and compare what it trains with plain torch."""
    program, *_ = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    with workspaces(rank, 0) as world:
        plain = alike_on_all_ranks(Transformer)
        given = {"device_type": "cpu", "dp": dp, "tp": world // dp, "model": copy.deepcopy(plain)}
        given["make_optimizer"] = functools.partial(torch.optim.SGD, lr=0.1)
        exec(program, given)
        optimizer, mesh = given["make_optimizer"](plain.parameters()), given["mesh"]
        for _ in range(2):
            tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1))
            optimizer.zero_grad()
            wanted = loss_of(plain, tokens)
            wanted.backward()
            optimizer.step()
            own = part_of(tokens, mesh["dp"], 0)
            loss = given["train_step"](own[:, :-1], own[:, 1:])
            dist.all_reduce(loss)
            assert_close(loss / dp, wanted.detach())
        tp.release(mesh["tp"])


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning:torch")
def test_the_recipe_of_the_page_trains_a_model_as_plain_torch_does():
    values(recipe, 4, 2)


def vocabulary_parallel(rank):
    """Split the head by the vocabulary, and let torch's loss_parallel make one loss of all tokens."""
    with workspaces(rank):
        mesh = dist.init_device_mesh("cpu", (2,))
        plain = alike_on_all_ranks(Transformer)
        model = parallelize(copy.deepcopy(plain), mesh, {**plan_of(1), "output": ColumnParallel(dim=1)})
        torch.manual_seed(0)
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1))
        wanted = loss_of(plain, tokens)
        wanted.backward()
        logits = model(part_of(tokens[:, :-1], mesh, 1)).flatten(0, 1)
        assert logits.shape == (SEQUENCES * LENGTH, VOCABULARY // 2)
        with loss_parallel():
            loss = F.cross_entropy(DTensor.from_local(logits, mesh, [Shard(1)]), tokens[:, 1:].flatten())
            loss.backward()
        assert_close(whole(loss), wanted)
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(got.grad), expected.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_a_head_split_by_the_vocabulary_gives_torchs_parallel_loss():
    values(vocabulary_parallel, 2)
