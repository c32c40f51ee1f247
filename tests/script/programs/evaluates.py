"""Accumulated gradients, evaluations of a larger batch, checkpoints. --tuned: its steps are a StepTuner's."""

import contextlib
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from scaled import Model, batches

from dist_autotune import StepTuner, contextual_autotune

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loop = SimpleNamespace(step=contextlib.nullcontext)
if "--tuned" in sys.argv:
    loop = StepTuner(is_dist=True, n_repeat=1, n_warmup=0, progress=False, name="train")


@contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0, progress=False)
def evaluate(x, y):
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(x), y)


every = list(batches(rank, 24))
held_out = [torch.cat(each) for each in zip(*batches(rank + 10, 3), strict=True)]
for step in range(12):
    with loop.step():
        for x, y in every[2 * step : 2 * step + 2]:
            (torch.nn.functional.mse_loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    if step % 4 == 3:
        print(step, evaluate(*held_out).item())
        torch.save({"model": model.state_dict(), "step": step}, f"checkpoint-{rank}.pt")
