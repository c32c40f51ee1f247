"""That layers made from ordinary ones train as those: gradients, state dicts, beside FSDP2, compiled."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from documents import blocks, page
from operation_runs import message_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from tp_runs import (
    WIDTH,
    Attention,
    FeedForward,
    alike_on_all_ranks,
    assert_close,
    in_workspaces,
    part_of,
    tensor_of,
    whole,
)

from dist_autotune.kernels import tp
from dist_autotune.kernels.tp import ColumnParallel, RowParallel, SequenceParallel, parallelize
from dist_autotune.kernels.tp.operators import rows_in_fp8

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


def assert_gradients_are_alike(model, plain):
    for (name, expected), got in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            whole(got.grad), expected.grad, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def trains_as_plain(dim, how):
    """Train a model and its parallel copy on the same tokens; compare losses, gradients and parameters."""
    mesh = dist.init_device_mesh("cpu", (2,))
    plain = alike_on_all_ranks(Transformer)
    model = parallelize(copy.deepcopy(plain), mesh, plan_of(dim, how != "gathered again"))
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if how == "compiled" else model
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (plain, model)]
    for _ in range(2):  # the second with parameters that were updated
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH + 1))
        wanted = loss_of(plain, tokens)
        inputs, labels = (part_of(each, mesh, dim) for each in (tokens[:, :-1], tokens[:, 1:]))
        loss = F.cross_entropy(forward(inputs).flatten(0, 1), labels.flatten()) / 2
        for optimizer, each in zip(optimizers, (wanted, loss), strict=True):
            optimizer.zero_grad()
            each.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert_close(total, wanted.detach())
        assert_gradients_are_alike(model, plain)
        for optimizer in optimizers:
            optimizer.step()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (plain, model)]
    assert_close(*map(whole, norms))
    tp.release(mesh)
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("how", "dim"), [("eager", 0), ("gathered again", 1), ("compiled", 1)], ids=str)
@in_workspaces(2)
def test_a_parallel_transformer_trains_as_the_plain_one(rank, how, dim):
    trains_as_plain(dim, how)


@in_workspaces(2)
def test_state_dicts_are_those_of_the_plain_model(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    plain, other = alike_on_all_ranks(Transformer), alike_on_all_ranks(Transformer, seed=1)
    model = parallelize(other, mesh, plan_of(1))
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    back = get_model_state_dict(model, options=options)
    assert all(torch.equal(each, back[name]) for name, each in plain.state_dict().items())
    layer = model.layers["0"]
    parts = [layer.attention.wq.weight, layer.attention.wo.weight, layer.ffn_norm.weight]
    assert [each.to_local().shape for each in parts] == [(8, 16), (16, 8), (16,)]
    text = "ColumnParallelLinear(in_features=16, out_features=16, bias=True, dim=1)"
    assert repr(layer.attention.wq) == text
    with torch.device("meta"):
        empty = parallelize(Transformer(), mesh, plan_of(1))
    empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    tokens = torch.arange(SEQUENCES * LENGTH // 2).view(SEQUENCES, -1) % VOCABULARY
    with torch.no_grad():
        assert torch.equal(empty(tokens), model(tokens))


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


@in_workspaces(2)
def test_modules_that_share_a_parameter_share_it_still(rank):
    mesh, plain = dist.init_device_mesh("cpu", (2,)), Tied()
    with torch.no_grad():
        plain.embedding.weight.copy_(tensor_of(0, 6, WIDTH))
    parallel = parallelize(copy.deepcopy(plain), mesh, {"*": SequenceParallel()})
    tokens = torch.arange(4)
    plain(tokens).square().sum().backward()
    parallel(tokens.chunk(2)[rank]).square().sum().backward()
    (weight,) = parallel.parameters()
    assert_close(weight.grad.full_tensor(), plain.embedding.weight.grad)
    assert sorted(parallel.state_dict()) == ["again.weight", "embedding.weight", "head.weight"]


def linear(rows=4):
    return nn.Sequential(nn.Linear(4, rows))


def norm():
    return nn.Sequential(nn.RMSNorm(4))


WITHOUT_NORMS = {name: style for name, style in plan_of(0).items() if "norm" not in name}
OF_EACH_TOKEN = "SequenceParallel() is for modules that work on each token alone"
WRONG_PLANS = {  # a model, its plan, what is told
    "no such name": (
        *(Transformer, {"layer.*": SequenceParallel()}),
        "ValueError: the plan names 'layer.*', and no module has such a name",
    ),
    "not all": (
        *(Transformer, WITHOUT_NORMS),
        "ValueError: the plan does not reach 3 parameters: layers.0.attention_norm.weight, "
        f"layers.0.ffn_norm.weight, norm.weight; {OF_EACH_TOKEN}",
    ),
    "rows": (
        *(lambda: linear(3), {"0": ColumnParallel()}),
        "ValueError: dimension 0 of a parameter [3, 4] is no multiple of 2 ranks",
    ),
    "a norm": (
        *(norm, {"0": RowParallel()}),
        "TypeError: RMSNorm cannot be split by rows or columns; an nn.Linear is needed",
    ),
    "children": (
        *(linear, {"": SequenceParallel()}),
        "ValueError: Sequential has children; name each of them in the plan",
    ),
    "reached twice": (
        *(norm, {"0": SequenceParallel(), "*": SequenceParallel()}),
        "ValueError: the plan reaches '0' twice, the second time by '*'",
    ),
    "no style": (
        *(norm, {"0": SequenceParallel}),
        f"TypeError: the plan has {SequenceParallel} for '0'; it must be a style, SequenceParallel()",
    ),
    "not all of what is shared": (
        *(Tied, {"embedding": SequenceParallel()}),
        f"ValueError: the plan does not reach 2 parameters: head.weight, again.weight; {OF_EACH_TOKEN}",
    ),
    "two styles of one parameter": (
        *(Tied, {"embedding": SequenceParallel(), "[ha]*": ColumnParallel()}),
        "ValueError: 'embedding.weight' and 'head.weight' are one parameter, and the plan gives them "
        "(Replicate(),) and (Shard(dim=0),); give both modules one style, or each its own parameter",
    ),
}


@in_workspaces(2)
def test_a_plan_that_cannot_be_carried_out_raises_with_names(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    for make, plan, told in WRONG_PLANS.values():
        model = make()
        before = [(name, id(each)) for name, each in model.named_modules()]
        assert message_of(lambda model=model, plan=plan: parallelize(model, mesh, plan)) == told
        assert before == [(name, id(each)) for name, each in model.named_modules()]
        assert not any(isinstance(each, DTensor) for each in model.parameters())
    twice = parallelize(linear(), mesh, {"0": RowParallel()})
    told = "ValueError: a parameter of [4, 4] is distributed already: (Shard(dim=1),)"
    assert message_of(lambda: parallelize(twice, mesh, {"0": RowParallel()})) == told
    of_one = parallelize(nn.RMSNorm(4), mesh, {"": SequenceParallel()})
    assert message_of(lambda: of_one("no tensor")).startswith("TypeError:")
    assert isinstance(of_one.weight, DTensor)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:UserWarning:torch")
@in_workspaces(4, candidate=0)
def test_the_recipe_of_the_page_trains_a_model_as_plain_torch_does(rank):
    program, *_ = blocks(page("docs/tensor_parallel.md"), "python")
    plain = alike_on_all_ranks(Transformer)
    given = {"device_type": "cpu", "dp": 2, "tp": 2, "model": copy.deepcopy(plain)}
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
        assert_close(loss / 2, wanted.detach())
    tp.release(mesh["tp"])


@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
@in_workspaces(2)
def test_a_head_split_by_the_vocabulary_gives_torchs_parallel_loss(rank):
    mesh, plain = dist.init_device_mesh("cpu", (2,)), alike_on_all_ranks(Transformer)
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
    assert_gradients_are_alike(model, plain)


# ---- products in fp8, gradients of bf16 tensors


BF16, TOKENS, FEATURES, HIDDEN = torch.bfloat16, 6, 32, 64
# A rounding to bf16 in front of one to fp8 moves one number in sixteen to fp8's next, 6 % away.
OF_BLOCK = 0.032


def rounded(matrix):
    """Return what the rows of a matrix are in fp8."""
    rows, scales = rows_in_fp8(matrix.to(BF16))
    return rows.float() * scales


def linear_in_fp8(x, weight, parts=1):
    """Return x @ weight.T of rows in fp8, K in so many parts, with the gradients of x and weight as given."""
    pairs = zip(x.chunk(parts, 1), weight.chunk(parts, 1), strict=True)
    in_fp8 = sum(rounded(one.detach()) @ rounded(other.detach()).T for one, other in pairs)
    product = x @ weight.T
    return product + (in_fp8 - product).detach()


def error_of(got, wanted):
    return float((got.float() - wanted).norm() / wanted.norm())


def of_float32(plain, x, ranks):
    """Return the result of all tokens and the gradients of the layers' weights."""
    weights = [layer.weight.detach().float().requires_grad_() for layer in (plain.w1, plain.w3, plain.w2)]
    w1, w3, w2 = weights
    hidden = (F.silu(linear_in_fp8(x, w1).bfloat16().float()) * linear_in_fp8(x, w3)).bfloat16().float()
    result = linear_in_fp8(hidden, w2, ranks)
    return result.detach(), torch.autograd.grad(result.square().sum(), weights)


@pytest.mark.usefixtures("compiler")
@in_workspaces(2)
def test_a_block_multiplies_in_fp8_and_its_gradients_are_those_of_its_bf16_tensors(rank):
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = FeedForward(FEATURES, HIDDEN).to(BF16)
    style = {"": ColumnParallel("w1", "w3", fp8=True), "w2": RowParallel(fp8=True)}
    model = parallelize(copy.deepcopy(plain), mesh, style)
    whole = torch.randn(2 * TOKENS, FEATURES).to(BF16)
    wanted, gradients = of_float32(plain, whole.float(), 2)
    in_bf16 = plain(whole).detach().float()
    found = []
    compiled = torch.compile(lambda x: model(x), fullgraph=True, backend="aot_eager")  # with its hooks
    for forward in (model, compiled):
        model.zero_grad()
        result = forward(whole.chunk(2)[rank])
        result.float().square().sum().backward()
        of_weights = [layer.weight.grad.full_tensor() for layer in (model.w1, model.w3, model.w2)]
        found.append([result.detach(), *of_weights])
    eager, of_graph = found
    own = wanted.chunk(2)[rank]
    errors = [error_of(*pair) for pair in zip(eager, [own, *gradients], strict=True)]
    assert max(errors) < OF_BLOCK < error_of(in_bf16.chunk(2)[rank], own)
    assert all(map(torch.equal, eager, of_graph))  # compiling changes no bit
    with torch.no_grad():
        assert torch.equal(model(whole.chunk(2)[rank]), eager[0])


@in_workspaces(2)
def test_what_cannot_be_in_fp8_raises_with_values_and_the_next_call_works(rank):
    of_type = "TypeError: fp8=True takes activations and weights in torch.bfloat16, not torch.float32"
    of_rows = "ValueError: k=24: rows of torch.float8_e4m3fn are whole 16 bytes; pad K to 32"
    x, up, halves = tensor_of(rank, 4, 16), tensor_of(0, 32, 16), tensor_of(0, 32, 24).to(BF16)
    layer, mesh = nn.Linear(16, 16), dist.init_device_mesh("cpu", (2,))
    for call, told in (
        (lambda: tp.all_gather_matmul(x, up, fp8=True), of_type),
        (lambda: tp.matmul_reduce_scatter(x, up, fp8=True), of_type),
        (lambda: tp.all_gather_matmul(halves[:4], halves, fp8=True), of_rows),
        (lambda: tp.matmul_reduce_scatter(halves[:4], halves, fp8=True), of_rows),
        (
            lambda: tp.ColumnParallelLinear(layer, mesh, gather=False, fp8=True),
            "ValueError: fp8=True, gather=False: without a gather the product is torch's, in bf16",
        ),
        (
            lambda: tp.RowParallelLinear(layer, mesh, all_reduce=True, fp8=True),
            "ValueError: fp8=True, all_reduce=True: products before an all-reduce are in bf16",
        ),
    ):
        assert message_of(call) == told
    product = tp.matmul_reduce_scatter(halves[:4, :16], halves[:, :16], fp8=True)
    assert (product.shape, product.dtype) == ((2, 32), BF16)
