# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's checkpoints in the memory of the job's nodes.

    engine, *_ = deepspeed.initialize(model=model, config=config, ...)
    ropeteam.deepspeed.attach(engine)

    path, client_state = engine.load_checkpoint("checkpoints")     # (None, None): nothing is saved
    while ...:
        ...
        engine.save_checkpoint("checkpoints", client_state={...})

Each file that DeepSpeed would write becomes an object with its name in the rank's shard, with the bytes that
torch.save would write. So zero_to_fp32.py and DeepSpeed itself open a directory made by `ropeteam export`.
Tensors are copied once, straight into the arena. docs/frameworks.md lists what DeepSpeed itself still
does."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from ._client import DEFAULT_TIMEOUT, Client
from ._errors import Code, Corrupt, NotFound, RopeteamError, Unsupported, error_for
from .torch._pt import DEEPSPEED, Parts, load_pt, pt_file
from .torch._reshard import SavedStep
from .torch._saver import Saver
from .torch._state import _restore_rng, _rng_objects, open_distributed
from .torch._unpickle import refused

_log = logging.getLogger("ropeteam")

#: In a shard: the tag of the checkpoint, and the names of its files.
_NOTE = "deepspeed"
_TAG = re.compile(r"global_step(\d+)")


def attach(
    engine: Any, client: Client | None = None, *, rng: bool = True, timeout: float = DEFAULT_TIMEOUT
) -> RopeteamCheckpointEngine:
    """Makes `engine`, the result of deepspeed.initialize(), save to and load from Ropeteam. Call it on every
    rank, before the engine's first save_checkpoint() or load_checkpoint(). A job has one engine, because its
    steps are those of the Client.

    client: an open one, which stays open; default: one is opened (a collective). rng: also saves and restores
    the random generators of torch, Python and numpy, which DeepSpeed alone does not do. timeout: seconds that
    a load may wait, or a save while memory is full.

    Unsupported: the optimizer's state is on NVMe. Others: see ropeteam.torch.open_distributed()."""
    if engine.zero_nvme_offload_optimizer():
        raise Unsupported("the optimizer's state is offloaded to NVMe: DeepSpeed copies its files by itself")
    client = open_distributed(timeout=timeout) if client is None else client
    return RopeteamCheckpointEngine(engine, client, rng, timeout)


class RopeteamCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc, unused-ignore]
    """DeepSpeed's interface for storing a checkpoint's files; attach() installs it.

    A save that fails does not raise: it is a warning in the log "ropeteam". `client` is the Client in use."""

    def __init__(self, engine: Any, client: Client, rng: bool, timeout: float) -> None:
        super().__init__(engine._config)
        self.name = "RopeteamCheckpointEngine"
        self.client = client
        self._engine, self._rng, self._timeout = engine, rng, timeout
        self._saver = Saver(client, timeout)
        self._by_deepspeed = engine.load_checkpoint
        # The checkpoint that is being saved: its directory (None: it is not a whole checkpoint) and its
        # files.
        self._saving: str | None = None
        self._tag = ""
        self._files: dict[str, Parts] = {}
        self._checked: set[str] = set()
        # The checkpoint that is being loaded: the rank with each file, and the parts read so far.
        self._loading: SavedStep | None = None
        self._owners: dict[str, int] = {}
        self._loaded: dict[str, Any] = {}
        engine.checkpoint_engine = self
        engine.load_checkpoint = self.load_checkpoint

    # ---- saving: DeepSpeed calls these in this order, on every rank

    def create(self, info: Any) -> None:
        self._saving, self._tag, self._files = None, info.tag, {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does not make the directory of a checkpoint's files: there will be none."""
        if os.path.basename(os.path.normpath(path)) == self._tag:
            self._saving = os.path.normpath(path)
        else:
            os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        folder, name = os.path.split(os.path.normpath(path))
        if folder != self._saving:  # save_16bit_model()
            super().save(state_dict, path)
            return
        first = name not in self._checked
        self._files[name] = pt_file(state_dict, self._check if first else None)
        self._checked.add(name)

    @staticmethod
    def _check(names: set[str]) -> None:
        """TypeError: a value could not be loaded again."""
        for name in refused(names, DEEPSPEED):
            raise TypeError(
                f"the checkpoint has a {name}, which cannot be saved: in client_state only tensors, plain "
                "Python values, numpy's plain arrays and scalars, argparse.Namespace and what "
                "torch.serialization.add_safe_globals() has registered can stand"
            )

    def commit(self, info: Any) -> bool:
        if self._saving is not None:
            files, self._files, self._saving = self._files, {}, None
            step = int(self._engine.global_steps)
            self._saver.save(step, lambda: self._put(step, info.tag, files))
        return True

    def _put(self, step: int, tag: str, files: dict[str, Parts]) -> None:
        others: dict[str, Any] = {_NOTE: {"tag": tag, "files": list(files)}}
        if self._rng:
            others.update(_rng_objects())
        lengths = [len(p) if isinstance(p, bytes) else p.numel() for parts in files.values() for p in parts]
        with self.client.begin(step, bytes=sum(lengths), objects=len(files) + len(others)) as save:
            for name, parts in files.items():
                save.put_parts(name, parts, background=True)
            for name, value in others.items():
                save.put(name, value)

    # ---- loading

    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, *arguments: Any, **options: Any
    ) -> tuple[str | None, Any]:
        """Replaces the engine's method. tag: default: that of the newest step. DeepSpeed loads a checkpoint
        that Ropeteam does not have from `load_dir` as usual."""
        with contextlib.ExitStack() as stack:
            found = None if self._engine.load_universal_checkpoint() else self._find(tag, stack)
            if found is None:
                if tag is None and self._is_left_over(load_dir):
                    return None, None
                path, client_state = self._by_deepspeed(load_dir, tag, *arguments, **options)
                return path, client_state
            self._loading, tag = found
            # DeepSpeed looks for the files before it has them read.
            empty = stack.enter_context(tempfile.TemporaryDirectory(prefix="ropeteam-"))
            os.mkdir(os.path.join(empty, tag))
            for name in self._owners:
                open(os.path.join(empty, tag, name), "wb").close()
            try:
                path, client_state = self._by_deepspeed(empty, tag, *arguments, **options)
            finally:
                saved, self._loading, self._loaded = self._loading, None, {}
            if self._rng and saved.own is not None:
                _restore_rng(saved.view(saved.own))
        return (None if path is None else path.replace(empty, os.fspath(load_dir), 1)), client_state

    @staticmethod
    def _is_left_over(load_dir: str) -> bool:
        """Whether the file `latest` names a checkpoint whose files were never written there: DeepSpeed writes
        `latest` at each save."""
        latest = os.path.join(load_dir, "latest")
        if not os.path.isfile(latest):
            return False
        with open(latest) as file:
            tag = file.read().strip()
        if os.path.isdir(os.path.join(load_dir, tag)):
            return False
        _log.warning(
            "%s names %s, which is neither there nor in Ropeteam any more: nothing is loaded", latest, tag
        )
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        name = os.path.basename(path)
        if self._loading is None:
            return super().load(path, map_location)
        if name not in self._loaded:  # DeepSpeed loads the first file twice, the first time to inspect it
            if name not in self._owners:
                raise NotFound(f"step {self._loading.step} has {sorted(self._owners)} and no {name}")
            owner = self._owners[name]
            view = self._loading.view(owner)
            # In place if this node has the shard. From another rank's shard only this file is read.
            file = view.map(name) if owner == self._loading.own else memoryview(view.read(name))
            self._loaded[name] = load_pt(file, DEEPSPEED, map_location)
        return self._loaded[name]

    def _find(self, tag: str | None, stack: contextlib.ExitStack) -> tuple[SavedStep, str] | None:
        """The step and its tag, and which rank has which file. None: Ropeteam does not have it. A collective,
        so that all ranks do the same and open only the shards that they need."""
        mine: dict[str, Any] = {"step": None, "tag": "", "files": {}, "error": None}
        try:
            named = None if tag is None else _TAG.fullmatch(str(tag))
            latest = None if named else self.client.latest(self._timeout)
            step = int(named[1]) if named else latest.step if latest else None
            if step is not None:
                saved = stack.enter_context(SavedStep(self.client, step, self.client.rank, self._timeout))
                for rank in range(self.client.rank, saved.world_size, dist.get_world_size()):
                    note = saved.view(rank).value(_NOTE)
                    mine.update(step=step, tag=note["tag"])
                    mine["files"].update(dict.fromkeys(note["files"], rank))
        except RopeteamError as error:
            mine["error"] = (int(error.code), str(error))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        errors = {rank: each["error"] for rank, each in enumerate(everyone) if each["error"]}
        if named and any(code == Code.NOT_FOUND for code, _ in errors.values()):
            return None
        for rank, (code, text) in errors.items():
            raise error_for(code, f"rank {rank}: {text}")
        found = {(each["step"], each["tag"]) for each in everyone if each["step"] is not None}
        if len(found) > 1:
            raise Corrupt(f"the ranks would load different checkpoints: {sorted(found)}")
        self._owners = {name: rank for each in reversed(everyone) for name, rank in each["files"].items()}
        if not found or (tag is not None and found != {(step, str(tag))}):
            return None
        return saved, found.pop()[1]
