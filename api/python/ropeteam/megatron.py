# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's checkpoints in the memory of the job's nodes, in two ways.

With EasyCkpt's four calls, which need no directory and no collective to save:

    from ropeteam.megatron import initialize, load_checkpoint, save_checkpoint_done, save_checkpoint_if_needed

    initialize(save_mem_interval=1, save_storage_interval=500)
    iteration = load_checkpoint(model, optimizer, opt_param_scheduler)
    while iteration < args.train_iters:
        ...
        iteration += 1
        save_checkpoint_if_needed(iteration, model, optimizer, opt_param_scheduler)
    save_checkpoint_done()

Or as strategies of megatron.core.dist_checkpointing, under a program's own save() and load():

    ropeteam.megatron.register(rope)
    dist_checkpointing.save(state, directory, ("ropeteam", 1))
    directory = ropeteam.megatron.restore(rope, args.load)
    state = dist_checkpointing.load(state, directory)

Every piece of a tensor is saved under the tensor's key with its place in the whole. So a step loads on any
other tensor, pipeline and data parallel sizes on which Megatron's own checkpoints load. docs/frameworks.md
lists what Megatron itself still does, and what does not work."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import dict_utils, load
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import base
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from ._client import DEFAULT_TIMEOUT, Client
from ._errors import InvalidArgument, NotFound, RopeteamError, Unsupported
from ._values import Value
from .torch._pieces import Piece
from .torch._plain import flatten
from .torch._pt import MEGATRON, load_pt, pickled
from .torch._replicas import save_tensors
from .torch._reshard import PART, Filling, SavedStep
from .torch._saver import Saver
from .torch._state import _restore_rng, _rng_objects, open_distributed

_log = logging.getLogger("ropeteam")

BACKEND = ("ropeteam", 1)
_CONFIG = {"sharded_backend": BACKEND[0], "sharded_backend_version": BACKEND[1]}
_CONFIG.update(common_backend="torch", common_backend_version=1)
#: The files that Megatron writes next to the sharded part, and reads again.
_COMMON, _METADATA, _TRACKER = "common.pt", "metadata.json", "latest_checkpointed_iteration.txt"
#: The part that is not sharded, in a save by the four calls.
_PLAIN = "megatron"


# ---- strategies of dist_checkpointing


class SaveStrategy(base.AsyncSaveShardedStrategy):  # type: ignore[misc, unused-ignore]
    """sharded_strategy=SaveStrategy(rope) of dist_checkpointing.save(). The step is the number at the end of
    the checkpoint's directory ("iter_0000100").

    When it returns, the state is in this node's memory, even with async_sharded_save: then the request has
    only Megatron's own work left. A save that fails does not raise: it is a warning in the log "ropeteam"."""

    can_handle_sharded_objects = True

    def __init__(self, client: Client, timeout: float = DEFAULT_TIMEOUT) -> None:
        """timeout: seconds that a save may wait while memory is full."""
        super().__init__(*BACKEND)
        self._client, self._saver = client, Saver(client, timeout)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        objects = dict(_objects(sharded_state_dict))
        common = pathlib.Path(checkpoint_dir) / _COMMON
        if dist.get_rank() == 0 and common.exists():
            objects[_COMMON] = common.read_bytes()
        step = _step_of(checkpoint_dir)
        self._saver.save(step, lambda: save_tensors(self._client, step, objects))

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        self.save(sharded_state_dict, checkpoint_dir)
        return AsyncRequest(None, (), [])


class LoadStrategy(base.LoadShardedStrategy):  # type: ignore[misc, unused-ignore]
    """sharded_strategy=LoadStrategy(rope) of dist_checkpointing.load(): fills the tensors in place."""

    can_handle_sharded_objects = True

    def __init__(self, client: Client, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._client, self._timeout = client, timeout

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND[0]:
            raise Unsupported(f"the checkpoint's backend is {loaded_backend}, not {BACKEND[0]}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != BACKEND[1]:
            raise Unsupported(
                f"the checkpoint's version is {loaded_version}, this package knows {BACKEND[1]}"
            )

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        with self._open(checkpoint_dir) as saved:
            return _fill(saved, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with self._open(checkpoint_dir) as saved:
            for _, name, info in _infos(saved):
                key, part, _ = name.rpartition(PART)
                if part and key not in found:
                    shape, dtype = info.global_shape or info.shape, getattr(torch, info.dtype)
                    whole = torch.empty(shape, dtype=dtype, device="meta")
                    found[key] = ShardedTensor.from_rank_offsets(key, whole).without_data()
        return found

    def load_sharded_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        found = self.load_tensors_metadata(checkpoint_dir)
        with self._open(checkpoint_dir) as saved:
            for _, name, info in _infos(saved):
                if info.kind == "bytes" and "/shard_" in name:
                    key = name[: -len(".pt")]
                    found[key] = ShardedObject.empty_from_unique_key(key)
        return found

    def _open(self, checkpoint_dir: Any) -> SavedStep:
        return SavedStep(self._client, _step_of(checkpoint_dir), self._client.rank, self._timeout)


def register(client: Client, timeout: float = DEFAULT_TIMEOUT) -> None:
    """Makes dist_checkpointing.save(…, sharded_strategy=("ropeteam", 1)) save with this client. load() then
    loads such a checkpoint without a strategy argument."""
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, *BACKEND, SaveStrategy(client, timeout))
    base.register_default_strategy(base.StrategyAction.LOAD_SHARDED, *BACKEND, LoadStrategy(client, timeout))


def restore(
    client: Client, directory: str | os.PathLike[str], timeout: float = DEFAULT_TIMEOUT
) -> str | None:
    """Writes the small files that Megatron needs on disk before it loads the newest step: common.pt,
    metadata.json and latest_checkpointed_iteration.txt. Returns the checkpoint's directory, "…/iter_0000100";
    None: nothing is saved. A collective. Each node needs a directory, which need not be shared.

    NotFound: dist_checkpointing did not save the step. Unsupported: common.pt has a class that may not be
    loaded."""
    mine: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = client.latest(timeout)
            if found is not None:
                with client.view(found.step, 0, timeout) as view:
                    # Megatron unpickles the file, so it gets one that is made here.
                    mine = [(found.step, pickled(load_pt(memoryview(view.read(_COMMON)), MEGATRON)))]
        except RopeteamError as error:
            mine = [error]
    dist.broadcast_object_list(mine, src=0)
    if isinstance(mine[0], RopeteamError):
        raise mine[0]
    if mine[0] is None:
        return None
    step, common = mine[0]
    checkpoint = pathlib.Path(directory) / f"iter_{step:07d}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    _write(checkpoint / _COMMON, common)
    _write(checkpoint / _METADATA, json.dumps(_CONFIG).encode())
    _write(pathlib.Path(directory) / _TRACKER, str(step).encode())
    return str(checkpoint)


def _write(path: pathlib.Path, value: bytes) -> None:
    """Writes at once: other ranks of this node write the same file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(value)
    os.replace(file.name, path)


def _step_of(checkpoint_dir: Any) -> int:
    number = re.search(r"(\d+)/*$", os.fspath(checkpoint_dir))
    if number is None:
        raise InvalidArgument(f"{checkpoint_dir}: a directory's name that ends in a step's number is needed")
    return int(number[1])


def _objects(sharded_state_dict: Any) -> Iterator[tuple[str, Value | Piece]]:
    """The tensors that this rank saves. Of a tensor that several ranks have, only the main replica is
    saved."""
    count: dict[str, int] = {}
    for each in dict_utils.nested_values(sharded_state_dict):
        if not is_main_replica(each.replica_id):
            continue
        if isinstance(each, ShardedTensor):
            # A rank has several pieces of one tensor, e.g. its layers of all layers.
            number = count[each.key] = count.get(each.key, -1) + 1
            yield f"{each.key}{PART}{number}", _piece(each)
        else:
            yield f"{each.unique_key}.pt", pickled(each.data)


def _piece(tensor: Any, shape: Sequence[int] | None = None) -> Piece:
    """shape: of the whole tensor, if it differs from this tensor's. Parts outside of it are left out."""
    data = tensor.data.detach()[(None,) * tensor.prepend_axis_num]
    for dimension, whole in enumerate(shape or ()):
        length = max(0, min(data.shape[dimension], whole - tensor.global_offset[dimension]))
        data = data.narrow(dimension, 0, length)
    return Piece(data, shape or tensor.global_shape, tensor.global_offset)


def _infos(saved: SavedStep) -> Iterator[tuple[int, str, Any]]:
    for rank in saved.ranks():
        for name, info in saved.infos(rank).items():
            yield rank, name, info


def _fill(saved: SavedStep, sharded_state_dict: Any) -> Any:
    filling = Filling(saved)
    loaded: dict[int, Any] = {}
    for each in dict_utils.nested_values(sharded_state_dict):
        if isinstance(each, ShardedTensor):
            each.init_data("cuda" if torch.cuda.is_available() else "cpu")
            shape = _saved_shape(saved, each.key) if each.allow_shape_mismatch else None
            if not filling.add(each.key, _piece(each, shape)):
                raise NotFound(f"no rank of step {saved.step} saved the tensor {each.key}")
            loaded[id(each)] = each.data.detach()
            continue
        name = f"{each.unique_key}.pt"
        owner = saved.find(name)
        if owner is None:
            raise NotFound(f"no rank of step {saved.step} saved the object {each.unique_key}")
        loaded[id(each)] = load_pt(memoryview(saved.view(owner).read(name)), MEGATRON)
    filling.read()
    return dict_utils.dict_list_map_inplace(lambda each: loaded[id(each)], sharded_state_dict)


def _saved_shape(saved: SavedStep, key: str) -> tuple[int, ...] | None:
    for rank in saved.ranks():
        for _, info in saved.parts(rank, key):
            return info.global_shape or info.shape
    return None


# ---- EasyCkpt's calls


class _Easy:
    """The state made by initialize()."""

    def __init__(self, client: Client, own: bool, memory: int, storage: int, timeout: float) -> None:
        self.client, self.own, self.timeout = client, own, timeout
        self.memory_interval, self.storage_interval = memory, storage
        self.saver = Saver(client, timeout)


_easy: _Easy | None = None


def initialize(
    save_mem_interval: int = 1,
    save_storage_interval: int = 0,
    *,
    client: Client | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Call it once on each rank, after Megatron's parallel state is created and before the other three calls.

    save_mem_interval: save_checkpoint_if_needed() saves at each multiple of it. save_storage_interval: the
    same for the job's storage; 0: the daemons' --persist-every decides. The daemons' --keep-on-storage
    decides how many stay there. client: an open one, which stays open; default: one is opened (a collective).
    timeout: seconds that a load may wait, or a save while memory is full. A second call raises
    InvalidArgument."""
    global _easy
    if _easy is not None:
        raise InvalidArgument("initialize() was called before")
    if save_mem_interval < 1 or save_storage_interval < 0:
        numbers = f"save_mem_interval {save_mem_interval}, save_storage_interval {save_storage_interval}"
        raise InvalidArgument(f"{numbers}: at least 1 and 0 are needed")
    own = client is None
    opened = open_distributed(timeout=timeout) if client is None else client
    _easy = _Easy(opened, own, save_mem_interval, save_storage_interval, timeout)


#: EasyCkpt's name for it.
initialize_easyckpt = initialize


def save_checkpoint_if_needed(
    iteration: int, model: Any, optimizer: Any = None, opt_param_scheduler: Any = None
) -> bool:
    """Saves the state after iteration `iteration` if that is a multiple of an interval. True: it is in this
    node's memory and is being replicated. Call it on every rank. It is not a collective. A failed save does
    not raise: it is a warning in the log "ropeteam".

    model: Megatron's, or the list of its parts. The random generators are also saved. TypeError: the plain
    state of the scheduler or the optimizer cannot be saved."""
    easy = _initialized()
    durable = easy.storage_interval > 0 and iteration % easy.storage_interval == 0
    if not durable and iteration % easy.memory_interval != 0:
        return False
    state = _state(model, optimizer, is_loading=False)
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    plain = {
        "common": common,
        "scheduler": None if opt_param_scheduler is None else opt_param_scheduler.state_dict(),
        "trackers": _tracker_states(),
    }
    tensors, skeleton = flatten(plain)
    objects: dict[str, Any] = dict(_objects(sharded))
    objects.update({_PLAIN: skeleton, **{f"{_PLAIN}/{name}": each for name, each in tensors.items()}})
    objects.update(_rng_objects())
    client = easy.client
    return easy.saver.save(iteration, lambda: save_tensors(client, iteration, objects, persist=durable))


def load_checkpoint(
    model: Any,
    optimizer: Any = None,
    opt_param_scheduler: Any = None,
    load_arg: str = "load",
    strict: bool = True,
    concat: bool = False,
) -> int:
    """Loads the newest step and returns its iteration. If nothing is saved, it returns the result of
    Megatron-LM's load_checkpoint() for the directory in its argument `load_arg`, or 0 without Megatron-LM.
    Call it on every rank.

    strict: for the model's load_state_dict(). concat: whether another number of ranks, or other parallel
    sizes, may load. Each tensor is then joined from the parts that several ranks saved. False:
    InvalidArgument if the number of ranks differs. NotFound: a tensor was not saved."""
    easy = _initialized()
    found = easy.client.latest(easy.timeout)
    if found is None:
        return _load_by_megatron(model, optimizer, opt_param_scheduler, load_arg, strict)
    world_size = easy.client.info().world_size
    if not concat and found.world_size != world_size:
        raise InvalidArgument(
            f"step {found.step} was saved by {found.world_size} ranks, this world has {world_size}: "
            "that needs concat=True"
        )
    with SavedStep(easy.client, found.step, easy.client.rank, easy.timeout, found.world_size) as saved:
        owner = saved.find(_PLAIN)
        if owner is None:
            raise NotFound(f"step {found.step} was not saved by save_checkpoint_if_needed()")
        plain = saved.plain(_PLAIN, owner)
        state = _load_state(saved, _state(model, optimizer, is_loading=True), plain["common"])
        for name, each in _parts(model):
            each.load_state_dict(state[name], strict=strict)
        if optimizer is not None:
            with torch.no_grad():  # a shard of fp32 parameters is a view of them
                optimizer.load_state_dict(state["optimizer"])
            _set_adams_steps(optimizer)
        if opt_param_scheduler is not None:
            opt_param_scheduler.load_state_dict(plain["scheduler"])
        if saved.own is not None:
            _restore_rng(saved.view(saved.own))
            _restore_trackers(plain["trackers"])
    return found.step


def save_checkpoint_done(timeout: float | None = None) -> bool:
    """Waits until the last save is committed; False: it was not within `timeout` seconds. Afterwards
    initialize() may be called again, and the client is closed if initialize() opened it."""
    global _easy
    easy = _initialized()
    done = easy.saver.settle(timeout)
    if easy.own:
        easy.client.close()
    _easy = None
    return done


def _initialized() -> _Easy:
    if _easy is None:
        raise InvalidArgument("initialize() was not called")
    return _easy


class _PlainPart(base.LoadCommonStrategy):  # type: ignore[misc, unused-ignore]
    """Gives dist_checkpointing.load() the unsharded state, which it would otherwise read from common.pt."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        pass

    def check_version_compatibility(self, loaded_version: int) -> None:
        pass

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        return self._state

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        raise Unsupported("sharded objects are in Ropeteam")


class _Opened(LoadStrategy):
    """Of a step that is open already."""

    def __init__(self, saved: SavedStep) -> None:
        self._saved = saved

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return _fill(self._saved, sharded_state_dict)


def _load_state(saved: SavedStep, state: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ropeteam-") as directory:
        (pathlib.Path(directory) / _METADATA).write_text(json.dumps(_CONFIG))
        strategies = {"sharded_strategy": _Opened(saved), "common_strategy": _PlainPart(common)}
        loaded = load(state, directory, validate_access_integrity=False, **strategies)
    return dict(loaded)


def _parts(model: Any) -> list[tuple[str, Any]]:
    """The model's parts without their wrappers, by their names in Megatron-LM's checkpoints."""
    parts = list(model) if isinstance(model, (list, tuple)) else [model]
    named = []
    for index, part in enumerate(parts):
        while hasattr(part, "module"):
            part = part.module
        named.append(("model" if len(parts) == 1 else f"model{index}", part))
    return named


def _state(model: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    # Of the distributed optimizer's formats, the one that gathers nothing.
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    state = {name: part.sharded_state_dict(metadata=metadata) for name, part in _parts(model)}
    if optimizer is not None:
        sharded = dict(state) if len(state) > 1 else state
        state["optimizer"] = optimizer.sharded_state_dict(sharded, is_loading=is_loading, metadata=metadata)
    return state


def _set_adams_steps(optimizer: Any) -> None:
    """Corrects the step counters of torch's Adam, which is used if neither Apex nor Transformer Engine is
    installed. The distributed optimizer gives all parameters the same step counter object. It then counts
    once for each of them, and overwrites the loaded value."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner: Any = getattr(each, "optimizer", None)
        for group in getattr(inner, "param_groups", ()):
            for parameter in group["params"] if "step" in group else ():
                state = inner.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = torch.full_like(state["step"], float(group["step"]))


def _tracker_states() -> Mapping[str, Any]:
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    return dict(tracker.get_states()) if torch.cuda.is_available() else {}


def _restore_trackers(states: Mapping[str, Any]) -> None:
    from megatron.core import tensor_parallel

    if states:
        tensor_parallel.get_cuda_rng_tracker().set_states(dict(states))


def _load_by_megatron(
    model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str, strict: bool
) -> int:
    try:
        from megatron.training.checkpointing import load_checkpoint as by_megatron
    except ImportError:
        return 0
    loaded = by_megatron(model, optimizer, opt_param_scheduler, load_arg=load_arg, strict=strict)
    return int(loaded[0] if isinstance(loaded, tuple) else loaded)
