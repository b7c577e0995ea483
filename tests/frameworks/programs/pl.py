# SPDX-License-Identifier: Apache-2.0
"""Lightning on a small random network with dropout: saves at every 2nd of 10 steps, and is killed in step
KILL."""

from __future__ import annotations

import json
import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from report import RANK, WORLD_SIZE, die, digest, end, report, report_whole
from ropeteam.lightning import RopeteamCheckpointIO
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

KILL = int(os.environ.get("KILL", "0"))
OPTIONS = {
    "async": False,
    "callback": True,
    "weights_only": False,
    "sharded": False,
    "width": 16,
    **json.loads(os.environ.get("OPTIONS", "{}")),
}


class Network(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        linear, last = torch.nn.Linear(8, OPTIONS["width"]), torch.nn.Linear(OPTIONS["width"], 1)
        self.layers = torch.nn.Sequential(linear, torch.nn.Dropout(0.2), last)

    def configure_model(self):
        if OPTIONS["sharded"] and not isinstance(self.layers, FSDPModule):
            for each in (self.layers[0], self.layers):
                fully_shard(each, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        loss = (self.layers(batch[0]) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}
        ]


class Told(lightning.Callback):
    def on_train_start(self, trainer, module):
        report(begins_at=trainer.global_step)
        self.tell_whole(trainer)

    def tell_whole(self, trainer):
        if OPTIONS["sharded"]:
            report_whole(trainer.global_step, model, trainer.optimizers[0])

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        report(step=trainer.global_step, loss=outputs["loss"].item())
        self.tell_whole(trainer)
        if trainer.global_step == KILL:
            if OPTIONS["async"]:
                plugin.teardown()  # waits for Lightning's thread
            assert rope.maybe_finalize(blocking=True)
            die()


lightning.seed_everything(0, verbose=False)
model = Network()
data = torch.utils.data.TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(1)))
sampler = (
    torch.utils.data.DistributedSampler(data, WORLD_SIZE, RANK, shuffle=False) if WORLD_SIZE > 1 else None
)
loader = StatefulDataLoader(data, 4, sampler=sampler)
rope = None if os.environ.get("ALONE") else RopeteamCheckpointIO(log_file="log-{rank}")
plugin = AsyncCheckpointIO(rope) if OPTIONS["async"] and rope else rope
weights_only = OPTIONS["weights_only"]
out = "alone" if rope is None else "out"
checkpoints = ModelCheckpoint(
    out, every_n_train_steps=2, save_top_k=1, save_last=True, save_weights_only=weights_only
)
strategy = "ddp" if WORLD_SIZE > 1 else "auto"
if OPTIONS["sharded"]:
    strategy = ModelParallelStrategy(data_parallel_size=WORLD_SIZE, tensor_parallel_size=1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=WORLD_SIZE,
    strategy=strategy,
    max_steps=10,
    plugins=[plugin] if plugin else [],
    callbacks=[*([rope.callback] if rope and OPTIONS["callback"] else []), checkpoints, Told()],
    logger=False,
    use_distributed_sampler=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, loader, ckpt_path=rope.latest() if rope else None)
report(
    model=digest(model.state_dict()),
    optimizer=digest([each.state_dict()["state"] for each in trainer.optimizers]),
    files=sorted(os.listdir(out)) if os.path.isdir(out) else [],
    best=os.path.basename(checkpoints.best_model_path),
    stats=None if rope is None else vars(rope.stats),
)
if rope is not None and not OPTIONS["sharded"]:
    again = Network()
    for path in (checkpoints.best_model_path, "out/last.ckpt"):  # as test(ckpt_path="best") does
        again.load_state_dict(trainer.strategy.load_checkpoint(path)["state_dict"])
        assert digest(again.state_dict()) == digest(model.state_dict())
end()
