# SPDX-License-Identifier: Apache-2.0
"""Processes that are the ranks of small worlds, one world after the other, for test_dcp_daemons.py. Each imports
torch once."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pathlib
import sys
import traceback
import warnings
from typing import Any

WAIT_S = 120.0


class Ranks:
    """`count` processes, of which a world takes the first ones."""

    def __init__(self, count: int, environment: dict[str, str], directory: pathlib.Path) -> None:
        self._directory = directory
        self._worlds = 0
        context = multiprocessing.get_context("spawn")
        kept = dict(os.environ)
        os.environ.update(environment)  # of the processes that are started now
        try:
            self._pipes, self._processes = [], []
            for _ in range(count):
                ours, theirs = context.Pipe()
                # Not daemons: DCP's checkpoint process is a child of each.
                process = context.Process(target=_work, args=(theirs,))
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(kept)

    def run(self, size: int, socket: str, function: Any, *arguments: Any) -> list[Any]:
        """function(rope, *arguments) on each rank of a world of its own; what each returned."""
        self._worlds += 1
        store = str(self._directory / f"world-{self._worlds}")
        work = (size, store, socket, function.__module__, function.__name__, arguments)
        for rank in range(size):
            self._pipes[rank].send((rank, *work))
        answers = []
        for rank in range(size):
            assert self._pipes[rank].poll(WAIT_S), f"rank {rank} of {size} does not answer"
            answers.append(self._pipes[rank].recv())
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _work(pipe: Any) -> None:
    import ropeteam.torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    while True:
        try:
            rank, size, store, socket, module, name, arguments = pipe.recv()
        except EOFError:
            return
        os.environ.update(MASTER_ADDR="127.0.0.1")
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        try:
            with ropeteam.torch.open_distributed(socket) as rope:
                answer = (True, getattr(importlib.import_module(module), name)(rope, *arguments))
                dist.barrier()  # no rank leaves the world while others work
        except BaseException:
            answer = (False, traceback.format_exc())
        dist.destroy_process_group()
        pipe.send(answer)
