# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint into the memory of the job's nodes.

    import torch.distributed.checkpoint as dcp
    from ropeteam.dcp import StorageReader, StorageWriter

    rope = ropeteam.torch.open_distributed()
    if ropeteam.dcp.latest(rope):
        dcp.load(state, storage_reader=StorageReader(rope))
    ...
    dcp.save(state, storage_writer=StorageWriter(rope, step))
    future = dcp.async_save(state, storage_writer=StorageWriter(rope, step))

The files are FileSystemWriter's, so a step on storage, or one that `ropeteam export` has copied, opens with
torch's FileSystemReader where Ropeteam is not installed. docs/pytorch.md has what DCP itself still does.
"""

from __future__ import annotations

from ._reader import StorageReader, latest
from ._writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "latest"]
