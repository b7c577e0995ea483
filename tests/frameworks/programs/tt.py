# SPDX-License-Identifier: Apache-2.0
"""torchtitan's containers and checkpoint manager around a small FSDP2 model, called as torchtitan's trainer
calls them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from report import RANK, WORLD_SIZE, die, digest, end, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from ropeteam.torchtitan import CheckpointManager


class Numbers(torch.utils.data.IterableDataset):
    def __init__(self) -> None:
        self.i = 0

    def __iter__(self) -> Any:
        while True:
            self.i += 1
            yield torch.full((8,), float(self.i * (RANK + 1)) / 32)

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.i = state["i"]


class Trainer:
    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


dist.init_process_group("gloo")
steps, die_at = int(os.environ["STEPS"]), int(os.environ.get("DIE_AT", "0"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
adamw = default_adamw(1e-2)
adamw.implementation = "foreach"
optimizers = adamw.build(model_parts=[model])
schedulers = LRSchedulersContainer(optimizers, lambda epoch: 1 / (1 + epoch))
data = ParallelAwareDataloader(Numbers(), dp_rank=RANK, dp_world_size=WORLD_SIZE, batch_size=2)
trainer = Trainer()
config = CheckpointManager.Config(enable=True, interval=1, async_mode=os.environ.get("MODE", "disabled"))
manager = config.build(
    dataloader=data,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=schedulers,
    states={"train_state": trainer},
    sd_adapter=None,
    base_folder=os.getcwd(),
)
loaded = manager.load(step=int(os.environ.get("LOAD", "-1")))
report(start=trainer.step, loaded=loaded)
batches = iter(data)
while trainer.step < steps:
    trainer.step += 1
    trainer.ntokens_seen += 16
    loss = model(next(batches)).square().mean()
    loss.backward()
    manager.maybe_wait_for_staging()
    optimizers.step()
    schedulers.step()
    optimizers.zero_grad()
    report(step=trainer.step, loss=loss.item())
    if trainer.step == die_at:
        manager.maybe_wait_for_saving()
        manager.client.wait(die_at - 1, timeout=60)
        if RANK == WORLD_SIZE - 1:
            type(manager.client).begin = lambda *arguments, **options: die()
    last = trainer.step == steps and os.environ.get("LAST") == "1"
    manager.save(trainer.step, last_step=last)
manager.maybe_wait_for_saving()
if not os.environ.get("LAST"):
    manager.client.wait(steps, timeout=60)
whole = {name: each.full_tensor() for name, each in model.state_dict().items()}
report(weights=digest(whole), tokens=trainer.ntokens_seen, failed=manager._saver.failed)
manager.close()
end()
