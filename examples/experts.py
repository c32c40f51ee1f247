"""A mixture of experts that live on different ranks, tuned while it trains.

    ./launch.sh examples/experts.py [--steps STEPS] [--tokens TOKENS] [--width WIDTH] [--experts EXPERTS]

Each rank has its own tokens and a share of the experts. A router, the same on all ranks, sends each token to
two of them; `ExpertParallelMoE` takes it there and brings the results back. An expert's gradient comes from
the tokens of all ranks, so the router's alone is added up by an all-reduce. What is learnt: each kind of
token has a linear map of its own.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch._dynamo  # before the process group, see docs/troubleshooting.md: a rank aborts at its exit
import torch.distributed as dist
import triton

from dist_autotune import contextual_autotune
from dist_autotune.kernels.ep import ExpertParallel, ExpertParallelMoE

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOPK = 2


def set_up() -> torch.device:
    """Join the process group that torchrun describes, on this rank's device."""
    if not ON_GPU:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Experts on different ranks, tuned while they train.")
    parser.add_argument("--steps", type=int, default=2000 if ON_GPU else 80)
    parser.add_argument("--tokens", type=int, default=4096 if ON_GPU else 24, help="of each rank")
    parser.add_argument("--width", type=int, default=1024 if ON_GPU else 32)
    parser.add_argument("--experts", type=int, default=4 * int(os.environ.get("WORLD_SIZE", 1)))
    return parser.parse_args()


class Model(torch.nn.Module):
    """Adds to each token what its two most probable experts make of it."""

    def __init__(self, op: ExpertParallel, experts: int, width: int) -> None:
        super().__init__()
        self.router = torch.nn.Linear(width, experts, bias=False, device=op.device)
        dist.broadcast(self.router.weight.detach(), src=0)
        self.experts = ExpertParallelMoE(op, width // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances, ids = self.router(x).softmax(-1).topk(TOPK)
        return self.experts(x.to(DTYPE), ids, chances / chances.sum(-1, keepdim=True)).float()


def main() -> None:
    options = parse()
    device = set_up()
    torch.manual_seed(0)  # the same data on all ranks
    kinds = torch.randn(options.experts, options.width, device=device)
    maps = torch.randn(options.experts, options.width, options.width, device=device) / options.width**0.5
    torch.manual_seed(1 + dist.get_rank())  # other tokens and experts on each

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        kind = torch.randint(options.experts, (options.tokens,), device=device)
        x = kinds[kind] + 0.3 * torch.randn(options.tokens, options.width, device=device)
        return x, torch.einsum("th,tho->to", x, maps[kind])

    with ExpertParallel(options.tokens, options.width, options.experts, TOPK, DTYPE) as op:
        model = Model(op, options.experts, options.width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if ON_GPU else 1e-2)

        @contextual_autotune(is_dist=True, mode="online", name="experts example")
        def step(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), wanted)
            (loss / dist.get_world_size()).backward()
            dist.all_reduce(model.router.weight.grad)
            optimizer.step()
            return loss.detach()

        losses = [step(*batch()) for _ in range(options.steps)]
        op.check()
    of_all = torch.stack([losses[0], torch.stack(losses[-5:]).mean()])
    dist.all_reduce(of_all)
    first, left = (of_all / dist.get_world_size()).tolist()
    if dist.get_rank() == 0:
        print(step.report)
        print(f"{options.steps} steps; loss {first:.3f} at first, {left:.3f} at the end")
    if not left < 0.9 * first:
        raise SystemExit(f"rank {dist.get_rank()}: nothing was learnt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
