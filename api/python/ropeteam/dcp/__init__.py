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

The files are FileSystemWriter's. So torch's FileSystemReader opens a step on storage, or one copied by
`ropeteam export`, without Ropeteam. docs/pytorch.md says what DCP itself still does.
"""

from __future__ import annotations

from ._reader import StorageReader, latest
from ._writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "latest"]
