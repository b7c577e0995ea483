# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning with its checkpoints in the nodes' memory:

    ropeteam run --memory 1G -- torchrun --nproc-per-node 2 examples/lightning_train.py --accelerator cpu

If it is killed and run again, it continues from the newest checkpoint.
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ropeteam.lightning import RopeteamCheckpointIO

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
parser.add_argument("--accelerator", default="auto")
options = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        first, last = torch.nn.Linear(16, 64), torch.nn.Linear(64, 2)
        self.layers = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Dropout(0.1), last)

    def training_step(self, batch, index):
        inputs, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


lightning.seed_everything(0, verbose=False)
inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())
rope = RopeteamCheckpointIO()
trainer = lightning.Trainer(
    accelerator=options.accelerator,
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    max_steps=options.steps,
    max_epochs=-1,
    plugins=[rope],
    callbacks=[rope.callback, ModelCheckpoint(every_n_train_steps=options.every)],
    logger=False,
    enable_progress_bar=False,
)
resume = rope.latest()
model = Classifier()
trainer.fit(model, torch.utils.data.DataLoader(data, 32, shuffle=True), ckpt_path=resume)
loss = trainer.callback_metrics["loss"]
print(f"rank {trainer.global_rank}: began with {resume}, {trainer.global_step} steps, loss {loss:.4f}")
