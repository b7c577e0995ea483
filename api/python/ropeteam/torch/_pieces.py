# SPDX-License-Identifier: Apache-2.0
"""Which part of a tensor this rank has, and which other ranks have the same. Computed from placements,
without communication."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .._errors import InvalidArgument, Unsupported
from .._values import plain_tensor
from ._boxes import Layout, box_layout, layout_shape, shard, whole


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor whose sharding is not a DTensor's: save_tensors() takes it, load_tensors()
    fills it.

    tensor: this rank's part, which begins at `offsets` of a tensor of `global_shape`. replicas: the Client's
    ranks that have the same bytes, this one among them. Empty: none is known, and every rank saves its own.
    """

    tensor: torch.Tensor
    global_shape: Sequence[int]
    offsets: Sequence[int]
    replicas: Sequence[int] = ()


@dataclass(frozen=True)
class Held:
    """This rank's part of a tensor."""

    tensor: torch.Tensor  # its own memory; of a DTensor the local tensor
    global_shape: tuple[int, ...]
    part: Layout | None = None  # None: the whole
    #: Ranks that have the same: torch.distributed's of a DTensor, a Client's of a Piece.
    replicas: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        return whole(self.global_shape) if self.part is None else self.part


def held(value: Any, name: str) -> Held:
    """Unsupported: a tensor without bytes here, or a DTensor with an unknown layout."""
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
        layout = None if local.shape == tuple(value.global_shape) else box_layout(value.offsets, local.shape)
        return Held(local, tuple(value.global_shape), layout, tuple(sorted(value.replicas)))
    local = plain_tensor(value, name)
    if not hasattr(value, "placements"):
        return Held(local, tuple(local.shape))
    shape, placements = tuple(value.shape), tuple(value.placements)
    found, replicas = _of_dtensor(shape, value.device_mesh, placements, dist.get_rank())
    if replicas and (shape if found is None else layout_shape(found)) != tuple(local.shape):
        raise Unsupported(
            f"{name}: a DTensor of {shape} and {placements} has {tuple(local.shape)} here, "
            f"which its layout {found} does not give"
        )
    return Held(local, shape, found, replicas)


@functools.lru_cache(maxsize=65536)
def _of_dtensor(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], rank: int
) -> tuple[Layout | None, tuple[int, ...]]:
    """This rank's part, None for the whole, and the ranks that have the same part. The order of splitting is
    that of DTensor, one mesh dimension after the other
    (torch.distributed.tensor._utils.compute_local_shape_and_global_offset). A rank outside the mesh has an
    empty part, and no other rank has the same."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tuple(((0, 0),) for _ in shape), ()
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
    part = None if tuple(layout) == whole(shape) else tuple(layout)
    return part, tuple(sorted(mesh.mesh[tuple(same)].flatten().tolist()))
