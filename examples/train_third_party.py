"""Train a language model of flash-linear-attention's layers. Knows nothing of dist_autotune.

    python examples/train_third_party.py [--steps N] [--width W] [--layers L] [--tokens T]
    torchrun --nproc-per-node 2 -m dist_autotune run examples/train_third_party.py

An ordinary script: DeltaNet and gated linear attention in turn, each with a gated MLP; data-parallel under
torchrun. The tokens are random, the same in every run. Rank 0 prints each step's loss, exact in hexadecimal,
and its time with the device idle before and after. Needs a GPU, and `pip install flash-linear-attention`.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from fla.layers import DeltaNet, GatedLinearAttention
from fla.modules import FusedCrossEntropyLoss, GatedMLP, RMSNorm
from torch import nn

VOCABULARY = 8192


class Block(nn.Module):
    """A token mixer, then an MLP, each behind its norm and added to its input [batch, tokens, width]."""

    def __init__(self, mixer: nn.Module, width: int) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.mixer, self.mlp = mixer, GatedMLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.mixer_norm(x))[0]
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        mixers = (
            DeltaNet(hidden_size=width, num_heads=heads, layer_idx=index)
            if index % 2 == 0
            else GatedLinearAttention(hidden_size=width, num_heads=heads, layer_idx=index)
            for index in range(layers)
        )
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(mixer, width) for mixer in mixers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence; a batch has four")
    options = parser.parse_args()
    rank, is_parallel = int(os.environ.get("RANK", "0")), "RANK" in os.environ
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if is_parallel:
        dist.init_process_group("nccl")
    torch.manual_seed(0)
    model: nn.Module = Model(options.width, options.layers, heads=options.width // 256).cuda().bfloat16()
    if is_parallel:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loss_of = FusedCrossEntropyLoss()
    generator = torch.Generator("cuda").manual_seed(rank)
    for step in range(options.steps):
        size = (4, options.tokens + 1)
        tokens = torch.randint(VOCABULARY, size, generator=generator, device="cuda")
        torch.cuda.synchronize()
        began = time.perf_counter()
        logits = model(tokens[:, :-1])
        loss = loss_of(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        exact = loss.item().hex()
        torch.cuda.synchronize()
        if rank == 0:
            print(f"step {step} loss {exact} ms {1e3 * (time.perf_counter() - began):.2f}", flush=True)
    if is_parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
