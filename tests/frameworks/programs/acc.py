# SPDX-License-Identifier: Apache-2.0
"""An Accelerate loop over two epochs of 8 steps: saves every 2nd step, and is killed in step KILL."""

from __future__ import annotations

import json
import os

import fsdp_on_cpu
import torch
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
from report import die, digest, end, report, report_whole

if os.environ.get("ALONE"):
    from accelerate import Accelerator
else:
    from ropeteam.accelerate import Accelerator

KILL = int(os.environ.get("KILL", "0"))
OPTIONS = {"stateful": False, "dropout": 0.0, "gan": False, "fsdp": 0, "width": 16}
OPTIONS.update(json.loads(os.environ.get("OPTIONS", "{}")))


class Progress:
    def __init__(self) -> None:
        self.epoch, self.step = 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.step = state["epoch"], state["step"]


def network() -> torch.nn.Module:
    dropout, width = torch.nn.Dropout(OPTIONS["dropout"]), OPTIONS["width"]
    return torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), dropout, torch.nn.Linear(width, 1)
    )


set_seed(0)
loading = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=OPTIONS["stateful"])
sharding = None
if OPTIONS["fsdp"]:
    fsdp_on_cpu.apply()
    sharding = FullyShardedDataParallelPlugin(fsdp_version=OPTIONS["fsdp"])
options = {} if os.environ.get("ALONE") else {"ropeteam_options": {"log_file": "log-{rank}"}}
accelerator = Accelerator(cpu=not sharding, dataloader_config=loading, fsdp_plugin=sharding, **options)
models = [network(), network()] if OPTIONS["gan"] else [network()]
optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in models]
schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
data = torch.utils.data.TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
# The loader has its own generator. Without it, each new iterator takes a number from torch's generator, and a
# resumed epoch has one more iterator.
loader = torch.utils.data.DataLoader(
    data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2)
)
*prepared, loader = accelerator.prepare(*models, *optimizers, *schedulers, loader)
count = len(models)
models, optimizers, schedulers = prepared[:count], prepared[count : 2 * count], prepared[2 * count :]
progress = Progress()
accelerator.register_for_checkpointing(progress)
per_epoch = len(loader)
begins = 0 if os.environ.get("ALONE") else accelerator.load_state()
report(begins_at=-1 if begins is None else begins)
if sharding:
    report_whole(begins or 0, models[0], optimizers[0])
while progress.epoch < 2:
    done = progress.step - progress.epoch * per_epoch
    loader.set_epoch(progress.epoch)
    batches = loader if OPTIONS["stateful"] or not done else accelerator.skip_first_batches(loader, done)
    for (batch,) in batches:
        loss = sum((model(batch) - 1).square().mean() for model in models)
        accelerator.backward(loss)
        for optimizer, scheduler in zip(optimizers, schedulers):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress.step += 1
        report(step=progress.step, loss=loss.item())
        if sharding:
            report_whole(progress.step, models[0], optimizers[0])
        if progress.step % 2 == 0 and not os.environ.get("ALONE"):
            assert (
                accelerator.save_state(f"somewhere/step_{progress.step}") == f"somewhere/step_{progress.step}"
            )
        if progress.step == KILL:
            assert accelerator.maybe_finalize(blocking=True)
            die()
    progress.epoch += 1
report(
    model=digest([accelerator.unwrap_model(each).state_dict() for each in models]),
    optimizer=digest([each.state_dict() for each in optimizers]),
    scheduler=digest([each.state_dict() for each in schedulers]),
)
accelerator.end_training()
end()
