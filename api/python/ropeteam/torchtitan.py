# SPDX-License-Identifier: Apache-2.0
"""torchtitan's checkpoint manager with its checkpoints in the memory of the job's nodes.

    from ropeteam.torchtitan import CheckpointManager

    config.checkpoint = CheckpointManager.Config(enable=True, interval=1)

torchtitan creates it and calls it. docs/frameworks.md says what its settings mean here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager as _TitansManager
from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER
from torchtitan.components.checkpointer.dcp import AsyncMode

from ._client import DEFAULT_TIMEOUT
from ._errors import NotFound, RopeteamError, Unsupported
from .dcp import StorageReader, StorageWriter, latest
from .torch._reshard import SavedStep
from .torch._saver import Saver
from .torch._state import open_distributed

_log = logging.getLogger("ropeteam")


class CheckpointManager(_TitansManager):  # type: ignore[misc, unused-ignore]
    """torchtitan's CheckpointManager, with the checkpoints in Ropeteam. `client` is the Client in use.

    A save that fails does not end the training: it is a warning in the log "ropeteam"."""

    @dataclass(kw_only=True, slots=True)
    class Config(_TitansManager.Config):  # type: ignore[misc, name-defined, unused-ignore]
        """torchtitan's settings, and three more. async_mode: "disabled" or "async"."""

        timeout: float = DEFAULT_TIMEOUT
        """Seconds for opening, a wait for the previous save, and each read of a load."""

        persist_interval: int = 0
        """A checkpoint whose step is a multiple of it is written to the job's storage; 0: the daemons'
        --persist-every decides."""

        unsafe_pickle: bool = False
        """See StorageReader: a load may run code that a checkpoint brings."""

    def __init__(self, config: Any, **states: Any) -> None:
        super().__init__(config, **states)
        if not self.enable:
            return
        if self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            raise Unsupported('async_mode="async_with_pinned_mem": "async" copies straight into the arena')
        self._timeout, self._persist_interval = config.timeout, config.persist_interval
        self._unsafe_pickle = config.unsafe_pickle
        self.client = open_distributed(timeout=config.timeout)
        self._saver = Saver(self.client, config.timeout)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        if to_hf or OPTIMIZER not in state_dict:  # the export at the end; no training can continue from it
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        step = int(checkpoint_id.rsplit("-", 1)[1])
        self._saver.settle()  # to free memory for this one
        durable = self._persist_interval > 0 and step % self._persist_interval == 0
        writer = StorageWriter(self.client, step, persist=durable)
        if async_mode == AsyncMode.ASYNC:
            self._saver.saved(step)
            return dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
        try:
            dcp.save(state_dict, storage_writer=writer)
            self._saver.saved(step)
        except (CheckpointException, RopeteamError) as error:
            self._saver.warn(step, error)
        return None

    def _wait_for_saving(self) -> None:
        try:
            super()._wait_for_saving()
        except (CheckpointException, RopeteamError) as error:
            self.save_future = None
            self._saver.warn(None, error)

    def _load(self, step: int = -1) -> bool:
        found = self._find(step)
        if found is None:
            return bool(super()._load(step))
        with torch.no_grad():
            states = self._states_to_load(found == 0)
            reader = StorageReader(
                self.client, found, timeout=self._timeout, unsafe_pickle=self._unsafe_pickle
            )
            dcp.load(states, storage_reader=reader)
            self.states[MODEL].load_state_dict(states)
        return True

    def _find(self, step: int) -> int | None:
        """The step to load, equal on every rank; None: Ropeteam does not have it."""
        if step == -1:
            newest = latest(self.client, self._timeout)
            return None if newest is None else newest.step
        try:
            with SavedStep(self.client, step, self.client.rank, self._timeout):
                return step
        except NotFound:
            return None

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "client"):
            self._saver.settle()
            self.client.close()
