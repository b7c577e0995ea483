# SPDX-License-Identifier: Apache-2.0
"""Ropeteam keeps the checkpoints of a training job in the memory of the job's own nodes.

    import ropeteam

    with ropeteam.open() as rope:                        # inside `ropeteam run -- torchrun train.py`
        rope.save(step, {"weights": tensor, "rng": rng_bytes, "data": {"position": 17}})
        ...
        found = rope.latest()
        if found is not None:
            rope.load(found.step, into={"weights": tensor})

The package is a thin layer over libropeteam.so. Tensor bytes go from their own memory into the node's arena
in one pass, without the interpreter. Every call that can wait takes a timeout in seconds, and releases the
interpreter lock while it waits. Errors are raised as subclasses of :class:`RopeteamError`. Catch that class
around saves, so that a failure in the store never stops training.

An incarnation is the ranks of the job from one (re)start to the next. ``ropeteam.torch`` has helpers for
torch.distributed programs.
"""

from __future__ import annotations

from ._client import (
    DEFAULT_TIMEOUT,
    Client,
    Info,
    Level,
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
from ._save import Save
from ._values import JsonValue, ObjectInfo, Value


def register_fsspec() -> None:
    """Registers ``ropeteam://`` with fsspec, which must be installed. Only a source tree needs this: an
    installed package is already registered. See ropeteam._fsspec.RopeteamFileSystem."""
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
