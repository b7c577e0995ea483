# SPDX-License-Identifier: Apache-2.0
"""The programs in this folder import this first. It chooses this rank's daemon; report() writes results for
the test."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))

_sockets = [each for each in os.environ.get("SOCKETS", "").split(",") if each]
if _sockets:
    os.environ["ROPETEAM_SOCKET"] = _sockets[RANK % len(_sockets)]


def report(**values: Any) -> None:
    """Writes a line of this rank for the test; the line remains if the process is killed."""
    if "loss" in values:
        values["loss"] = float(values["loss"]).hex()
    with open(os.path.join(os.environ["REPORT"], f"{RANK}.jsonl"), "a") as file:
        file.write(json.dumps(values) + "\n")


def die() -> None:
    """Kills this rank with SIGKILL: nothing is closed or waited for."""
    os.kill(os.getpid(), signal.SIGKILL)


def end() -> None:
    """The last call of a program of several ranks: it ends the process without finalizing the interpreter.

    A thread of torch's gloo may still hold the tensors of the last collective, and the model's mesh keeps
    that thread alive after destroy_process_group(). If it releases them while the interpreter is finalized,
    Python ends the thread inside a destructor, and the process ends with SIGABRT (pytorch/pytorch#179291)."""
    if WORLD_SIZE > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def report_whole(step: int, model: Any, optimizer: Any) -> None:
    """Reports the whole state of a sharded training after this step. It is a collective call."""
    from torch.utils._pytree import tree_leaves

    state = [model.state_dict(), optimizer.state_dict()["state"]]
    tensors = [each for each in tree_leaves(state) if hasattr(each, "element_size")]
    assert all(hasattr(each, "placements") for each in model.parameters()), "it is not sharded"
    size = sum(each.numel() * each.element_size() for each in tensors)
    report(whole_at=step, weights=digest(state[0], whole=True), rest=digest(state[1], whole=True), bytes=size)


def digest(state: Any, whole: bool = False) -> str:
    """A digest of nested tensors and plain values; equal bits give equal digests. whole: uses the whole of a
    DTensor, not only this rank's part; this is a collective call."""
    import torch

    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if hasattr(value, "to_local"):
                value = value.full_tensor() if whole else value.to_local()
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in value:
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    add(state)
    return found.hexdigest()
