# SPDX-License-Identifier: Apache-2.0
"""Rows of bench_dcp.py: what a save of many tensors costs the training thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from rows import row

MANY = 10_000
#: Allowed for each tensor, in addition to a save of the same bytes in few tensors.
PER_TENSOR_MS = 0.005
#: The first saves learn the structure of the state.
_DISCARDED = 2


def measure(rope: Any, few: int, size: int, runs: int, step: int) -> Iterator[dict[str, object]]:
    """Processor time of the calling thread until the save returns. The baseline is that of `few` tensors and
    PER_TENSOR_MS for each of MANY. Uses the steps after `step`."""
    import torch
    import torch.distributed.checkpoint as dcp
    from ropeteam.dcp import StorageWriter

    def by_dcp(number: int, tensors: dict[str, Any]) -> Any:
        return dcp.async_save({"model": tensors}, storage_writer=StorageWriter(rope, number))

    for name, save in (("Client.save", rope.save), ("ropeteam.dcp", by_dcp)):
        spent: dict[int, list[float]] = {few: [], MANY: []}
        for count, samples in spent.items():
            tensors = {f"layers.{i}.weight": torch.ones(max(1, size // 4 // count)) for i in range(count)}
            for turn in range(_DISCARDED + runs):
                step += 1
                begin = time.thread_time()
                saving = save(step, tensors)
                taken = (time.thread_time() - begin) * 1e3
                if isinstance(saving, Future):
                    saving.result()
                rope.wait(step)
                if turn >= _DISCARDED:
                    samples.append(taken)
        allowed = [each + MANY * PER_TENSOR_MS for each in spent[few]]
        beside = f"{few} tensors + {PER_TENSOR_MS * 1e3:.0f} us each"
        yield row(f"dcp/many_tensors/{name}", "ms", spent[MANY], beside, allowed)
