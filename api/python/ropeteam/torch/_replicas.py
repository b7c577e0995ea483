# SPDX-License-Identifier: Apache-2.0
"""Which part of a tensor this rank has, and which other ranks have the same: read off placements, without
asking anybody."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .._client import Client
from .._errors import InvalidArgument, Unsupported
from .._values import Part, Value, is_tensor, plain_tensor
from ._boxes import Layout, box_layout, layout_shape, shard, whole


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor whose sharding is not a DTensor's: save_tensors() takes it, load_tensors()
    fills it.

    tensor: this rank's part, which begins at `offsets` of a tensor of `global_shape`. replicas: the ranks
    that have the same bytes, as the Client counts ranks, this one among them. Empty: none is known,
        and every rank saves its own.
    """

    tensor: torch.Tensor
    global_shape: Sequence[int]
    offsets: Sequence[int]
    replicas: Sequence[int] = ()


@dataclass(frozen=True)
class Held:
    """What this rank has of a tensor."""

    tensor: torch.Tensor  # its own memory; of a DTensor the local tensor
    global_shape: tuple[int, ...]
    layout: Layout
    replicas: tuple[
        int, ...
    ] = ()  # ranks that have the same: torch.distributed's of a DTensor, a Client's of a Piece

    @property
    def is_whole(self) -> bool:
        return self.layout == whole(self.global_shape)


def held(value: Any, name: str) -> Held:
    """Unsupported: a tensor without bytes here, or a DTensor that is laid out in a way that is not known
    here."""
    if isinstance(value, Piece):
        local = plain_tensor(value.tensor, name)
        outside = any(
            not 0 <= offset <= offset + size <= total
            for offset, size, total in zip(value.offsets, local.shape, value.global_shape)
        )
        if not local.dim() == len(value.global_shape) == len(value.offsets) or outside:
            raise InvalidArgument(
                f"{name}: a piece of shape {tuple(local.shape)} at {tuple(value.offsets)} lies outside a "
                f"tensor of shape {tuple(value.global_shape)}"
            )
        layout = box_layout(value.offsets, local.shape)
        return Held(local, tuple(value.global_shape), layout, tuple(sorted(value.replicas)))
    local = plain_tensor(value, name)
    if not hasattr(value, "placements"):
        return Held(local, tuple(local.shape), whole(local.shape))
    shape, placements = tuple(value.shape), tuple(value.placements)
    found, replicas = _of_dtensor(shape, value.device_mesh, placements, dist.get_rank())
    if found is None:  # this rank is not of the mesh, and has nothing
        return Held(local, tuple(local.shape), whole(local.shape))
    if layout_shape(found) != tuple(local.shape):
        raise Unsupported(
            f"{name}: a DTensor of {shape} and {placements} has {tuple(local.shape)} here, "
            f"not {layout_shape(found)}"
        )
    return Held(local, shape, found, replicas)


@functools.lru_cache(maxsize=65536)
def _of_dtensor(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], rank: int
) -> tuple[Layout | None, tuple[int, ...]]:
    """This rank's part, and the ranks that have the same. The order of splitting is DTensor's own, mesh
    dimension by mesh dimension (torch.distributed.tensor._utils.compute_local_shape_and_global_offset)."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None, ()
    layout = list(whole(shape))
    same: list[Any] = []
    for size, place, placement in zip(mesh.shape, coordinate, placements):
        if placement.is_partial():
            raise Unsupported(
                f"a DTensor with {placement}: its value is not reduced yet; redistribute it first"
            )
        if placement.is_replicate():
            same.append(slice(None))
        else:
            layout[placement.dim] = shard(
                layout[placement.dim], size, place, int(getattr(placement, "split_factor", 1))
            )
            same.append(place)
    return tuple(layout), tuple(sorted(mesh.mesh[tuple(same)].flatten().tolist()))


def parts(objects: Mapping[str, Value | Piece], rank: int) -> dict[str, Value]:
    """Objects with what the index is to say of their tensors. Of tied tensors, which are the same memory, the
    first has the bytes."""
    made: dict[str, Value] = {}
    names: dict[Any, str] = {}
    for name, value in objects.items():
        if not is_tensor(value) and not isinstance(value, Piece):
            made[name] = value
            continue
        has = held(value, name)
        tensor = has.tensor
        same: Any = name
        if tensor.numel():
            bits = (tensor.is_conj(), tensor.is_neg())
            same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), bits)
        first = names.setdefault(same, name)
        layout = None if has.is_whole else has.layout
        shape = None if has.is_whole else has.global_shape
        made[name] = Part(tensor, shape, layout, None if first == name else (rank, first))
    return made


def save_tensors(client: Client, step: int, objects: Mapping[str, Value | Piece], **options: Any) -> None:
    """Client.save() that takes Pieces too, and notes of Pieces and DTensors which part of the whole they are,
    so that load_tensors() finds them on any number of ranks. options: Client.save()'s."""
    client.save(step, parts(objects, client.rank), **options)
