"""That tensor-parallel layers train as plain ones beside shards, checkpoints, compiling and a pipeline."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from operation_runs import device, on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from tp_runs import FeedForward, part_of, whole, workspaces

from dist_autotune import contextual_autotune
from dist_autotune.kernels import tp
from dist_autotune.kernels.ag_gemm import plain as of_gather
from dist_autotune.kernels.gemm_rs import plain as of_scatter
from dist_autotune.kernels.tp import ColumnParallel, RowParallel, SequenceParallel, parallelize

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* has not been tuned"),  # at first they have not
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Dynamo looks at `grad` of what a norm's parameters are made for the call, in a module of FSDP2.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
SMALL, LARGE = 16, 256  # width
EXACT, ROUNDED = 1e-4, 0.05  # of float32; of bfloat16, a few roundings to 8 bits
SEQUENCES = 4
STEPS, TUNED_STEP = 3, 1  # from this one on, steps are trials


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(width), FeedForward(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


PLAN = {
    "*.norm": SequenceParallel(),
    "*.mlp": ColumnParallel("w1", "w3", dim=1),
    "*.mlp.w2": RowParallel(dim=1),
}


def blocks(number: int, width: int) -> nn.Sequential:
    """Return blocks with random parameters, the same on all ranks."""
    torch.manual_seed(number)
    model = nn.Sequential(*(Block(width) for _ in range(number)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    return model.to(device())


def batch(step: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, wanted = (torch.randn(SEQUENCES, width // 2, width, generator=generator) for _ in range(2))
    return x.to(device()), wanted.to(device())


def loss_of(result: Tensor, wanted: Tensor) -> Tensor:
    return (result.float() - wanted.float()).square().mean()


def difference(got: Tensor, wanted: Tensor) -> float:
    wanted = wanted.detach().float()
    return float((whole(got.detach()).float() - wanted).norm() / wanted.norm())


@contextmanager
def two_candidates(rank: int) -> Iterator[int]:
    """Leave the kernels two candidates each, so that a session has something to try."""
    with workspaces(rank, 0) as world:
        of_gather.all_gather_gemm.configs = of_gather.CANDIDATES[:2]
        of_scatter.gemm_reduce_scatter.configs = of_scatter.CANDIDATES[:2]
        yield world


def in_shards(model: nn.Module, mesh: dist.DeviceMesh, compiler: str) -> None:
    """Compile, checkpoint and shard each block, then the rest; on GPUs, multiply in bfloat16."""
    if compiler == "inductor":
        from torch._inductor import config  # takes its time

        config.compile_threads = 1  # no pool of processes in a rank
    policy = MixedPrecisionPolicy()
    if device() != "cpu":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for name, block in list(model.named_children()):
        block.compile(backend=compiler, fullgraph=True)
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
        model.register_module(name, wrapped)
        fully_shard(wrapped, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def trains(rank: int, dp: int, number: int, width: int, compiler: str, most: float) -> None:
    """Train with shards, checkpoints and compiled blocks; from the second step on, steps are trials.

    Losses, gradients and parameters differ so much from plain torch's at most.
    """
    with two_candidates(rank) as world:
        kind = torch.device(device()).type
        mesh = dist.init_device_mesh(kind, (dp, world // dp), mesh_dim_names=("dp", "tp"))
        plain = blocks(number, width)
        model = parallelize(copy.deepcopy(plain), mesh["tp"], PLAN)
        in_shards(model, mesh["dp"], compiler)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        found: list[float] = []

        def forward_and_backward(x: Tensor, wanted: Tensor) -> Tensor:
            own = [part_of(part_of(each, mesh["dp"], 0), mesh["tp"], 1) for each in (x, wanted)]
            loss = loss_of(model(own[0]), own[1]) / mesh["tp"].size()
            loss.backward()
            return loss.detach()

        options = {"cache": False, "log_dir": None, "progress": False, "n_warmup": 0, "n_repeat": 1}
        tuned = contextual_autotune(forward_and_backward, is_dist=True, mode="online", **options)
        for step in range(STEPS):
            x, wanted = batch(step, width)
            loss = (forward_and_backward if step < TUNED_STEP else tuned)(x, wanted)
            of_plain = loss_of(plain(x), wanted)
            of_plain.backward()
            dist.all_reduce(loss)
            found.append(difference(loss / dp, of_plain.detach()))
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            found += [difference(got.grad, wanted.grad) for got, wanted in pairs]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found += [difference(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True)]
        assert tuned.report.contexts
        tp.release(mesh["tp"])
    assert max(found) < most


def move(model: nn.Module) -> None:
    """Put every parameter elsewhere, and leave NaN in its place."""
    before = [p.to_local() if isinstance(p, DTensor) else p.data for p in model.parameters()]
    model._apply(lambda tensor: tensor.clone())
    for each in before:
        each.detach().fill_(float("nan"))


def pipes(rank: int, width: int, most: float) -> None:
    """Train two stages of a block each, whose weights move between steps.

    Kernels of a call begin when all tensor-parallel peers have come to it, so that they keep out no send that
    a peer waits for. By itself 1F1B computes only behind what a stage has sent and received.
    """
    with workspaces(rank) as world:
        kind, tensor = torch.device(device()).type, torch.float32 if device() == "cpu" else torch.bfloat16
        mesh = dist.init_device_mesh(kind, (2, world // 2), mesh_dim_names=("pp", "tp"))
        place, plain = mesh["pp"].get_local_rank(), blocks(2, width).to(tensor).float()
        block = copy.deepcopy(plain[place : place + 1]).to(tensor)
        model = parallelize(block, mesh["tp"], PLAN)
        tp.meet_first(mesh["tp"])
        example = part_of(batch(0, width)[0], mesh["tp"], 1).chunk(2)[0].to(tensor).contiguous()
        hidden = example.clone().requires_grad_()
        stage = PipelineStage(
            model, place, 2, torch.device(device()), input_args=hidden if place else example,
            output_args=hidden, group=mesh["pp"].get_group(),
        )  # fmt: skip
        found: list[float] = []
        for step in range(2):
            schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of)
            x, wanted = (part_of(each, mesh["tp"], 1).to(tensor).contiguous() for each in batch(step, width))
            losses: list[Tensor] = []
            schedule.step(x) if place == 0 else schedule.step(target=wanted, losses=losses)
            of_plain = loss_of(plain(batch(step, width)[0].to(tensor).float()), batch(step, width)[1])
            of_plain.backward()
            for got, expected in zip(model.parameters(), plain[place].parameters(), strict=True):
                found.append(difference(got.grad / mesh["tp"].size(), expected.grad))
            for each in (plain, model):
                each.zero_grad()
            move(model)
        tp.release(mesh["tp"])
    assert max(found) < most


@pytest.mark.usefixtures("compiler")
@on_ranks(2)
def test_a_block_in_shards_checkpointed_and_compiled_trains_while_it_is_tuned(rank):
    trains(rank, 1, 1, SMALL, "aot_eager", EXACT)


@pytest.mark.gpu(devices=2, seconds=60)
@on_ranks(2)
def test_so_do_two_on_two_gpus(rank):
    trains(rank, 1, 2, LARGE, "inductor", ROUNDED)


@pytest.mark.gpu(devices=4, seconds=60)
@on_ranks(4)
def test_so_do_two_on_four_gpus(rank):
    trains(rank, 2, 2, LARGE, "inductor", ROUNDED)


@on_ranks(4, timeout_s=60.0)
def test_two_stages_of_a_pipeline_train_while_their_weights_move(rank):
    pipes(rank, SMALL, EXACT)


@pytest.mark.gpu(devices=2, seconds=30)
@on_ranks(2)
def test_two_stages_of_a_pipeline_train_on_two_gpus(rank):
    pipes(rank, LARGE, ROUNDED)


@pytest.mark.gpu(devices=4, seconds=40)
@on_ranks(4)
def test_two_stages_of_a_pipeline_train_on_four_gpus(rank):
    pipes(rank, LARGE, ROUNDED)
