#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures what a save at every step costs a training loop: a small model is trained with and without saves,
in turns.

    bench/python/bench_step.py [--steps 200] [--width 512] [--layers 8] [--batch 64] [--json]

Two daemons on this machine, one rank, AdamW; the Checkpointer saves model, optimizer and generators.
Blocks of ten steps with saves alternate with blocks of ten without, so that a disturbance slows both.

    step/with_save_vs_without   milliseconds of a step with its save, and of one without
    step/cpu_s_per_save         processor seconds of a save, in the training process and both daemons
    step/state_mib              size of the saved state
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys
import tempfile
import time

from rows import row, show
from two_nodes import two_nodes

BLOCK = 10


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="measured steps of each kind [200]")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="a JSON object a row")
    return parser.parse_args()


def daemons(job: str) -> list[int]:
    """The process numbers of the job's daemons on this machine."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = pathlib.Path("/proc", entry, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"ropeteamd") and job.encode() in words:
            found.append(int(entry))
    return found


def processor_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def train(options: argparse.Namespace) -> None:
    import ropeteam.torch
    import torch

    torch.set_num_threads(1)
    width = options.width
    layers = [
        torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(options.layers)
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = ropeteam.torch.Checkpointer(model=model, optimizer=optimizer)
    state = 3 * sum(parameter.nbytes for parameter in model.parameters())
    pids = [os.getpid(), *daemons(os.environ["ROPETEAM_JOB"])]
    times: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    step = 0
    for block in range(2 * options.steps // BLOCK + 2):
        saves = block % 2 == 1
        begun = processor_seconds(pids)
        taken = []
        for _ in range(BLOCK):
            begin = time.perf_counter()
            optimizer.zero_grad()
            model(torch.randn(options.batch, width)).square().mean().backward()
            optimizer.step()
            step += 1
            if saves:
                ckpt.step(step)
            taken.append((time.perf_counter() - begin) * 1e3)
        if saves:
            ckpt.maybe_finalize(blocking=True)
        if block >= 2:
            times[saves] += taken
            processor[saves].append((processor_seconds(pids) - begun) / BLOCK)
    if ckpt.stats.failed or ckpt.stats.skipped:
        sys.exit(f"bench_step.py: {ckpt.stats}")
    show(row("step/with_save_vs_without", "ms", times[True], "without a save", times[False]), options.json)
    cost = [a - b for a, b in zip(processor[True], processor[False])]
    show(row("step/cpu_s_per_save", "s", cost), options.json)
    show(row("step/state_mib", "MiB", [state / 2**20]), options.json)


def main() -> None:
    options = arguments()
    if os.environ.get("ROPETEAM_BENCH_RANK"):
        train(options)
        return
    files = pathlib.Path(tempfile.mkdtemp(prefix="bench-step-"))
    command = ["env", "ROPETEAM_BENCH_RANK=1", "RANK=0", "WORLD_SIZE=1", sys.executable, *sys.argv]
    try:
        with two_nodes(command, memory="1G", files=files, storage=False) as rank:
            assert rank.stdout is not None
            for line in rank.stdout:
                print(line, end="", flush=True)
            sys.exit(rank.wait())
    finally:
        shutil.rmtree(files, ignore_errors=True)


if __name__ == "__main__":
    main()
