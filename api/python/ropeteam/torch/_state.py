# SPDX-License-Identifier: Apache-2.0
"""A training state's objects: made, saved, loaded. The package's documentation has their names."""

from __future__ import annotations

import random
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

import torch
import torch.distributed as dist

from .._client import DEFAULT_TIMEOUT, Client, Level, View
from .._errors import InvalidArgument
from .._values import JsonValue, Value, is_tensor
from ._optimizer import OptimizerPlan, optimizer_objects, parameter_names
from ._pieces import held
from ._plain import check_numpy_position, flatten
from ._replicas import save_tensors
from ._reshard import Filling, SavedStep, open_step

_OPTIMIZER = "optimizer"
_DATA = "data"

#: One, or several by names that the caller chooses.
Models = Union[torch.nn.Module, Mapping[str, torch.nn.Module]]
Optimizers = Union[torch.optim.Optimizer, Mapping[str, torch.optim.Optimizer]]


def open_distributed(
    socket: str | None = None,
    *,
    group: Any = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Client:
    """Opens a Client as this process's rank of an initialised process group.

    Rank 0 makes the token of this incarnation, and the group broadcasts it. From then on a process of an
    older incarnation that is still running is refused, even if it saves the same steps. The broadcast is a
    collective: every rank of the group must call. Errors: see Client.
    """
    if not dist.is_initialized():
        raise InvalidArgument("torch.distributed is not initialised: call init_process_group() first")
    rank = dist.get_rank(group)
    token = [uuid.uuid4().hex if rank == 0 else None]
    first = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast_object_list(token, src=first, group=group)
    world_size = dist.get_world_size(group)
    client = Client(socket, rank=rank, world_size=world_size, incarnation_token=token[0], timeout=timeout)
    client._group_ranks = dist.get_process_group_ranks(group) if group is not None else range(world_size)
    return client


def training_state(
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    data: Any = None,
    rng: bool = True,
) -> dict[str, Value]:
    """The objects of a training state, for Client.save(); tensors are the live ones, not copies.

    TypeError: the model's extra state, an optimizer's state or option, or `data` is not plain state, as
    flatten() defines it.
    """
    model = as_one(model)
    objects: dict[str, Value] = {}
    for name, value in model.state_dict().items():
        _add(objects, f"model/{name}", value)
    for root, each in _by_root(optimizer).items():
        objects.update(optimizer_objects(model, each, root))
    if rng:
        objects.update(_rng_objects())
    _add(objects, _DATA, data, plain=True)
    return objects


def _add(objects: dict[str, Value], name: str, value: Any, plain: bool = False) -> None:
    """A tensor as it is; anything else as plain state: JSON, and its tensors below its name."""
    if is_tensor(value) and not plain:
        objects[name] = value
        return
    tensors, objects[name] = flatten(value)
    objects.update({f"{name}/{inner}": tensor for inner, tensor in tensors.items()})


def save_state(
    client: Client,
    step: int,
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    data: Any = None,
    rng: bool = True,
    files: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, JsonValue] | None = None,
    persist: bool = False,
    wait: Level | None = None,
    replicas: Any = "auto",
    verify: str = "first",
    timeout: float = DEFAULT_TIMEOUT,
) -> int:
    """Saves this rank's part of a training state as the shard of `step`. Errors and return value: see
    Client.save().

    model, optimizer: one, or several by name, {"generator": g, "critic": c}.
    data: the caller's plain state, e.g. its position in the data; see flatten().
    rng: also the random generators. metadata: the step's, e.g. {"loss": loss.item()}.
    files: small files of this rank by name; one rank is enough. `ropeteam export --format hf` writes those
    below "hf/": {"hf/config.json": b"…"}. On storage *.json objects are also files.
    replicas: of the parameters that several ranks have, and their optimizer state, each is saved by one of
    these ranks. "auto" uses DistributedDataParallel and DTensors to find them. A process group states that
    its ranks have the same parameters. With "all" each rank saves all of its own. Buffers are always each
    rank's own.
    verify: when to compare what the ranks have. "first": at the first save, and whenever the set of saved
    objects has changed. "every": at each save, a pass over the memory. "never". After a difference, a warning
    is logged, and each rank saves all of its own from then on; docs/pytorch.md has the rest.
    """
    state = {**training_state(model, optimizer, data=data, rng=rng), **(files or {})}
    options = {"metadata": metadata, "persist": persist, "wait": wait, "timeout": timeout}
    known = _replicated(model, optimizer, None if isinstance(replicas, str) else replicas)
    return save_tensors(client, step, state, replicas=replicas, verify=verify, replicated=known, **options)


def _replicated(model: Models, optimizer: Optimizers | None, group: Any) -> dict[str, Sequence[int]]:
    """For each tensor of a training state without this information: the ranks that have the same.

    These are the ranks of DistributedDataParallel's group, or of the group that the caller gives. A parameter
    without a placement, among others that all have one on the same mesh, is on all ranks of that mesh: tensor
    parallelism leaves unsplit parameters like that. A parameter's optimizer state is where the parameter is.
    Buffers are not included: BatchNorm's differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    who: dict[Any, Sequence[int]] = {}
    told: set[Any] = set()  # parameters that are replicated as a whole, also those with a placement
    for each in model.values() if isinstance(model, Mapping) else [model]:
        parameters = list(_unwrapped(each).parameters())
        ranks = _group_ranks(each, group)
        meshes = {parameter.device_mesh for parameter in parameters if hasattr(parameter, "placements")}
        leftover = meshes.pop().mesh.flatten().tolist() if len(meshes) == 1 else ()
        for parameter in parameters:
            sharded = hasattr(parameter, "placements")
            who[parameter] = ranks or (held(parameter, "parameter").replicas if sharded else leftover)
        told.update(parameters if ranks else ())

    def known_of(parameter: Any, value: Any) -> Sequence[int]:
        """Nothing of what tells it itself."""
        itself = not is_tensor(value) or (hasattr(value, "placements") and parameter not in told)
        return () if itself else who.get(parameter, ())

    whole = as_one(model)
    named = whole.named_parameters(remove_duplicate=False)
    known = {f"model/{name}": known_of(parameter, parameter) for name, parameter in named}
    for root, one in _by_root(optimizer).items():
        for parameter, name in parameter_names(whole, one).items():
            entries = one.state.get(parameter, {})
            known.update({f"{root}/{name}/{key}": known_of(parameter, v) for key, v in entries.items()})
    return {name: ranks for name, ranks in known.items() if ranks}


def _group_ranks(model: Any, group: Any) -> Sequence[int]:
    """The ranks of DistributedDataParallel's group, or of the given one."""
    while group is None and isinstance(model, torch.nn.Module):
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            group = model.process_group
        model = getattr(model, "_orig_mod", None)
    return () if group is None else dist.get_process_group_ranks(group)


@dataclass(frozen=True)
class Loaded:
    """The result of load_state()."""

    step: int
    data: Any  # as given to save_state()
    metadata: dict[str, Any]  # of the rank whose shard was read; empty if it gave none
    missing: tuple[str, ...] = ()  # with strict=False: state that was not saved, and is unchanged
    unexpected: tuple[str, ...] = ()  # with strict=False: state that was saved and has no place here
    # Of the tensors that were read: how much, and where they were (View.origin). Two loads of one state may differ in it.
    bytes: int = field(default=0, compare=False)
    origins: frozenset[str] = field(default=frozenset(), compare=False)


def load_state(
    client: Client,
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    step: int | None = None,
    rank: int | None = None,
    rng: bool = True,
    strict: bool | str = True,
    timeout: float = DEFAULT_TIMEOUT,
) -> Loaded | None:
    """Loads what save_state() saved into a model and optimizer; None if there is no step to load.

    The number of ranks, the meshes and the placements may differ from those of the save: each rank finds its
    part of every tensor by name, and reads only the bytes that it needs. The model's tensors, and existing
    ones of the optimizer, are filled in place; missing state (a new optimizer has none) is created. Data,
    random generators and plain state are those of the rank with this number. If fewer ranks saved, data and
    plain state are another rank's, and the generators are unchanged.

    step: default: the latest. rank: the rank whose state to load; default: this rank. strict: whether it is
    an error if state is missing, or was saved and has no place here. "missing": only the former is an error,
    for ranks with a part of the model each (pipeline stages) of a step that was saved whole.

    InvalidArgument: dtypes, shapes or the optimizer's groups differ, or the model has a tensor that no rank
    saved, or the reverse. This is detected before anything is changed. After Corrupt or another error during
    the load, the model is partly loaded. NotFound: there is no such step, or a rank's shard of it is lost.
    """
    model = as_one(model)
    opened = open_step(client, step, rank, timeout)
    if opened is None:
        return None
    with opened as saved:
        filling = Filling(saved)
        missing, unexpected, values = _plan_model(model, saved, filling)
        plans = [
            OptimizerPlan(model, each, saved, filling, root, missing)
            for root, each in _by_root(optimizer).items()
        ]
        if (missing and strict) or (unexpected and strict is True):
            raise InvalidArgument(_difference(saved.step, unexpected, missing))
        filling.read()
        if values:
            model.load_state_dict(
                {name: saved.plain(f"model/{name}", owner) for name, owner in values.items()}, strict=False
            )
        for plan in plans:
            plan.install()
        if rng and saved.own is not None:
            _restore_rng(saved.view(saved.own))
        owner = saved.find(_DATA)
        first = saved.view(next(saved.ranks()))
        data = None if owner is None else saved.plain(_DATA, owner)
        found = (tuple(missing), tuple(unexpected), filling.bytes, frozenset(saved.origins))
        return Loaded(saved.step, data, first.metadata, *found)


def _difference(step: int, unexpected: Sequence[str], missing: Sequence[str]) -> str:
    sides = [
        f"only in {where}: {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        for where, names in (("the step", unexpected), ("the model", missing))
        if names
    ]
    return f"step {step} was saved by another model; {'; '.join(sides)}"


def as_one(model: Models) -> torch.nn.Module:
    """Several models as one. The names of its tensors begin with the name of their model and a dot."""
    if isinstance(model, Mapping):
        return torch.nn.ModuleDict({name: _unwrapped(each) for name, each in model.items()})
    return _unwrapped(model)


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Without the wrappers of DistributedDataParallel and torch.compile, so that names do not depend on
    them."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


def _by_root(optimizer: Optimizers | None) -> dict[str, torch.optim.Optimizer]:
    """Optimizers by the object that has their groups. Their other objects begin with its name and a slash."""
    if isinstance(optimizer, Mapping):
        return {f"{_OPTIMIZER}s/{name}": each for name, each in optimizer.items()}
    return {} if optimizer is None else {_OPTIMIZER: optimizer}


# ---- the model


def _plan_model(
    model: torch.nn.Module, saved: SavedStep, filling: Filling
) -> tuple[list[str], list[str], dict[str, int]]:
    """The state that no rank saved, the saved state that has no place in the model, and the ranks that have
    the state that is not tensors."""
    missing: list[str] = []
    values: dict[str, int] = {}
    state = model.state_dict()
    for name, value in state.items():
        owner = None if is_tensor(value) else saved.find(f"model/{name}")
        if owner is not None:
            values[name] = owner
        elif not is_tensor(value) or not filling.add(f"model/{name}", value):
            missing.append(f"model/{name}")
    return missing, _unexpected(state, saved), values


def _unexpected(state: Mapping[str, Any], saved: SavedStep) -> list[str]:
    """Saved state of a model that has no place in this one.

    If another number of ranks saved, each may have had a part of the model (pipeline stages). So if not all
    saving ranks have the same names, nothing is unexpected.
    """
    plain = tuple(f"model/{name}/" for name, value in state.items() if not is_tensor(value))

    def names(rank: int) -> set[str]:
        return {
            name for name in saved.infos(rank) if name.startswith("model/") and not name.startswith(plain)
        }

    first, *others = saved.ranks()
    extra = names(first) - {f"model/{name}" for name in state}
    if extra and not saved.same_world and any(names(rank) != names(first) for rank in others):
        return []
    return sorted(extra)


# ---- random generators


def _rng_objects() -> dict[str, Value]:
    objects: dict[str, Value] = {"rng/cpu": torch.get_rng_state(), "rng/python": random.getstate()}
    if torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            objects[f"rng/cuda/{index}"] = state
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        objects["rng/numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(gauss)]
    return objects


def _restore_rng(view: View) -> None:
    """State that was not saved, or has no place here (numpy's if it is not installed), is unchanged."""
    if "rng/cpu" in view:
        torch.set_rng_state(view.value("rng/cpu"))
    if "rng/python" in view:
        version, internal, gauss = view.value("rng/python")
        random.setstate((version, tuple(internal), gauss))
    for index in range(torch.cuda.device_count()):
        if f"rng/cuda/{index}" in view:
            torch.cuda.set_rng_state(view.value(f"rng/cuda/{index}"), index)
    if "rng/numpy" in view:
        try:
            import numpy
        except ImportError:
            return
        kind, keys, position, has_gauss, gauss = view.value("rng/numpy")
        check_numpy_position({"bit_generator": kind, "state": {"pos": position}})
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
