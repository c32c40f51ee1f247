"""A LightningModule and its Trainer."""

import logging
import os
import sys
import warnings

import lightning
import torch
from scaled import Model, batches

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, batch, number):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        print(number, loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


lightning.seed_everything(0, verbose=False)
callbacks = []
if "--tuned" in sys.argv:
    from tuned_lightning import TunedSteps

    callbacks.append(TunedSteps())
ranks = int(os.environ.get("WORLD_SIZE", "1"))
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    callbacks=callbacks,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Task(), torch.utils.data.DataLoader(list(batches(steps=24)), batch_size=None))
