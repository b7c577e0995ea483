# SPDX-License-Identifier: Apache-2.0
"""PyTorch Lightning: a CheckpointIO whose files are Ropeteam's steps.

    rope = RopeteamCheckpointIO()
    trainer = Trainer(plugins=[rope], callbacks=[rope.callback, ModelCheckpoint(every_n_train_steps=10)])
    trainer.fit(model, loader, ckpt_path=rope.latest())  # None: nothing was saved

A save copies the checkpoint into the arena once and returns; replication runs while training continues. So
AsyncCheckpointIO(rope) works, but has nothing left to hide. With ModelParallelStrategy each rank saves its
own part. docs/frameworks.md says what is saved and what does not work.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ._client import DEFAULT_TIMEOUT, Client
from ._errors import InvalidArgument, NotFound, Unsupported
from .torch import Checkpointer, CheckpointStats, Loaded, load_state
from .torch._frameworks import by_number, has_storage, open_rank, rng_state, set_rng_state

_log = logging.getLogger("ropeteam")

_RNG = "ropeteam_rng"


class RopeteamCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]
    """Saves a checkpoint as the step with its global_step as number. Loads it by a path with the number in it
    ("…/epoch=0-step=40.ckpt"), or by a path that this object has saved. An existing file is loaded as usual.

    callback: the trainer needs it in addition to the plugin. It saves the random generators and the parts of
    ranks for which Lightning does not call the plugin.

    A save that fails is a warning, and training continues; what can never be saved raises. See
    ropeteam.torch.Checkpointer.
    """

    def __init__(
        self,
        *,
        storage_every: int | None = None,
        log_file: str | os.PathLike[str] | None = None,
        when_full: str = "wait",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """storage_every: see Checkpointer. Default: in a job with storage, each of these steps is written
        there. Others: see Checkpointer."""
        super().__init__()
        self.callback = _EveryRank(self)
        self._storage_every, self._timeout = storage_every, timeout
        self._options: dict[str, Any] = {"log_file": log_file, "when_full": when_full, "timeout": timeout}
        self._client: Client | None = None
        self._saves: Checkpointer | None = None
        self._persists = False  # for each saved step
        self._saved_parts: tuple[Any, ...] = ()  # the parts that `_saves` was made from
        self._now: Mapping[str, Any] = {}  # the result of state_dict() during a save
        self._steps: dict[str, int] = {}  # by path that was saved
        self._last: int | None = None
        self._metadata: dict[str, float] = {}
        self._pending_rng: tuple[int, Mapping[str, Any]] | None = None  # for the first batch after this step

    @property
    def stats(self) -> CheckpointStats:
        """The metrics of this rank."""
        return CheckpointStats() if self._saves is None else self._saves.stats

    def latest(self) -> str | None:
        """A path for Trainer.fit(ckpt_path=…): the newest step, equal on every rank. None: there is none.

        With several ranks, either torch.distributed is initialised, or a launcher such as torchrun has set
        RANK and WORLD_SIZE: Lightning's own launcher starts the other ranks later than this.
        """
        found = self._opened().latest(self._timeout)
        return None if found is None else f"ropeteam-step={found.step}.ckpt"

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Lightning calls this on rank 0. InvalidArgument: there are several ranks and the trainer has no
        `callback`."""
        if self._opened().info().world_size > 1 and self.callback.strategy is None:
            raise InvalidArgument("with several ranks it needs Trainer(callbacks=[rope.callback, …])")
        self._steps[os.fspath(path)] = checkpoint["global_step"]
        self._save(checkpoint["global_step"], checkpoint)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """FileNotFoundError: there is no such step."""
        if os.path.exists(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return loaded
        step, client = self._step(os.fspath(path)), self._opened()
        try:
            checkpoint = self._read(step, 0)
            own = checkpoint if client.rank == 0 else self._read(step, client.rank)
        except NotFound as error:
            raise FileNotFoundError(f"{path}: {error}") from error
        self._keep_rng(step, own)
        return {name: value for name, value in checkpoint.items() if name != _RNG}

    def remove_checkpoint(self, path: Any) -> None:
        """Forgets the path. The daemons decide which steps stay (--keep-steps, --keep-on-storage)."""
        if self._steps.pop(os.fspath(path), None) is None and os.path.exists(path):
            super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Waits until the last save is committed."""
        self.maybe_finalize(blocking=True)

    def maybe_finalize(self, blocking: bool = False) -> bool:
        """See Checkpointer.maybe_finalize()."""
        return self._saves is None or self._saves.maybe_finalize(blocking)

    def state_dict(self) -> dict[str, Any]:
        """For Checkpointer."""
        return dict(self._now)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise InvalidArgument("a checkpoint is loaded by Trainer.fit(ckpt_path=…)")

    # ---- the store

    def _opened(self) -> Client:
        if self._client is None:
            self._client = open_rank(self._timeout, self._storage_every)
        return self._client

    def _save(
        self,
        step: int,
        checkpoint: Mapping[str, Any],
        model: torch.nn.Module | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """model, optimizers: those of which each rank has a part; they are not in the checkpoint."""
        if step == self._last:
            return  # under another name: "last.ckpt"
        client, parts = self._opened(), (model, *optimizers)
        if self._saves is None or parts != self._saved_parts:
            self._saved_parts = parts
            self._persists = self._storage_every is None and client.rank == 0 and has_storage(client)
            self._saves = Checkpointer(
                model=torch.nn.Module() if model is None else model,
                optimizer=by_number(optimizers),
                extra=self,
                rng=False,
                storage_every=0,
                client=client,
                **self._options,
            )
        self._now, self._last = checkpoint, step
        self._saves.save(step, metadata=self._metadata, persist=self._persists)
        self._now = {}

    def _read(self, step: int, rank: int) -> dict[str, Any]:
        """The state that a rank saved; empty for a rank that did not exist."""
        client = self._opened()
        try:
            loaded = load_state(
                client, torch.nn.Module(), step=step, rank=rank, rng=False, timeout=self._timeout
            )
        except NotFound:
            if rank == 0:
                raise
            return {}
        return _checkpoint_in(loaded, whole=rank == 0)

    def _load_parts(
        self, path: Any, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], strict: bool
    ) -> dict[str, Any]:
        """The state given to _save() with a model. FileNotFoundError: there is no such step, or it does not
        fit."""
        step, client = self._step(os.fspath(path)), self._opened()
        options: dict[str, Any] = {"rng": False, "strict": strict, "timeout": self._timeout}
        try:
            own = _checkpoint_in(load_state(client, model, by_number(optimizers), step=step, **options))
        except (InvalidArgument, NotFound) as error:
            raise FileNotFoundError(f"{path}: {error}") from error
        self._keep_rng(step, own)
        return {name: value for name, value in own.items() if name != _RNG}

    def _keep_rng(self, step: int, saved: Mapping[str, Any]) -> None:
        """If fewer ranks saved, this rank finds another rank's state."""
        if saved.get(_RNG, {}).get("rank") == self._opened().rank:
            self._pending_rng = (step, saved[_RNG])

    def _step(self, path: str) -> int:
        if path in self._steps:
            return self._steps[path]
        match = re.search(r"step=(\d+)", os.path.basename(path))
        if match is not None:
            return int(match[1])
        found = self._opened().latest(self._timeout) if os.path.basename(path).startswith("last") else None
        if found is None:
            raise FileNotFoundError(f"{path}: there is no such file, and no step= with a number in its name")
        return found.step


def _checkpoint_in(loaded: Loaded | None, whole: bool = True) -> dict[str, Any]:
    """The state given to _save(). whole: it must contain more than the random generators."""
    assert loaded is not None
    extra = loaded.data.get("extra") if isinstance(loaded.data, dict) else None
    if not isinstance(extra, dict) or (whole and "global_step" not in extra):
        raise NotFound(f"step {loaded.step} is not a checkpoint of Lightning's")
    return extra


class _EveryRank(Callback):  # type: ignore[misc]
    """Lightning passes a checkpoint only to rank 0's plugin. But a step is committed only when every rank has
    saved its part. For the other ranks that part is the random generators."""

    def __init__(self, io: RopeteamCheckpointIO) -> None:
        self._io = io
        self.strategy: Any = None  # the strategy whose saves it joins

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if type(strategy).__name__ == "FSDPStrategy":
            raise Unsupported(
                "FSDPStrategy, which is FSDP1, is not supported: use ModelParallelStrategy, "
                "and fully_shard() in configure_model()"
            )
        if type(strategy).__name__ == "DeepSpeedStrategy":
            raise Unsupported("DeepSpeedStrategy saves by no CheckpointIO: see docs/frameworks.md")
        if self.strategy is strategy:
            return
        self.strategy = strategy
        for each in trainer.checkpoint_callbacks if trainer.is_global_zero else []:
            if getattr(each, "monitor", None) is not None and each.save_top_k > 0:
                _log.warning(
                    "save_top_k=%d of %s has no effect: memory keeps the newest --keep-steps, storage what "
                    "the daemons' --keep-on-storage and --keep-best say",
                    each.save_top_k,
                    each.monitor,
                )
        if isinstance(strategy, ModelParallelStrategy):
            _shard(self._io, trainer, strategy)
            return
        own: Callable[..., None] = strategy.save_checkpoint

        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            self._io._metadata = _metadata(trainer)
            # Called here, and not in the thread of AsyncCheckpointIO.
            checkpoint[_RNG] = {"rank": trainer.global_rank, **rng_state()}
            self._io._steps[os.fspath(filepath)] = checkpoint["global_step"]
            own(checkpoint, filepath, storage_options=storage_options)
            if not strategy.is_global_zero:
                self._io._save(checkpoint["global_step"], {_RNG: checkpoint[_RNG]})

        strategy.save_checkpoint = save_checkpoint  # all ranks call it, and it calls rank 0's plugin

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """ModelParallelStrategy calls no CheckpointIO here, either."""
        if isinstance(trainer.strategy, ModelParallelStrategy):
            self._io.maybe_finalize(blocking=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the generators as they were when the step was saved. The iterator of an epoch's batches,
        which is made after this, draws numbers from them."""
        self._restore_rng(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """If the epoch had begun when the step was saved, its iterator had already been made."""
        if batch_idx > 0:
            self._restore_rng(trainer)
        self._io._pending_rng = None

    def _restore_rng(self, trainer: Trainer) -> None:
        pending = self._io._pending_rng
        if pending is not None and pending[0] == trainer.global_step:
            set_rng_state(pending[1])


def _shard(io: RopeteamCheckpointIO, trainer: Trainer, strategy: ModelParallelStrategy) -> None:
    """Replaces the methods of this one strategy that save and load. Each rank saves its part of the live
    DTensors, and loads its part, whatever number of ranks saved them. Nothing is gathered."""

    def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """All ranks call it."""
        step, optimizers = checkpoint["global_step"], []
        if checkpoint.pop("optimizer_states", None) is not None:
            optimizers = strategy.optimizers
        rest = {name: value for name, value in checkpoint.items() if name != "state_dict"}
        rest[_RNG] = {"rank": trainer.global_rank, **rng_state()}
        io._metadata = _metadata(trainer)
        io._steps[os.fspath(filepath)] = step
        io._save(step, rest, strategy.model, optimizers)

    own = strategy.load_checkpoint

    def load_checkpoint(checkpoint_path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        if os.path.exists(checkpoint_path):
            loaded: dict[str, Any] = own(checkpoint_path, *arguments, **options)
            return loaded
        fits = trainer.state.fn == TrainerFn.FITTING
        return io._load_parts(
            checkpoint_path,
            strategy.model,
            strategy.optimizers if fits else [],
            trainer.lightning_module.strict_loading,
        )

    strategy.save_checkpoint, strategy.load_checkpoint = save_checkpoint, load_checkpoint
    # Lightning puts these into the checkpoint; a program's hooks may want to read the former.
    strategy.lightning_module_state_dict = lambda: strategy.model.state_dict()
    strategy.optimizer_state = lambda optimizer: {}


def _metadata(trainer: Trainer) -> dict[str, float]:
    """The last logged metrics, {"val_loss": …}."""
    return {str(name): float(value) for name, value in list(trainer.callback_metrics.items())[:32]}
