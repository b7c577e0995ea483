# SPDX-License-Identifier: Apache-2.0
# ropeteam run -- torchrun --nproc-per-node 2 quickstart.py
import torch

import ropeteam.torch
from ropeteam import Level, RopeteamError

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
rope = ropeteam.torch.open_distributed()
loaded = ropeteam.torch.load_state(rope, model, optimizer)  # None: nothing saved yet
first = loaded.step + 1 if loaded else 1
for step in range(first, first + 10):
    loss = (model(torch.randn(32, 8)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    try:  # the last save is waited for, the others climb while training goes on
        level = Level.COMMITTED if step == first + 9 else None
        ropeteam.torch.save_state(rope, step, model, optimizer, data={"position": 32 * step}, wait=level)
    except RopeteamError as error:
        print(f"step {step} is not safe, training goes on: {error}")
print(f"rank {rope.rank}: steps {first} to {step}, loss {loss.item():.4f}")
rope.close()
torch.distributed.destroy_process_group()
