# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed with its checkpoints in the nodes' memory. With two ranks on a machine without GPUs:

    DS_ACCELERATOR=cpu ropeteam run --memory 1G -- torchrun --standalone --nproc-per-node 2
    examples/deepspeed_train.py

If it is killed and run again, it continues from the newest step.
"""

import argparse

import deepspeed
import torch

import ropeteam.deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
parser.add_argument("--hidden", type=int, default=256)
options = parser.parse_args()

deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(32, options.hidden), torch.nn.GELU(), torch.nn.Linear(options.hidden, 32)
)
config = {
    "train_micro_batch_size_per_gpu": 16,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": options.stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
checkpoints = ropeteam.deepspeed.attach(engine)

path, client_state = engine.load_checkpoint("checkpoints")
seen = client_state["seen"] if path else 0
print(f"rank {checkpoints.client.rank} begins behind step {engine.global_steps}")

batches = torch.Generator().manual_seed(checkpoints.client.rank)
for _ in range(engine.global_steps):
    torch.randn(16, 32, generator=batches)  # skips a batch that was trained on already
while engine.global_steps < options.steps:
    x = torch.randn(16, 32, generator=batches).to(engine.device, torch.bfloat16)
    loss = torch.nn.functional.mse_loss(engine(x), x.roll(1, 1))
    engine.backward(loss)
    engine.step()
    seen += len(x)
    engine.save_checkpoint("checkpoints", client_state={"seen": seen})

checkpoints.client.wait(options.steps)
print(f"rank {checkpoints.client.rank}: {seen} samples, loss {loss.item():.4f}")
