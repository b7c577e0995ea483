# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed on CPU: trains up to STEPS, saves each step, and may be killed in the middle of a save."""

from __future__ import annotations

import os

from report import RANK, WORLD_SIZE, die, digest, end, report

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import ropeteam.deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # noqa: E402

stage, steps = int(os.environ["STAGE"]), int(os.environ["STEPS"])
die_at = int(os.environ.get("DIE_AT", "0"))
precise = os.environ.get("DTYPE") == "fp32"

torch.manual_seed(0)
deepspeed.init_distributed(dist_backend="gloo")
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16),
    torch.nn.LayerNorm(16),
    torch.nn.Dropout(float(os.environ.get("DROPOUT", "0.3"))),
    torch.nn.Linear(16, 1),
)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "bf16": {"enabled": not precise},
}
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
alone, tag = os.environ.get("ALONE"), os.environ.get("TAG")
if not alone:
    stored = ropeteam.deepspeed.attach(engine)
path, client_state = engine.load_checkpoint(alone or "checkpoints", tag=tag)
start = engine.global_steps
report(start=start, path=path, client_state=repr(client_state and client_state["mine"]))

data = torch.randn(64, WORLD_SIZE, 4, 8, generator=torch.Generator().manual_seed(1))
while engine.global_steps < steps:
    step = engine.global_steps + 1
    batch = data[step, RANK]
    loss = engine(batch if precise else batch.bfloat16()).float().square().mean()
    engine.backward(loss)
    engine.step()
    report(step=step, loss=loss.item())
    if step == die_at:
        stored.client.wait(step - 1, timeout=60)
        if RANK == WORLD_SIZE - 1:
            stored.commit = lambda info: die()
    mine = die if os.environ.get("STATE") == "object" else {"x": torch.tensor(step)}
    engine.save_checkpoint("checkpoints", client_state={"mine": [step, mine]})
if client_state is None:
    stored.client.wait(steps, timeout=60)
if stage == 0:
    state = engine.optimizer.state_dict() if precise else engine.optimizer.optimizer.state_dict()
else:
    named = dict(engine.module.named_parameters())
    state = {name: safe_get_full_fp32_param(each) for name, each in named.items()}
    if start < steps:  # DeepSpeed does not return loaded optimizer state before a step
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = {name: safe_get_full_optimizer_state(each, key) for name, each in named.items()}
report(state=digest(state), scheduler=digest(engine.lr_scheduler.state_dict()))
if os.environ.get("WEIGHTS"):
    engine.save_16bit_model("weights", "model.bin")
dist.barrier()
end()
