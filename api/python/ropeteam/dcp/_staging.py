# SPDX-License-Identifier: Apache-2.0
"""State kept from one asynchronous save for the next: the items that this rank writes.

DCP stages the state first and makes the plan in the background. So at staging time it is unknown which items
this rank writes. A state with the structure of the previous save gives the same plan, unless another rank's
has changed. Then the tensors are put into the arena at once, in the layout of that plan, and the plan that is
made in the background is compared with it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from .._client import Client
from ..torch._pt import pickled
from ._layout import Options

Structure = tuple[tuple[str, Any], ...]

#: A caller that stages without async_save may never report its return.
_HANDOVER_S = 0.1

_SCALARS = (bool, int, float, str, type(None))


class _InArena:
    """A placeholder in the staged state for a value that is already in the arena."""

    def __repr__(self) -> str:
        return "<staged>"


@dataclass(frozen=True)
class State:
    """A state dict as DefaultSavePlanner flattens it."""

    leaves: dict[str, Any]
    paths: dict[str, Any]

    @staticmethod
    def of(state_dict: dict[str, Any]) -> State:
        return State(*flatten_state_dict(state_dict))

    def structure(self) -> Structure | None:
        """Everything that determines the plan; None if that is unknown."""
        described = []
        for name, leaf in self.leaves.items():
            about = _describe(leaf)
            if about is None:
                return None
            described.append((name, about))
        described.append(("", tuple(map(tuple, self.paths.values()))))
        return tuple(described)

    def has(self, structure: Structure) -> bool:
        """Whether this is its structure. It keeps nothing for each tensor: thousands of new tuples would make
        the garbage collector pass over all objects of the program."""
        if len(structure) != len(self.leaves) + 1 or len(structure[-1][1]) != len(self.paths):
            return False
        return all(
            name == known and _describe(leaf) == about
            for (name, leaf), (known, about) in zip(self.leaves.items(), structure)
        ) and all(tuple(path) == known for path, known in zip(self.paths.values(), structure[-1][1]))

    def on_host(self) -> bool:
        tensors = (local_of(leaf) for leaf in self.leaves.values() if isinstance(leaf, torch.Tensor))
        return all(tensor.device.type == "cpu" for tensor in tensors)

    def resolve(self, item: WriteItem) -> Any:
        """Resolves an item of this state like DefaultSavePlanner."""
        leaf = self.leaves[item.index.fqn]
        if item.type == WriteItemType.BYTE_IO:
            return _pickled_scalar(leaf, repr(leaf)) if type(leaf) in _SCALARS else pickled(leaf)
        return local_of(leaf)

    def without_data(self) -> dict[str, Any]:
        """A state dict of the same structure, for which a planner makes the same plan. It holds neither
        tensors' data nor live values."""
        return State({name: _hollow(leaf) for name, leaf in self.leaves.items()}, self.paths).nested()

    def nested(self) -> dict[str, Any]:
        return dict(unflatten_state_dict(self.leaves, self.paths))


@functools.lru_cache(maxsize=4096, typed=True)
def _pickled_scalar(value: Any, text: str) -> bytes:
    """Learning rates and similar values, which are equal in most saves. The text distinguishes 0.0 from
    -0.0."""
    return pickled(value)


def local_of(leaf: Any) -> torch.Tensor:
    """This rank's part of a DTensor, without autograd."""
    return leaf._local_tensor if isinstance(leaf, DTensor) else leaf


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return None if hasattr(leaf, "__create_write_items__") else type(leaf)
    sharding: tuple[Any, ...] = ()
    if isinstance(leaf, DTensor):
        sharding = (leaf.device_mesh, leaf.placements, leaf.shape)
        leaf = local_of(leaf)
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return None
    place = (leaf.untyped_storage().nbytes(), leaf.storage_offset(), leaf.device)
    return (leaf.dtype, leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg(), *place, *sharding)


def _hollow(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        return _dtensor_like(leaf, _hollow(leaf._local_tensor))
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf if type(leaf) in _SCALARS else _InArena()


def stage_in_memory(state: State) -> dict[str, Any]:
    """A copy in ordinary host memory, freed with its last reference. Views of one storage stay views of one
    storage.

    torch's stager copies tensors that are not plain, too. But it fails on DTensors in CPU memory, and loses
    the information that a tensor is a conjugate or negative view."""
    others = {name: leaf for name, leaf in state.leaves.items() if not _is_plain(leaf)}
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        copies = stager.stage(others)
    finally:
        stager.close()
    assert isinstance(copies, dict)
    storages: dict[int, torch.UntypedStorage] = {}
    leaves = {
        name: copies[name] if name in copies else _copy(leaf, storages) for name, leaf in state.leaves.items()
    }
    return State(leaves, state.paths).nested()


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and _describe(leaf) is not None


def _copy(leaf: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(leaf, DTensor):
        return _dtensor_like(leaf, _copy(leaf._local_tensor, storages))
    storage = leaf.untyped_storage()
    copied = storages.get(storage._cdata)
    if copied is None:
        copied = storages[storage._cdata] = torch.UntypedStorage(storage.nbytes()).copy_(
            storage, non_blocking=False
        )
    copy = torch.empty(0, dtype=leaf.dtype).set_(copied, leaf.storage_offset(), leaf.shape, leaf.stride())
    copy = copy.conj() if leaf.is_conj() else copy
    return torch._neg_view(copy) if leaf.is_neg() else copy


def _dtensor_like(leaf: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor(local, leaf._spec, requires_grad=False)


def plan_key(plan: SavePlan) -> tuple[Any, ...]:
    """Two plans of the same key write the same items to the same files."""
    key: list[Any] = [plan.storage_data.prefix]
    for item in plan.items:
        index, tensor = item.index, item.tensor_data
        about: tuple[Any, ...] = (item.type, index.fqn, index.offset, index.index)
        if tensor is not None:
            about += (tensor.size, tensor.chunk.offsets, tensor.chunk.sizes, tensor.properties.dtype)
        key.append(about)
    return tuple(key)


@dataclass
class Known:
    """A plan, and the structure of the state that it was made for."""

    structure: Structure
    plan: SavePlan
    planner: type[SavePlanner]
    options: Options
    #: Made in the background with the plan, or when a state is first put into the arena.
    hollow: dict[str, Any] | None = None  # the state without its data, nested, which DCP only reads
    prepared: Any = None  # a Prepared


class Handover(dict[str, Any]):
    """A staged state that other threads may not use until async_save returns. Otherwise the two would compete
    for the interpreter lock, and training would wait for 5 ms each time."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__(state)
        self._thread = threading.get_ident()
        self._returned = threading.Event()

    def give(self) -> None:
        self._returned.set()

    def items(self) -> Any:
        if threading.get_ident() != self._thread:
            self._returned.wait(_HANDOVER_S)
        return super().items()

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)


@dataclass
class Memory:
    """The state shared by the saves of one Client."""

    known: Known | None = None
    #: The step that this rank saved last, its reported results, and the coordinator that got them.
    reported: tuple[int, list[WriteResult], int] | None = None
    #: As coordinator: the results of the ranks for the last steps.
    results: dict[int, list[list[WriteResult]]] = field(default_factory=dict)


_memories: weakref.WeakKeyDictionary[Client, Memory] = weakref.WeakKeyDictionary()
_memories_lock = threading.Lock()


def memory_of(client: Client) -> Memory:
    with _memories_lock:
        return _memories.setdefault(client, Memory())


def is_default(plan: SavePlan, state: State, given: dict[Any, Any]) -> bool:
    """Whether the planner's objects for the plan's items (`given`, by index) equal those of
    State.resolve()."""
    for item in plan.items:
        if item.index.fqn not in state.leaves:
            return False
        value, own = given[item.index], state.resolve(item)
        if item.type == WriteItemType.BYTE_IO:
            if bytes(value.getbuffer()) != own:
                return False
        elif not _same_tensor(value, own):
            return False
    return True


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and one.data_ptr() == other.data_ptr()
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
    )
