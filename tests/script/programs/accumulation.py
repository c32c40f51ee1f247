"""Gradient accumulation over four batches, with a scaler that skips a step."""

import torch
from scaled import Model, batches

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

for number, (x, y) in enumerate(batches(steps=32)):
    loss = torch.nn.functional.mse_loss(model(x), y)
    scaler.scale(loss / 4).backward()
    if number % 4 == 3:
        if number == 7:
            next(model.parameters()).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(number, loss.item(), scaler.get_scale())
