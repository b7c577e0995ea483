#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on text of this machine, sharded with FSDP2. Every step's checkpoint is kept in
Ropeteam.

    ropeteam run -- torchrun --nproc-per-node 4 examples/train_gpt.py --steps 100 --out /tmp/gpt

Each rank has a part of the parameters and of the optimizer's state. At start it loads the newest step, if
there is one: the model, the optimizer, the random generators and the position in the data. So an interrupted
run computes bit-identical losses to an uninterrupted one. Without ROPETEAM_SOCKET in the environment it
trains without checkpoints.

For each rank it writes two files to --out. loss.<rank>.txt has one line per step, "<step> <loss as an exact
hexadecimal float>"; events.<rank>.jsonl has events with their times. A rank that resumes appends to both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import queue
import sysconfig
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import ropeteam
import ropeteam.torch

TEXT_BYTES_MIN = 200_000  # the model would memorize less text within a demo
TEXT_BYTES_MAX = 1_000_000


def find_text() -> tuple[bytes, list[str]]:
    """Text that is the same on each call: Debian's licenses, or if they are too short, Python's own
    sources."""
    licenses = pathlib.Path("/usr/share/common-licenses")
    stdlib = pathlib.Path(sysconfig.get_paths()["stdlib"])
    candidates = [path for path in sorted(licenses.glob("*")) if path.is_file() and not path.is_symlink()]
    if sum(path.stat().st_size for path in candidates) < TEXT_BYTES_MIN:
        candidates = sorted(stdlib.glob("*.py"))
    text, used = b"", []
    for path in candidates:
        if len(text) >= TEXT_BYTES_MAX:
            break
        text += path.read_bytes()
        used.append(str(path))
    return text[:TEXT_BYTES_MAX], used


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, block: int, layers: int, width: int, heads: int, dropout: float):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Data:
    """Windows of the text, in an order that depends only on `position`, which is the whole state."""

    def __init__(self, text: bytes, block: int, batch: int, rank: int, world: int) -> None:
        symbols = sorted(set(text))
        lookup = torch.zeros(256, dtype=torch.long)
        lookup[torch.tensor(symbols)] = torch.arange(len(symbols))
        self.tokens = lookup[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]
        self.vocabulary = len(symbols)
        self.block, self.batch, self.rank, self.world = block, batch, rank, world
        self.position = 0  # samples that all ranks together have used

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.position + self.rank * self.batch
        self.position += self.world * self.batch
        windows = len(self.tokens) - self.block - 1
        # A prime stride spreads consecutive windows over the text.
        starts = [(first + i) * 7_368_787 % windows for i in range(self.batch)]
        x = torch.stack([self.tokens[s : s + self.block] for s in starts])
        y = torch.stack([self.tokens[s + 1 : s + 1 + self.block] for s in starts])
        return x, y


class Log:
    """Events of one rank as JSON lines. Each line is written at once, so it remains if the process is
    killed."""

    def __init__(self, directory: pathlib.Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._events = open(directory / f"events.{rank}.jsonl", "a", buffering=1)
        self._losses = open(directory / f"loss.{rank}.txt", "a", buffering=1)
        self._lock = threading.Lock()

    def event(self, name: str, **values: object) -> None:
        line = json.dumps({"t": time.time(), "event": name, "pid": os.getpid(), **values})
        with self._lock:
            self._events.write(line + "\n")

    def loss(self, step: int, loss: float) -> None:
        self._losses.write(f"{step} {loss.hex()}\n")


class Watcher:
    """Logs in a thread when each saved step was replicated and when it was committed."""

    TIMEOUT_S = 20.0

    def __init__(self, rope: ropeteam.Client, log: Log) -> None:
        self._rope, self._log = rope, log
        self._steps: queue.Queue[tuple[int, float] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def saved(self, step: int, begun: float) -> None:
        self._steps.put((step, begun))

    def finish(self) -> None:
        self._steps.put(None)
        self._thread.join(2 * self.TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._steps.get()) is not None:
            step, begun = item
            try:
                for level in (ropeteam.Level.REPLICATED, ropeteam.Level.COMMITTED):
                    self._rope.wait(step, level, self.TIMEOUT_S)
                    self._log.event(level.name.lower(), step=step, ms=(time.monotonic() - begun) * 1e3)
            except ropeteam.RopeteamError as error:
                self._log.event("wait_failed", step=step, code=int(error.code), error=str(error))


class Checkpoints:
    """Checkpoints for the training loop: it loads once, and a save that fails does not stop training."""

    def __init__(self, rope: ropeteam.Client, log: Log) -> None:
        self._rope, self._log, self._stale = rope, log, False
        self._watcher = Watcher(rope, log)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> int:
        begun = time.monotonic()
        loaded = ropeteam.torch.load_state(self._rope, model, optimizer)
        if loaded is None:
            return 0
        data.position = loaded.data["position"]
        self._log.event("loaded", step=loaded.step, ms=(time.monotonic() - begun) * 1e3)
        return loaded.step

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> None:
        if self._stale:
            return
        begun = time.monotonic()
        try:
            state = {"position": data.position}
            ropeteam.torch.save_state(self._rope, step, model, optimizer, data=state)
        except ropeteam.RopeteamError as error:
            self._stale = isinstance(error, ropeteam.Stale)
            self._log.event("save_failed", step=step, code=int(error.code), error=str(error))
            print(f"step {step} was not saved: {error}", flush=True)
            return
        self._log.event("saved", step=step, ms=(time.monotonic() - begun) * 1e3)
        self._watcher.saved(step, begun)

    def finish(self) -> None:
        self._watcher.finish()
        self._rope.close()


def open_checkpoints(log: Log) -> Checkpoints | None:
    if "ROPETEAM_SOCKET" not in os.environ:
        return None
    begun = time.monotonic()
    rope = ropeteam.torch.open_distributed(timeout=60)
    info = rope.info()
    log.event("opened", incarnation=info.incarnation, ms=(time.monotonic() - begun) * 1e3)
    return Checkpoints(rope, log)


def agree(step: int) -> None:
    """Raises an error if the ranks would continue from different steps."""
    steps = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([step]))
    if len({int(other) for other in steps}) != 1:
        raise RuntimeError(f"ranks would go on from different steps: {[int(other) for other in steps]}")


def train(arguments: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    log = Log(arguments.out, rank)
    log.event("started", rank=rank, world=world)
    text, files = find_text()
    data = Data(text, arguments.block, arguments.batch, rank, world)

    torch.manual_seed(arguments.seed)  # the same weights on every rank, before they are sharded
    model = GPT(
        data.vocabulary,
        arguments.block,
        arguments.layers,
        arguments.width,
        arguments.heads,
        arguments.dropout,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(arguments.seed + 1 + rank)  # each rank has its own dropout
    digest = hashlib.sha256(text).hexdigest()
    log.event("model", parameters=parameters, text_files=files, text_bytes=len(text), text_sha256=digest)

    checkpoints = open_checkpoints(log)
    step = checkpoints.load(model, optimizer, data) if checkpoints else 0
    agree(step)
    log.event("training", first_step=step + 1)
    while step < arguments.steps:
        begun = time.monotonic()
        loss = model(*data.next())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log.loss(step, loss.item())
        log.event("step", step=step, loss=loss.item(), ms=(time.monotonic() - begun) * 1e3)
        if checkpoints:
            checkpoints.save(step, model, optimizer, data)
        if rank == 0 and (step % 10 == 0 or step == arguments.steps):
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    if checkpoints:
        checkpoints.finish()
    log.event("finished", step=step)
    dist.barrier()  # no rank exits while others still fetch or copy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/train_gpt"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="windows a rank and step")
    parser.add_argument("--block", type=int, default=64, help="characters a window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the result of a sum depends on the number of threads
    torch.use_deterministic_algorithms(True)
    # A collective fails at once if a dead rank's connection is reset. The timeout is for a rank that does not
    # answer.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
