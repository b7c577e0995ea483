# SPDX-License-Identifier: Apache-2.0
"""Accelerate: an Accelerator whose save_state() and load_state() go to Ropeteam.

    from ropeteam.accelerate import Accelerator  # in place of: from accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(progress)
    accelerator.load_state()                     # the latest; nothing happens where nothing was saved
    …
    accelerator.save_state(f"step_{step}")

docs/frameworks.md has what is saved and what does not work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import accelerate

from ._client import DEFAULT_TIMEOUT, Client
from ._errors import InvalidArgument, Unsupported
from .torch import Checkpointer, load_state
from .torch._frameworks import by_number, has_storage, keep_on_storage, open_rank

#: The kinds of training whose state on a rank is that of PyTorch's own modules and optimizers.
_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate.Accelerator with two methods replaced. A save that fails is a warning, and training
    continues; see ropeteam.torch.Checkpointer."""

    def __init__(self, *args: Any, ropeteam_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """ropeteam_options: storage_every, log_file, when_full and timeout, as in
        ropeteam.torch.Checkpointer. Without storage_every, each saved step is written to storage, if the job
        has one. Storage then keeps as many steps as ProjectConfiguration's total_limit, unless the daemons'
        flags say otherwise."""
        super().__init__(*args, **kwargs)
        self._ropeteam_options = {"timeout": DEFAULT_TIMEOUT, **(ropeteam_options or {})}
        self._ropeteam_storage_every = self._ropeteam_options.pop("storage_every", None)
        self._ropeteam_persists = False  # for each saved step
        self._ropeteam_client: Client | None = None
        self._ropeteam_saves: Checkpointer | None = None
        self._ropeteam_parts: list[list[Any]] = []  # the parts that the Checkpointer was made from

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Saves the state that accelerate.Accelerator would save. The step's number is at the end of
        `output_dir`; without it, the next one is used (project_configuration.iteration). The numbers must
        grow, and be equal on all ranks.

        Under FSDP2 each rank saves its own part of every tensor, and nothing is gathered.

        Returns the step's name, for load_state(). InvalidArgument: it has no number. Unsupported: DeepSpeed,
        FSDP1, or a hook that writes into the directory. TypeError: a registered object has more than plain
        state.
        """
        self._check_supported(self._save_model_state_pre_hook)
        project = self.project_configuration
        step = project.iteration if output_dir is None else _number(output_dir)
        own = (self._models, self._optimizers, self._schedulers, self._custom_objects)
        parts = [list(each) for each in own]
        if self._ropeteam_saves is None or not _same(parts, self._ropeteam_parts):
            self._ropeteam_parts = parts
            client = self._opened()
            stores = has_storage(client)
            self._ropeteam_persists = stores and self._ropeteam_storage_every is None and client.rank == 0
            if stores:
                timeout = self._ropeteam_options["timeout"]
                keep_on_storage(client, "total_limit", project.total_limit, timeout)
            self._ropeteam_saves = Checkpointer(
                model=by_number(self._models),
                optimizer=by_number(self._torch_optimizers()),
                extra=_Rest(self),
                storage_every=0,
                client=client,
                **self._ropeteam_options,
            )
        self._ropeteam_saves.save(step, persist=self._ropeteam_persists)
        project.iteration = step + 1
        return f"checkpoint_{step}" if output_dir is None else os.fspath(output_dir)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> int | None:
        """Loads the step whose number is at the end of `input_dir`, or else the latest, and returns its
        number. None: nothing has been saved, and nothing is changed.

        NotFound: there is no such step. InvalidArgument: the step does not fit the prepared and registered
        objects. Unsupported: as save_state().
        """
        self._check_supported(self._load_model_state_pre_hook)
        loaded = load_state(
            self._opened(),
            by_number(self._models),
            by_number(self._torch_optimizers()),
            step=None if input_dir is None else _number(input_dir),
            timeout=self._ropeteam_options["timeout"],
        )
        if loaded is None:
            return None
        if not isinstance(loaded.data, dict) or "custom_objects" not in (loaded.data.get("extra") or {}):
            raise InvalidArgument(f"step {loaded.step} was not saved by an Accelerator")
        _Rest(self).load_state_dict(loaded.data["extra"])
        self.project_configuration.iteration = loaded.step + 1
        return loaded.step

    def maybe_finalize(self, blocking: bool = False) -> bool:
        """See Checkpointer.maybe_finalize()."""
        return self._ropeteam_saves is None or self._ropeteam_saves.maybe_finalize(blocking)

    def end_training(self) -> None:
        """Also waits until the last save is committed."""
        if self._ropeteam_saves is not None:
            self._ropeteam_saves.finish()
            self._ropeteam_saves = None
        if self._ropeteam_client is not None:
            self._ropeteam_client.close()
            self._ropeteam_client = None
        super().end_training()

    def _opened(self) -> Client:
        if self._ropeteam_client is None:
            timeout = self._ropeteam_options["timeout"]
            self._ropeteam_client = open_rank(timeout, self._ropeteam_storage_every)
        return self._ropeteam_client

    def _torch_optimizers(self) -> list[Any]:
        return [getattr(each, "optimizer", each) for each in self._optimizers]

    def _check_supported(self, hooks: Mapping[Any, Any]) -> None:
        if self.distributed_type.name not in _SUPPORTED:
            raise Unsupported(f"Accelerate with {self.distributed_type.name}: see docs/frameworks.md")
        if self.distributed_type.name == "FSDP" and not self.is_fsdp2:
            raise Unsupported(
                "FSDP1 is not supported: set FullyShardedDataParallelPlugin(fsdp_version=2), "
                "or fsdp_version: 2 in the file of `accelerate config`"
            )
        if hooks:
            raise Unsupported(
                "a hook of register_save_state_pre_hook() or register_load_state_pre_hook() works "
                "on a directory, and there is none: use register_for_checkpointing()"
            )


class _Rest:
    """An accelerator's state in addition to models, optimizers and random generators, as one state."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def _parts(self) -> dict[str, list[Any]]:
        of = self._accelerator
        return {
            "schedulers": of._schedulers,
            "dataloaders": [each for each in of._dataloaders if _is_stateful(each)],
            "scaler": [] if of.scaler is None else [of.scaler],
            "custom_objects": of._custom_objects,
        }

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            kind: [each.state_dict() for each in parts] for kind, parts in self._parts().items()
        }
        return {"step": self._accelerator.step, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parts = self._parts()
        for kind, targets in parts.items():
            if len(state[kind]) != len(targets):
                raise InvalidArgument(
                    f"{len(state[kind])} {kind} were saved, and {len(targets)} are prepared or registered"
                )
        for kind, targets in parts.items():
            for target, each in zip(targets, state[kind]):
                target.load_state_dict(each)
        self._accelerator.step = state["step"]


def _is_stateful(loader: Any) -> bool:
    """A plain loader begins at an epoch's start; the program skips batches."""
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _same(some: list[list[Any]], others: list[list[Any]]) -> bool:
    return [[id(each) for each in part] for part in some] == [[id(each) for each in part] for part in others]


def _number(name: Any) -> int:
    match = re.search(r"(\d+)$", os.path.basename(os.path.normpath(os.fspath(name))))
    if match is None:
        raise InvalidArgument(f"{os.fspath(name)!r} does not end in the number of a step, as step_100 does")
    return int(match[1])
