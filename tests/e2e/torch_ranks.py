# SPDX-License-Identifier: Apache-2.0
"""Runs a function in processes that are the ranks of a world. They are forked from one process, which imports torch
once and runs as long as the tests."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import tempfile
import traceback
import warnings
from typing import Any

from harness import environment

WAIT_S = 120.0
PRELOADED = ["ropeteam.torch", "ropeteam.dcp", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
PRELOADED += ["torch._dynamo", "torch.distributed.checkpoint._fsspec_filesystem"]  # imported by first steps and saves


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    given, kept = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"), dict(os.environ)
    os.environ.clear()
    os.environ.update(given)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    return context


def run(size: int, socket: str | None, function: Any, *arguments: Any) -> list[Any]:
    """Calls function(rope, *arguments) on each rank of a world of `size`; returns the results. Without a socket, calls
    function(*arguments)."""
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as directory:
        work = (size, os.path.join(directory, "store"), socket, function, arguments)
        for rank in range(size):
            ours, theirs = _context().Pipe()
            # They are not daemon processes, because DCP starts a checkpoint process as a child of each.
            process = _context().Process(target=_work, args=(theirs, rank, *work))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        answers: dict[int, Any] = {}
        try:
            while len(answers) < size:
                left = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
                ready = multiprocessing.connection.wait(left, WAIT_S)
                assert ready, f"no answer from ranks {set(range(size)) - set(answers)} of {size}"
                for rank in [pipes.index(pipe) for pipe in ready]:
                    good, answers[rank] = _answer(pipes[rank])
                    assert good, f"rank {rank}:\n{answers[rank]}"
            for process in processes:
                process.join(WAIT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [answers[rank] for rank in range(size)]


def _answer(pipe: Any) -> tuple[bool, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return False, "it has ended"


def _work(
    pipe: Any, rank: int, size: int, store: str, socket: str | None, function: Any, arguments: Any
) -> None:
    import ropeteam.torch
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        with contextlib.ExitStack() as stack:
            rope = [] if socket is None else [stack.enter_context(ropeteam.torch.open_distributed(socket))]
            answer = (True, function(*rope, *arguments))
            dist.barrier()  # no rank leaves the world while others work
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    dist.destroy_process_group()
