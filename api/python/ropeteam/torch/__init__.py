# SPDX-License-Identifier: Apache-2.0
"""For PyTorch programs: checkpoints of a training loop in three lines, and the calls below them.

    ckpt = ropeteam.torch.Checkpointer(model=model, optimizer=optimizer)
    for step in range(ckpt.load_latest(), steps):
        ...
        ckpt.step(step)                   # never raises; see Checkpointer
    ckpt.finish()

For torch.distributed programs that do more on their own: one call to open, one to save a training state, one
to load it.

    rope = ropeteam.torch.open_distributed()
    loaded = ropeteam.torch.load_state(rope, model, optimizer)
    step, position = (loaded.step, loaded.data["position"]) if loaded else (0, 0)
    while step < steps:
        ...
        step += 1
        try:
            ropeteam.torch.save_state(rope, step, model, optimizer, data={"position": position})
        except ropeteam.RopeteamError as error:
            print(error)                  # training goes on; the older committed steps are still there

Each rank saves its own part of sharded tensors (DTensors). Of tensors that several ranks have, each rank
saves a share. A step loads on any number of ranks, in any layout; docs/pytorch.md has the rules. Saving and
loading are not collectives: nothing here waits for another rank, except open_distributed(), once, and
Checkpointer when it opens and when it loads.

The names of the objects of a training state:

    model/<name>             each tensor of model.state_dict()
    optimizer/<name>/<key>   each tensor of the optimizer's state of the parameter <name>
    optimizer                JSON: parameter groups, and which keys there are
    rng/cpu, rng/cuda/<i>    torch's generators
    rng/python, rng/numpy    JSON: random's and numpy.random's, the latter when numpy is in use
    data, data/<place>       what the caller gives, e.g. its position in the data: JSON, and the tensors in it

With several models, {"generator": g, "critic": c}, <name> begins with the model's ("generator.0.weight").
With several optimizers by name, the objects are optimizers/<optimizer> and
optimizers/<optimizer>/<name>/<key>.
"""

from __future__ import annotations

from ._checkpointer import Checkpointer, CheckpointStats
from ._pieces import Piece
from ._pt import save
from ._replicas import save_tensors
from ._reshard import load_tensors
from ._state import Loaded, load_state, open_distributed, save_state, training_state

__all__ = [
    "CheckpointStats",
    "Checkpointer",
    "Loaded",
    "Piece",
    "load_state",
    "load_tensors",
    "open_distributed",
    "save",
    "save_state",
    "save_tensors",
    "training_state",
]
