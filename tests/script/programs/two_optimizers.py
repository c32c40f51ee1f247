"""Two optimizers that step in every iteration, and one with a closure after them."""

import torch
from scaled import Model, batches

torch.manual_seed(0)
model = Model()
first = torch.optim.AdamW(model.first.parameters(), lr=0.01)
second = torch.optim.SGD(model.second.parameters(), lr=0.01)

for number, (x, y) in enumerate(batches()):
    loss = torch.nn.functional.mse_loss(model(x), y)
    model.zero_grad()
    loss.backward()
    first.step()
    second.step()
    print(number, loss.item())

refining = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
for number, (x, y) in enumerate(batches(steps=3)):

    def closure(x=x, y=y):
        refining.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    print("refined", number, refining.step(closure).item())
