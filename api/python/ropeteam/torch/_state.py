# SPDX-License-Identifier: Apache-2.0
"""A training state's objects: made, saved, loaded. See the package's documentation for their names."""

from __future__ import annotations

import random
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union

import torch
import torch.distributed as dist

from .._client import DEFAULT_TIMEOUT, Client, Level, View
from .._errors import InvalidArgument, NotFound
from .._values import JsonValue, Value, is_tensor
from ._plain import flatten, unflatten

_OPTIMIZER = "optimizer"
_DATA = "data"

#: One, or several by names of the caller's.
Models = Union[torch.nn.Module, Mapping[str, torch.nn.Module]]
Optimizers = Union[torch.optim.Optimizer, Mapping[str, torch.optim.Optimizer]]


def open_distributed(
    socket: str | None = None,
    *,
    group: Any = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> Client:
    """Opens a Client as this process's rank of an initialised process group.

    Rank 0 makes the token that tells this life of the world from every other, and the group broadcasts it: a
    process of an older life that is still running is refused from then on, also when it saves the same
    steps. This broadcast is the only collective of the package; every rank of the group must call. Errors:
    see Client.
    """
    if not dist.is_initialized():
        raise InvalidArgument("torch.distributed is not initialised: call init_process_group() first")
    rank = dist.get_rank(group)
    token = [uuid.uuid4().hex if rank == 0 else None]
    first = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast_object_list(token, src=first, group=group)
    world_size = dist.get_world_size(group)
    return Client(socket, rank=rank, world_size=world_size, life=token[0], timeout=timeout)


def training_state(
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    data: Any = None,
    rng: bool = True,
) -> dict[str, Value]:
    """The objects of a training state, for Client.save(); tensors are the live ones, not copies.

    TypeError: the model's extra state, or an optimizer's state or option, is neither a tensor nor a JSON
    value, or `data` is not plain state.
    """
    model = as_one(model)
    objects: dict[str, Value] = {f"model/{name}": value for name, value in model.state_dict().items()}
    for root, each in _by_root(optimizer).items():
        objects.update(_optimizer_objects(model, each, root))
    if rng:
        objects.update(_rng_objects())
    tensors, objects[_DATA] = flatten(data)
    objects.update({f"{_DATA}/{name}": tensor for name, tensor in tensors.items()})
    return objects


def save_state(
    client: Client,
    step: int,
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    data: Any = None,
    rng: bool = True,
    metadata: Mapping[str, JsonValue] | None = None,
    persist: bool = False,
    wait: Level | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Saves this rank's part of a training state as the shard of `step`; see Client.save() for errors.

    model, optimizer: one, or several by name, {"generator": g, "critic": c}.
    data: plain state of the caller's, e.g. its position in the data: what flatten() takes.
    rng: the random generators too. metadata: the step's, e.g. {"loss": loss.item()}.
    """
    state = training_state(model, optimizer, data=data, rng=rng)
    client.save(step, state, metadata=metadata, persist=persist, wait=wait, timeout=timeout)


@dataclass(frozen=True)
class Loaded:
    """What load_state() found."""

    step: int
    data: Any  # as it was given to save_state()
    metadata: dict[str, Any]  # likewise, by the rank whose shard it is; empty when it gave none


def load_state(
    client: Client,
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    step: int | None = None,
    rank: int | None = None,
    rng: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
) -> Loaded | None:
    """Loads what save_state() saved into a model and optimizer of the same making; None when there is no
    step to load.

    step: the latest when not given. rank: whose shard; this rank's when not given. The model's tensors, and
    those that the optimizer has already, are filled in place; state that it lacks (a fresh one has none) is
    made.

    InvalidArgument: the latest step was saved by a world of another size (of a `step` that is given this is not
    looked at), or dtypes or shapes differ; NotFound: the
    model has a tensor that the shard has not, or the other way round. Both are found before anything is
    changed. After Corrupt or another error on the way the model is partly loaded.
    """
    if step is None:
        found = client.latest(timeout)
        if found is None:
            return None
        world_size = client.info().world_size
        if found.world_size != world_size:
            raise InvalidArgument(
                f"step {found.step} was saved by {found.world_size} ranks, this world has {world_size}"
            )
        step = found.step
    model = as_one(model)
    with client.view(step, rank, timeout) as view:
        targets, values = _model_targets(model, view)
        plans = [_OptimizerPlan(model, each, view, root) for root, each in _by_root(optimizer).items()]
        for plan in plans:
            targets.update(plan.targets)
        view.load(into=targets, names=[])
        if values:
            model.load_state_dict({name: view.value(f"model/{name}") for name in values}, strict=False)
        for plan in plans:
            plan.install(view)
        if rng:
            _restore_rng(view)
        return Loaded(step, _saved_data(view), view.metadata)


def as_one(model: Models) -> torch.nn.Module:
    """Several models as one, whose tensors' names begin with the name of the model that has them, and a dot."""
    return torch.nn.ModuleDict(dict(model)) if isinstance(model, Mapping) else model


def _by_root(optimizer: Optimizers | None) -> dict[str, torch.optim.Optimizer]:
    """Optimizers by the object that has their groups; what begins with its name and a slash is theirs."""
    if isinstance(optimizer, Mapping):
        return {f"{_OPTIMIZER}s/{name}": each for name, each in optimizer.items()}
    return {} if optimizer is None else {_OPTIMIZER: optimizer}


def _saved_data(view: View) -> Any:
    if _DATA not in view:
        return None
    names = [name for name in view if name.startswith(f"{_DATA}/")]
    return unflatten(view.value(_DATA), {name[len(_DATA) + 1 :]: view.value(name) for name in names})


# ---- the model


def _model_targets(model: torch.nn.Module, view: View) -> tuple[dict[str, Any], list[str]]:
    """Tensors to fill in place, and the names of extra state that is no tensor."""
    targets: dict[str, Any] = {}
    values: list[str] = []
    for name, value in model.state_dict().items():
        if is_tensor(value):
            targets[f"model/{name}"] = value
        else:
            values.append(name)
    saved = {name for name in view if name.startswith("model/")}
    wanted = set(targets) | {f"model/{name}" for name in values}
    if saved != wanted:
        raise NotFound(
            f"the shard and the model differ: only saved {sorted(saved - wanted)[:5]}, "
            f"only in the model {sorted(wanted - saved)[:5]}"
        )
    return targets, values


# ---- the optimizer


def _parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[Any, str]:
    """A stable name for every parameter of the optimizer: the model's, else by its place in the groups."""
    known = {parameter: name for name, parameter in model.named_parameters()}
    names: dict[Any, str] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            names[parameter] = known.get(parameter, f"group{group_index}.{index}")
    return names


def _optimizer_objects(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: str
) -> dict[str, Value]:
    names = _parameter_names(model, optimizer)
    objects: dict[str, Value] = {}
    state: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        name = names[parameter]
        state[name] = {}
        for key, value in entries.items():
            if is_tensor(value):
                objects[f"{root}/{name}/{key}"] = value
                state[name][key] = {"sharded": hasattr(value, "to_local"), "device": value.device.type}
            else:
                state[name][key] = {"value": value}
    groups = []
    for group in optimizer.param_groups:
        plain = {key: _plain(value) for key, value in group.items() if key != "params"}
        groups.append({**plain, "params": [names[parameter] for parameter in group["params"]]})
    objects[root] = {"groups": groups, "state": state}
    return objects


def _plain(option: Any) -> Any:
    """An option of a parameter group as JSON; a tensor (a learning rate may be one) as its number."""
    return option.item() if is_tensor(option) else option


class _OptimizerPlan:
    """What loading an optimizer will do: made, and checked, before anything is changed."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, view: View, root: str
    ) -> None:
        self._optimizer, self._root = optimizer, root
        self._parameters = {name: parameter for parameter, name in _parameter_names(model, optimizer).items()}
        self._saved = view.value(root)
        self.targets: dict[str, Any] = {}
        saved_params = [group["params"] for group in self._saved["groups"]]
        own_names = _parameter_names(model, optimizer)
        own_params = [[own_names[p] for p in group["params"]] for group in optimizer.param_groups]
        if saved_params != own_params:
            raise InvalidArgument("the optimizer's parameter groups are not those that were saved")
        for name, entries in self._saved["state"].items():
            present = optimizer.state.get(self._parameters[name], {})
            for key in entries:
                if is_tensor(present.get(key)):
                    self.targets[f"{root}/{name}/{key}"] = present[key]

    def install(self, view: View) -> None:
        for name, entries in self._saved["state"].items():
            parameter = self._parameters[name]
            state = self._optimizer.state[parameter]
            for key, entry in entries.items():
                if "value" in entry:
                    state[key] = entry["value"]
                elif f"{self._root}/{name}/{key}" not in self.targets:
                    local = view.value(f"{self._root}/{name}/{key}")
                    # On the device only what was: a step counter is not.
                    if entry.get("device", "cpu") != "cpu":
                        local = local.to(parameter.device)
                    state[key] = _like(parameter, local) if entry["sharded"] else local
        for group, saved in zip(self._optimizer.param_groups, self._saved["groups"]):
            for key, value in saved.items():
                if key == "params":
                    continue
                if is_tensor(group.get(key)):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value


def _like(parameter: Any, local: torch.Tensor) -> Any:
    """A sharded tensor laid out as the parameter is, of which `local` is this rank's part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


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
    """What was not saved (or has no place here, as numpy's where it is not installed) is left as it is."""
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
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
