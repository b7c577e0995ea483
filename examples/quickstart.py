# SPDX-License-Identifier: Apache-2.0
# ropeteam run -- torchrun --nproc-per-node 2 quickstart.py
import torch

import ropeteam.torch

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
ckpt = ropeteam.torch.Checkpointer(model=model, optimizer=optimizer)
first = ckpt.load_latest() or 1  # 0: nothing is saved yet
for step in range(first, first + 10):
    loss = (model(torch.randn(32, 8)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.step(step)  # a save that fails is a warning, and training goes on
ckpt.finish()  # waits until the last save is committed
print(f"rank {torch.distributed.get_rank()}: steps {first} to {step}, loss {loss.item():.4f}")
torch.distributed.destroy_process_group()
