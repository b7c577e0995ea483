# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with its checkpoints in Ropeteam instead of directories.

    trainer = Trainer(model=model, args=args, callbacks=[RopeteamCallback()], …)
    trainer.train(resume_from_checkpoint=True)

or, for an existing trainer:

    trainer = TrainerWrapper(trainer, save_mem_interval=10)
    trainer.train(resume_from_checkpoint=True)

The trainer saves when its own arguments say so (save_strategy, save_steps), and also at each multiple of
memory_every. docs/frameworks.md says what is saved and what does not work.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import logging
import numbers
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from ._client import DEFAULT_TIMEOUT, Client
from ._errors import InvalidArgument, NotFound, Unsupported
from .torch import Checkpointer, load_state
from .torch._frameworks import has_storage, keep_on_storage, open_rank, restore_rng

_log = logging.getLogger("ropeteam")

#: The methods of a trainer that save and load; RopeteamCallback replaces them.
_METHODS = (
    "train",
    "_maybe_log_save_evaluate",
    "_save_checkpoint",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)


class RopeteamCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Makes its trainer save to Ropeteam and resume from it.

    Pass it as Trainer(callbacks=[…]): a trainer's add_callback() is too late. For one trainer.

    `train(resume_from_checkpoint=True)` continues from the latest step. If there is none, it continues from
    the newest checkpoint in output_dir, as without Ropeteam. If that is missing, too, it starts from the
    beginning. "…/checkpoint-300" means step 300 if there is no such directory.

    A save that fails is a warning, and training continues; what can never be saved raises. See Checkpointer.
    """

    def __init__(
        self,
        *,
        memory_every: int | None = None,
        storage_every: int | None = None,
        log_file: str | os.PathLike[str] | None = None,
        when_full: str = "wait",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """memory_every: also saves at each multiple of it, to memory only.

        storage_every: see Checkpointer. Default: in a job with storage, the steps chosen by save_strategy are
        written there.
        log_file, when_full, timeout: see Checkpointer.
        """
        if memory_every is not None and memory_every < 1:
            raise InvalidArgument(f"memory_every {memory_every}: at least 1 is needed")
        self._memory_every, self._storage_every = memory_every, storage_every
        self._options: dict[str, Any] = {"log_file": log_file, "when_full": when_full, "timeout": timeout}
        self._timeout = timeout
        self._trainer: Any = None
        self._client: Client | None = None
        self._checkpointer: Checkpointer | None = None
        self._has_storage = False
        self._saved_step: int | None = None
        self._checkpoint: str | None = None  # the directory that represents _step during the resume
        self._step, self._world_size = 0, 0
        # The best step's weights: all of them on one rank, or each rank's part if the model is sharded.
        self._best: dict[str, torch.Tensor] | None = None
        self._best_step: int | None = None
        self._best_path: str | None = None

    @property
    def stats(self) -> Any:
        """CheckpointStats of the present or last training; None before its first save."""
        return None if self._checkpointer is None else self._checkpointer.stats

    def attach(self, trainer: transformers.Trainer) -> None:
        """Replaces the methods of this one trainer that save and load.

        Unsupported: this version of the library has other methods, or the trainer trains with DeepSpeed or
        FSDP1.
        """
        missing = [name for name in _METHODS if not callable(getattr(trainer, name, None))]
        if missing:
            raise Unsupported(
                f"transformers {transformers.__version__}: its Trainer has no {', '.join(missing)}"
            )
        if trainer.is_deepspeed_enabled:
            raise Unsupported("a Trainer with DeepSpeed saves by that: see docs/frameworks.md")
        if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
            raise Unsupported('FSDP1 is not supported: set fsdp_config={"fsdp_version": 2, …}')
        if trainer.args.push_to_hub:
            _log.warning("push_to_hub: checkpoints are in Ropeteam, and none is pushed")
        self._trainer = trainer
        for name in _METHODS:
            own = getattr(trainer, name)
            replaced = functools.partial(getattr(self, f"_own_{name}"), own)
            setattr(trainer, name, functools.wraps(own)(replaced))

    def maybe_finalize(self, blocking: bool = False) -> bool:
        """As Checkpointer.maybe_finalize(), for the present training."""
        return self._checkpointer is None or self._checkpointer.maybe_finalize(blocking)

    # ---- the trainer's events

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            self.attach(_trainer_that_calls())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            raise InvalidArgument("add_callback() is too late: Trainer(callbacks=[RopeteamCallback()])")
        self._checkpointer = None  # every training has another model and optimizer
        if self._best_path is not None:
            state.best_model_checkpoint = self._best_path

    # ---- what replaces the trainer's methods; the first argument is the replaced one

    def _own_train(
        self, own: Callable[..., Any], resume_from_checkpoint: Any = None, *arguments: Any, **options: Any
    ) -> Any:
        self._client = open_rank(self._timeout, self._storage_every)
        self._checkpointer = self._saved_step = self._best = self._best_step = self._best_path = None
        try:
            self._has_storage = has_storage(self._client)
            if self._has_storage:
                self._limit_storage()
            found = self._find(resume_from_checkpoint)
            if found is None:
                output = self._trainer.args.output_dir
                if resume_from_checkpoint is True:
                    resume_from_checkpoint = get_last_checkpoint(output) if os.path.isdir(output) else None
                result = own(resume_from_checkpoint, *arguments, **options)
            else:
                result = self._resume(found, functools.partial(own, **options), *arguments)
            if self._checkpointer is not None:
                self._checkpointer.finish()
            return result
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
            self._client.close()

    def _limit_storage(self) -> None:
        assert self._client is not None
        args = self._trainer.args
        if args.load_best_model_at_end and self._trainer.is_fsdp_enabled and (args.save_total_limit or 0) > 0:
            if self._client.rank == 0:
                _log.warning(
                    "save_total_limit=%d is not in effect on storage: ranks of another mesh need the best "
                    "step itself. Start the daemons with --keep-on-storage %d --keep-best %s:%s",
                    args.save_total_limit,
                    args.save_total_limit,
                    "eval_" + args.metric_for_best_model.removeprefix("eval_"),
                    "max" if args.greater_is_better else "min",
                )
            return
        keep_on_storage(self._client, "save_total_limit", args.save_total_limit, self._timeout)

    def _own__maybe_log_save_evaluate(self, own: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        result = own(*arguments, **options)
        step = self._trainer.state.global_step
        if self._memory_every is not None and step % self._memory_every == 0 and step != self._saved_step:
            self._save(step, wanted=False)
        return result

    def _own__save_checkpoint(self, own: Callable[..., Any], model: Any, trial: Any, *_: Any) -> None:
        trainer = self._trainer
        state, step = trainer.state, trainer.state.global_step
        trainer.store_flos()
        if state.best_global_step == step:
            state.best_model_checkpoint = os.path.join(
                trainer._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{step}"
            )
            self._best_step, self._best_path = step, state.best_model_checkpoint
            self._keep_best()
        self._save(step, wanted=True)

    def _own__load_from_checkpoint(self, own: Callable[..., Any], checkpoint: Any, *arguments: Any) -> None:
        if checkpoint != self._checkpoint:  # otherwise it comes with the optimizer
            own(checkpoint, *arguments)

    def _own__load_optimizer_and_scheduler(self, own: Callable[..., Any], checkpoint: Any) -> None:
        if checkpoint is None or checkpoint != self._checkpoint:
            own(checkpoint)
            return
        assert self._client is not None
        trainer, extra = self._trainer, self._extra()
        optimizer = None if extra["only_model"] else _plain_optimizer(trainer)
        loaded = load_state(
            self._client, trainer.model_wrapped, optimizer, step=self._step, rng=False, timeout=self._timeout
        )
        assert loaded is not None
        saved = loaded.data["extra"]
        if not extra["only_model"]:
            trainer.lr_scheduler.load_state_dict(loaded.data["scheduler"])
            if saved["scaler"] is not None and trainer.accelerator.scaler is not None:
                trainer.accelerator.scaler.load_state_dict(saved["scaler"])
        self._best_path = json.loads(saved["trainer_state"])["best_model_checkpoint"]
        self._best_step, self._best = saved["best_step"], saved["best"]
        if saved.get("best_mesh", []) != self._mesh():
            self._best = None  # the parts differ from this rank's
        if self._best_step == self._step:
            self._keep_best()
        self._saved_step = self._step

    def _own__load_scaler(self, own: Callable[..., Any], checkpoint: Any) -> None:
        if checkpoint is None or checkpoint != self._checkpoint:
            own(checkpoint)

    def _own__load_rng_state(self, own: Callable[..., Any], checkpoint: Any) -> None:
        if checkpoint is None or checkpoint != self._checkpoint:
            own(checkpoint)
            return
        assert self._client is not None
        restore_rng(self._client, self._step, self._world_size, self._timeout)

    def _own__load_best_model(self, own: Callable[..., Any]) -> None:
        trainer = self._trainer
        path = trainer.state.best_model_checkpoint
        if path != self._best_path:  # a directory, from before
            own()
            return
        sharded = bool(self._mesh())
        if self._best is None and (sharded or trainer.args.process_index == 0):
            self._find_best(sharded)
        for name, tensor in trainer.model.state_dict().items():
            if self._best is not None:
                _local(tensor).copy_(self._best[name])
            if dist.is_initialized() and trainer.args.world_size > 1 and not sharded:
                dist.broadcast(tensor, 0)
        trainer.save_model(path, _internal_call=True)  # the trainer reports this path to its user

    # ---- saving

    def _save(self, step: int, wanted: bool) -> None:
        """wanted: save_strategy selects it."""
        if self._checkpointer is None:
            self._checkpointer = self._make_checkpointer()
        self._saved_step = step
        persist = wanted and self._storage_every is None and self._has_storage
        self._checkpointer.save(step, metadata=self._metadata(step), persist=persist)

    def _make_checkpointer(self) -> Checkpointer:
        trainer = self._trainer
        only_model = trainer.args.save_only_model
        return Checkpointer(
            model=trainer.model_wrapped,
            optimizer=None if only_model else _plain_optimizer(trainer),
            scheduler=None if only_model else trainer.lr_scheduler,
            extra=_Extra(self),
            files=_files_of(trainer),
            storage_every=0,
            client=self._client,
            **self._options,
        )

    def state_dict(self) -> dict[str, Any]:
        """A step's state in addition to model, optimizer, scheduler and random generators."""
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        stateful = trainer.state.stateful_callbacks
        for each in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(each, ExportableState):
                name, value = type(each).__name__, each.state()
                stateful[name] = [*stateful[name], value] if isinstance(stateful.get(name), list) else value
        return {
            "only_model": bool(trainer.args.save_only_model),
            "trainer_state": json.dumps(dataclasses.asdict(trainer.state)),
            "scaler": None if scaler is None else scaler.state_dict(),
            "best_step": self._best_step,
            "best": None if self._best_step == trainer.state.global_step else self._best,
            "best_mesh": self._mesh(),
        }

    def _metadata(self, step: int) -> dict[str, Any]:
        """The metrics that the trainer logged at this step, {"eval_loss": …}."""
        logged: dict[str, Any] = {}
        for entry in self._trainer.state.log_history[-4:]:
            if entry.get("step") == step:
                logged.update({key: each for key, each in entry.items() if isinstance(each, numbers.Real)})
        return logged

    def _keep_best(self) -> None:
        """Keeps the present weights, for load_best_model_at_end."""
        if self._trainer.args.load_best_model_at_end and (
            self._mesh() or self._trainer.args.process_index == 0
        ):
            state = self._trainer.model.state_dict()
            self._best = {
                name: _local(tensor).detach().to("cpu", copy=True) for name, tensor in state.items()
            }

    def _find_best(self, sharded: bool) -> None:
        """Loads the best step, if it still exists. Ranks of another mesh had kept its weights."""
        try:
            if not sharded or self._best_step is None:
                raise NotFound("they were not kept")
            assert self._client is not None
            load_state(
                self._client,
                self._trainer.model_wrapped,
                step=self._best_step,
                rng=False,
                timeout=self._timeout,
            )
        except NotFound as error:
            _log.warning("the best model's weights are not there, the last step's stay: %s", error)

    def _mesh(self) -> list[int]:
        """The shape of the mesh over which the model is sharded; empty: each rank has all of it."""
        state = self._trainer.model_wrapped.state_dict()  # parameters() may be whole after an evaluation
        meshes = (getattr(each, "device_mesh", None) for each in state.values())
        return next((list(mesh.shape) for mesh in meshes if mesh is not None), [])

    # ---- resuming

    def _find(self, resume: Any) -> int | None:
        """The step to resume from; None: Ropeteam does not have it."""
        assert self._client is not None
        if resume is True:
            found = self._client.latest(self._timeout)
            return None if found is None else found.step
        if not isinstance(resume, (str, os.PathLike)) or os.path.isdir(resume):
            return None
        match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", os.path.basename(os.path.normpath(resume)))
        return int(match[1]) if match else None

    def _resume(self, step: int, own: Callable[..., Any], *arguments: Any) -> Any:
        """The library wants a directory, and first reads one file in it."""
        self._step = step
        state = json.loads(self._extra()["trainer_state"])
        with tempfile.TemporaryDirectory(prefix="ropeteam-") as folder:
            self._checkpoint = os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{step}")
            os.mkdir(self._checkpoint)
            if state["best_model_checkpoint"] is not None:
                state["best_model_checkpoint"] = self._checkpoint  # must exist; on_train_begin() corrects it
            with open(os.path.join(self._checkpoint, TRAINER_STATE_NAME), "w") as file:
                json.dump(state, file)
            try:
                return own(self._checkpoint, *arguments)
            finally:
                self._checkpoint = None

    def _extra(self) -> Any:
        """The result of state_dict() for the step to resume from, as JSON."""
        assert self._client is not None
        found = self._client.latest(self._timeout)
        world_size = self._client.info().world_size
        self._world_size = found.world_size if found is not None and found.step == self._step else world_size
        whose = self._client.rank if self._client.rank < self._world_size else 0
        with self._client.view(self._step, whose, self._timeout) as view:
            extra = view.value("data").get("extra") if "data" in view else None
        if not isinstance(extra, dict) or "trainer_state" not in extra:
            raise NotFound(f"step {self._step} was not saved by a Trainer")
        return extra


class _Extra:
    """For Checkpointer. A part of a trainer is loaded when the trainer loads it."""

    def __init__(self, callback: RopeteamCallback) -> None:
        self.state_dict = callback.state_dict

    def load_state_dict(self, state: Any) -> None:
        raise InvalidArgument("a step of a Trainer is loaded by trainer.train(resume_from_checkpoint=…)")


def TrainerWrapper(
    trainer: transformers.Trainer,
    save_mem_interval: int | None = None,
    save_storage_interval: int | None = None,
    log_file_path: str | os.PathLike[str] | None = None,
) -> transformers.Trainer:
    """The given trainer, which from now on saves to Ropeteam and resumes from it.

    save_mem_interval, save_storage_interval, log_file_path: RopeteamCallback's memory_every, storage_every
    and log_file.
    """
    callback = RopeteamCallback(
        memory_every=save_mem_interval, storage_every=save_storage_interval, log_file=log_file_path
    )
    callback.attach(trainer)
    trainer.add_callback(callback)
    return trainer


def _trainer_that_calls() -> transformers.Trainer:
    """The trainer whose constructor calls on_init_end(). It is found on the stack, because the event has only
    its arguments."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, transformers.Trainer):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise InvalidArgument("RopeteamCallback.on_init_end() was not called by a Trainer: use attach(trainer)")


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _plain_optimizer(trainer: transformers.Trainer) -> Any:
    """Without Accelerate's wrapper."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def pretrained_files(model: Any, processing_class: Any = None) -> dict[str, bytes]:
    """The files that from_pretrained() needs in addition to the weights: config.json, generation_config.json
    and the files of a tokenizer or another processing class. For Checkpointer(files=…) and
    save_state(files=…); `ropeteam export --format hf` then needs nothing else."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # as fully_shard() names its classes
    config.dtype = str(model.dtype).split(".")[-1]
    with tempfile.TemporaryDirectory(prefix="ropeteam-") as folder:
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if processing_class is not None:
            processing_class.save_pretrained(folder)
        root = pathlib.Path(folder)
        files = [path for path in sorted(root.rglob("*")) if path.is_file()]
        return {f"hf/{path.relative_to(root).as_posix()}": path.read_bytes() for path in files}


def _files_of(trainer: transformers.Trainer) -> dict[str, bytes]:
    """On rank 0, for a model of the library. A step is complete without these files; only its export needs
    them."""
    if trainer.args.process_index != 0 or not isinstance(trainer.model, transformers.PreTrainedModel):
        return {}
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    try:
        return pretrained_files(trainer.model, processing)
    except Exception as error:  # the code of the library and the tokenizer may raise anything
        _log.warning("`ropeteam export --format hf` will need --config: %s: %s", type(error).__name__, error)
        return {}
