# SPDX-License-Identifier: Apache-2.0
"""What the integrations of training libraries share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from .._client import Client
from .._errors import Unsupported
from ._state import _restore_rng, _rng_objects, open_distributed


def open_rank(timeout: float) -> Client:
    """As this process's rank of torch.distributed; where that is not initialised, as the rank that RANK and
    WORLD_SIZE say, or as the only one. A collective in the first case. Errors: see Client."""
    if dist.is_available() and dist.is_initialized():
        return open_distributed(timeout=timeout)
    if "WORLD_SIZE" in os.environ:
        return Client(timeout=timeout)
    return Client(rank=0, world_size=1, timeout=timeout)


def has_storage(client: Client) -> bool:
    """Whether this job writes steps to storage."""
    try:
        client.storage_steps(1)
    except Unsupported:
        return False
    return True


def storage_interval(client: Client, given: int | None) -> int:
    """Checkpointer's storage_every; of a library whose user says when to save: every save, where there is
    storage."""
    return int(has_storage(client)) if given is None else given


def by_number(parts: Sequence[Any]) -> Any:
    """Models or optimizers as Checkpointer and load_state() take them: one as it is, several by number."""
    return parts[0] if len(parts) == 1 else {str(index): each for index, each in enumerate(parts)}


def restore_rng(client: Client, step: int, world_size: int, timeout: float) -> None:
    """The random generators, as they were when `step` was saved by `world_size` ranks; a rank that was not
    among them leaves its own as they are."""
    if client.rank < world_size:
        with client.view(step, timeout=timeout) as view:
            _restore_rng(view)


def rng_state() -> dict[str, Any]:
    """The random generators as they are now: plain state."""
    return dict(_rng_objects())


def set_rng_state(state: Mapping[str, Any]) -> None:
    """What rng_state() gave."""
    _restore_rng(_Values(state))  # type: ignore[arg-type]


class _Values(dict):  # type: ignore[type-arg]
    """Reads like a View."""

    def value(self, name: str) -> Any:
        return self[name]
