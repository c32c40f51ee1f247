"""A plain training loop, data-parallel when it is started on several ranks."""

import gc
import os

import torch
import torch.distributed as dist
from scaled import DEVICE, Model, batches

is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
if DEVICE != "cpu":
    torch.cuda.set_device(DEVICE)
if is_distributed:
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl")
rank = dist.get_rank() if is_distributed else 0

torch.manual_seed(0)
model = Model().to(DEVICE)
if is_distributed:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for number, (x, y) in enumerate(batches(rank, int(os.environ.get("STEPS", "12")))):
    x, y = x.to(DEVICE), y.to(DEVICE)
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(number, loss.item())
    if number % 5 == 4:
        with torch.no_grad():
            print("evaluation", torch.nn.functional.mse_loss(model(x), y).item())

if is_distributed:
    del model, optimizer  # who hold the group when Python ends meet an abort of gloo's, now and then
    gc.collect()
    dist.destroy_process_group()
