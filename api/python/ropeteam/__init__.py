# SPDX-License-Identifier: Apache-2.0
"""Ropeteam keeps the checkpoints of a training job in the memory of the job's own nodes.

    import ropeteam

    with ropeteam.open() as rope:                        # inside `ropeteam run -- torchrun train.py`
        rope.save(step, {"weights": tensor, "rng": rng_bytes, "data": {"position": 17}})
        ...
        found = rope.latest()
        if found is not None:
            rope.load(found.step, into={"weights": tensor})

The package is a thin layer over libropeteam.so: tensor bytes go from their own memory into the node's arena
in one pass, and no Python runs while they do. Every call that can wait takes a timeout in seconds, and
releases the interpreter lock while it waits. Trouble is raised as a subclass of :class:`RopeteamError`;
catch that class around saves, so that trouble in the store never stops training.

``ropeteam.torch`` has what a torch.distributed program wants on top.
"""

from __future__ import annotations

from ._client import (
    DEFAULT_TIMEOUT,
    Client,
    Info,
    Level,
    Save,
    Shard,
    StepInfo,
    StoredStep,
    View,
    library_version,
    open,
)
from ._errors import (
    Aborted,
    AlreadyExists,
    Code,
    Corrupt,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    IoError,
    LinkFailed,
    NoSpace,
    NotFound,
    PeerGone,
    RopeteamError,
    Stale,
    Unavailable,
    Unsupported,
)
from ._export import export
from ._ranges import Range
from ._values import JsonValue, ObjectInfo, Value



def register_fsspec() -> None:
    """Makes ``ropeteam://`` known to fsspec, which must be installed. An installed package is known without;
    this is for a source tree. See ropeteam._fsspec.RopeteamFileSystem."""
    import fsspec

    from ._fsspec import RopeteamFileSystem

    fsspec.register_implementation("ropeteam", RopeteamFileSystem, clobber=True)


__version__ = "0.1.0"

__all__ = [
    "DEFAULT_TIMEOUT",
    "Aborted",
    "AlreadyExists",
    "Client",
    "Code",
    "Corrupt",
    "DeadlineExceeded",
    "Info",
    "InternalError",
    "InvalidArgument",
    "IoError",
    "JsonValue",
    "Level",
    "LinkFailed",
    "NoSpace",
    "NotFound",
    "ObjectInfo",
    "PeerGone",
    "Range",
    "RopeteamError",
    "Save",
    "Shard",
    "Stale",
    "StepInfo",
    "StoredStep",
    "Unavailable",
    "Unsupported",
    "Value",
    "View",
    "export",
    "library_version",
    "open",
    "register_fsspec",
]
