# SPDX-License-Identifier: Apache-2.0
"""Code shared by Checkpointer and the integrations of training libraries."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from .._client import Client
from .._errors import InvalidArgument, RopeteamError, Unsupported
from ._state import _restore_rng, _rng_objects, open_distributed

_log = logging.getLogger("ropeteam")

#: The default of Checkpointer's storage_every.
STORAGE_EVERY = 500


def open_rank(timeout: float, storage_every: int | None = None) -> Client:
    """Opens as this process's rank of torch.distributed. If that is not initialised: as the rank given by
    RANK and WORLD_SIZE, or as the only one. A collective in the first case. Errors: see Client.

    storage_every: Checkpointer's, for the job, with its errors; default: none."""
    if dist.is_available() and dist.is_initialized():
        client = open_distributed(timeout=timeout)
    elif "WORLD_SIZE" in os.environ:
        client = Client(timeout=timeout)
    else:
        client = Client(rank=0, world_size=1, timeout=timeout)
    try:
        set_policy(client, storage_every or 0, None, timeout)
    except InvalidArgument:
        client.close()
        raise
    return client


def set_policy(client: Client, storage_every: int | None, keep: int | None, timeout: float) -> None:
    """Sets Checkpointer's storage_every and keep for the job. Rank 0 warns of values that cannot take effect.

    InvalidArgument: a given value differs from the daemons' flags or from another rank's. The default
    interval yields to theirs."""
    every = STORAGE_EVERY if storage_every is None else storage_every
    if not every and keep is None:
        return
    try:
        client.set_policy(every or None, keep, timeout)
    except InvalidArgument:
        if storage_every is not None:
            raise
        set_policy(client, 0, keep, timeout)
    except RopeteamError as error:
        if client.rank != 0:
            return
        given = {"storage_every": storage_every, "keep": keep}
        said = ", ".join(f"{name} {value}" for name, value in given.items() if value)
        if not said and isinstance(error, Unsupported) and not has_storage(client):
            return
        _log.warning("not in effect on storage: %s: %s", said or f"storage_every {every}", error)


def keep_on_storage(client: Client, name: str, limit: int | None, timeout: float) -> None:
    """Applies a library's argument `name`: this many steps stay on storage. If the daemons' flags differ,
    they decide, and rank 0 warns."""
    if limit is None or limit <= 0:
        return
    try:
        client.set_policy(keep_on_storage=limit, timeout=timeout)
    except RopeteamError as error:
        if client.rank == 0:
            _log.warning("%s=%d is not in effect on storage: %s", name, limit, error)


def has_storage(client: Client) -> bool:
    """Whether this job writes steps to storage."""
    try:
        client.storage_steps(1)
    except Unsupported:
        return False
    return True


def by_number(parts: Sequence[Any]) -> Any:
    """Models or optimizers as Checkpointer and load_state() take them: one as given, several by number."""
    return parts[0] if len(parts) == 1 else {str(index): each for index, each in enumerate(parts)}


def restore_rng(client: Client, step: int, world_size: int, timeout: float) -> None:
    """Restores the random generators, as they were when `step` was saved by `world_size` ranks. A rank that
    was not among them keeps its own."""
    if client.rank < world_size:
        with client.view(step, timeout=timeout) as view:
            _restore_rng(view)


def rng_state() -> dict[str, Any]:
    """The present state of the random generators, as plain state."""
    return dict(_rng_objects())


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restores the result of rng_state()."""
    _restore_rng(_Values(state))  # type: ignore[arg-type]


class _Values(dict):  # type: ignore[type-arg]
    """Reads like a View."""

    def value(self, name: str) -> Any:
        return self[name]
