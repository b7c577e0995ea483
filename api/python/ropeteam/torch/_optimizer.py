# SPDX-License-Identifier: Apache-2.0
"""An optimizer's state as objects by its parameters' names, and back. The package's documentation has the
names."""

from __future__ import annotations

from typing import Any

import torch

from .._errors import InvalidArgument, Unsupported
from .._values import Value, is_tensor
from ._plain import flatten, unflatten
from ._reshard import Filling, SavedStep


def parameter_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[Any, str]:
    """A stable name for every parameter of the optimizer: the model's, or else its place in the groups."""
    known = {parameter: name for name, parameter in model.named_parameters()}
    names: dict[Any, str] = {}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            names[parameter] = known.get(parameter, f"group{group_index}.{index}")
    return names


def optimizer_objects(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, root: str
) -> dict[str, Value]:
    names = parameter_names(model, optimizer)
    objects: dict[str, Value] = {}
    state: dict[str, dict[str, Any]] = {}
    for parameter, entries in optimizer.state.items():
        name = names[parameter]
        state[name] = {}
        for key, value in entries.items():
            if is_tensor(value):
                objects[f"{root}/{name}/{key}"] = value
                state[name][key] = {"device": value.device.type}
                continue
            tensors, state[name][key] = _flat(value, f"{root}/{name}/{key}")
            objects.update(tensors)
    groups = []
    for group in optimizer.param_groups:
        options = {key: _number(value) for key, value in group.items() if key != "params"}
        skeleton = _flat(options, root)[1]["value"]
        groups.append({"options": skeleton, "params": [names[parameter] for parameter in group["params"]]})
    objects[root] = {"groups": groups, "state": state}
    return objects


def _flat(value: Any, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Plain state, and the tensors in it, which are saved separately because they belong to no single
    parameter."""
    tensors, skeleton = flatten(value)
    if any(hasattr(tensor, "to_local") for tensor in tensors.values()):
        raise TypeError(f"{name}: a {type(value).__name__} with DTensors in it cannot be saved")
    return {f"{name}/{inner}": tensor for inner, tensor in tensors.items()}, {"value": skeleton}


def _number(option: Any) -> Any:
    """An option of a parameter group; a tensor (a learning rate may be one) as its number."""
    return option.item() if is_tensor(option) else option


class OptimizerPlan:
    """The plan for loading an optimizer: made and checked before anything is changed."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        saved: SavedStep,
        filling: Filling,
        root: str,
        missing: list[str],
    ) -> None:
        """State that no rank saved is added to `missing`. InvalidArgument: the groups differ from the saved
        ones."""
        self._optimizer, self._saved, self._root = optimizer, saved, root
        self._names = parameter_names(model, optimizer)
        self._parameters = {name: parameter for parameter, name in self._names.items()}
        self._options: dict[int, Any] = {}  # of the groups, by their place
        self._state: dict[str, tuple[int, dict[str, Any]]] = {}  # by parameter: rank and entry
        self._made: dict[tuple[Any, str], Any] = {}
        placed = self._read_heads()
        groups = enumerate(optimizer.param_groups)
        places = {self._names[parameter]: index for index, group in groups for parameter in group["params"]}
        absent = [name for name in places if name not in placed]
        missing += [f"{root}/{name}" for name in absent]
        wrong = [name for name, index in places.items() if placed.get(name, index) != index]
        if saved.same_world and not absent:
            wrong += [name for name in placed if name not in places]
        if wrong:
            raise InvalidArgument(
                f"the optimizer's parameter groups are not those that were saved: {wrong[:5]}"
            )
        for name, (_, entries) in self._state.items():
            for key, entry in entries.items():
                if "value" not in entry and not filling.add(
                    f"{root}/{name}/{key}", self._target(name, key, entry)
                ):
                    missing.append(f"{root}/{name}/{key}")

    def _read_heads(self) -> dict[str, int]:
        """The group of each saved parameter. It reads as many ranks as needed to cover every parameter
        here."""
        placed: dict[str, int] = {}
        wanted = set(self._parameters)
        for rank in self._saved.ranks():
            if self._root not in self._saved.infos(rank):
                continue
            head = self._saved.view(rank).value(self._root)
            for index, group in enumerate(head["groups"]):
                params = group.pop("params")
                self._options.setdefault(index, group)
                placed.update({name: index for name in params if name not in placed})
            for name, entries in head["state"].items():
                if name in wanted:
                    self._state.setdefault(name, (rank, entries))
            if wanted <= set(placed):
                break
        return placed

    def _target(self, name: str, key: str, entry: dict[str, Any]) -> Any:
        parameter, full = self._parameters[name], f"{self._root}/{name}/{key}"
        present = self._optimizer.state.get(parameter, {}).get(key)
        if is_tensor(present):
            return present
        owner = self._saved.find(full)
        if owner is None:
            raise InvalidArgument(f"{full}: no rank of step {self._saved.step} has it")
        info = self._saved.infos(owner)[full]
        dtype = getattr(torch, info.dtype or "", None)
        if not isinstance(dtype, torch.dtype):
            raise Unsupported(f"{full}: this torch ({torch.__version__}) has no dtype {info.dtype}")
        # Only state that was on the device is put there: a step counter was not.
        device = "cpu" if entry.get("device", "cpu") == "cpu" else parameter.device
        shape = info.global_shape or info.shape or ()
        sharded = hasattr(parameter, "placements")
        if sharded and (shape == tuple(parameter.shape) or entry.get("sharded")):
            made = _like(parameter, torch.empty_like(parameter.to_local(), dtype=dtype, device=device))
        elif sharded and info.layout is not None:
            raise Unsupported(
                f"{full}: a part of a tensor of shape {shape}; its parameter's is {tuple(parameter.shape)}"
            )
        else:
            made = torch.empty(shape, dtype=dtype, device=device)
        self._made[parameter, key] = made
        return made

    def install(self) -> None:
        for (parameter, key), made in self._made.items():
            self._optimizer.state[parameter][key] = made
        for name, (rank, entries) in self._state.items():
            for key, entry in entries.items():
                if "value" in entry:
                    tensors = self._saved.tensors(f"{self._root}/{name}/{key}/", rank)
                    self._optimizer.state[self._parameters[name]][key] = unflatten(entry["value"], tensors)
        for index, group in enumerate(self._optimizer.param_groups):
            saved = self._options.get(index, {})
            for key, value in unflatten(saved.get("options", saved), {}).items():
                if is_tensor(group.get(key)):
                    group[key].fill_(value)
                else:
                    group[key] = value


def _like(parameter: Any, local: torch.Tensor) -> Any:
    """A sharded tensor with the layout of the parameter; `local` is this rank's part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
