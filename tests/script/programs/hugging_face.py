"""A model of one's own in Hugging Face's Trainer."""

import os
import sys
import tempfile

import torch
import transformers
from scaled import Model, batches


class WithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.model(x), labels)}


class Losses(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        print(state.global_step, logs.get("loss"), logs.get("grad_norm"))


transformers.set_seed(0)
rows = [{"x": x, "labels": y} for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
with tempfile.TemporaryDirectory() as directory:
    arguments = transformers.TrainingArguments(
        directory,
        max_steps=10,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=0.01,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(WithLoss(), arguments, train_dataset=rows, callbacks=[Losses()])
    trainer.remove_callback(transformers.PrinterCallback)
    if "--tuned" in sys.argv:
        from tuned_trainer import TunedSteps

        trainer.add_callback(TunedSteps())
    trainer.train()
