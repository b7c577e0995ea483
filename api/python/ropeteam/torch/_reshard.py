# SPDX-License-Identifier: Apache-2.0
"""Reads a step that another number of ranks saved, or the same number with other parts of the tensors.

A rank first reads the shard of its own number. If something is missing there, it reads the indexes of the
other ranks, one after the other, until it has found everything. No rank waits for another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from .._client import DEFAULT_TIMEOUT, Client, View
from .._errors import InvalidArgument, NotFound
from .._ranges import Range
from .._values import ObjectInfo, object_info
from ._boxes import Copy, boxes, cover, whole
from ._pieces import Held, held
from ._plain import unflatten


#: A rank that has several pieces of one tensor saves them as NAME#0, NAME#1, …
PART = "#"


class SavedStep:
    """A step as read by one rank. A context manager: leaving it closes the views.

    NotFound: there is no such step, or rank."""

    def __init__(
        self, client: Client, step: int, rank: int, timeout: float, world_size: int | None = None
    ) -> None:
        """world_size: the number of ranks that saved it, if known; otherwise the index has it."""
        self.step = step
        self._client = client
        self._timeout = timeout
        self._views: dict[int, View] = {}
        self._infos: dict[int, dict[str, ObjectInfo]] = {}
        self._parts: dict[int, dict[str, list[tuple[str, ObjectInfo]]]] = {}
        self._open = contextlib.ExitStack()
        self.origins: set[str] = set()  # View.origin of the views so far
        self.own: int | None = None
        self.same_world = False
        if world_size is None:
            try:
                world_size = self.view(rank).index().world_size
            except NotFound:
                if rank == 0:
                    raise
                world_size = self.view(0).index().world_size
                if world_size is None or rank < world_size:
                    raise
        #: Version 1 of the index does not have it; then the program must have as many ranks as saved.
        self.world_size = world_size if world_size is not None else client.info().world_size
        self.own = rank if rank < self.world_size else None
        self.same_world = self.own is not None and self.world_size == client.info().world_size
        self._views.clear()  # which were opened before it was known how
        near = rank * self.world_size // max(client.info().world_size, rank + 1)
        others = sorted((r for r in range(self.world_size) if r != rank), key=lambda other: abs(other - near))
        self._ranks = others if self.own is None else [rank, *others]

    def ranks(self) -> Iterator[int]:
        """This rank's number first, then those that most likely have what it needs."""
        return iter(self._ranks)

    def view(self, rank: int) -> View:
        """With the same number of ranks, this rank needs its shard as a whole; otherwise it needs parts of
        others."""
        if rank not in self._views:
            partial = not (self.same_world and rank == self.own)
            view = self._client.view(self.step, rank, self._timeout, partial=partial)
            self._views[rank] = self._open.enter_context(view)
            self.origins.add(view.origin)
        return self._views[rank]

    def infos(self, rank: int) -> Mapping[str, ObjectInfo]:
        """The objects that a rank saved, and those that it had but another rank saved."""
        if rank not in self._infos:
            view = self.view(rank)
            index = view.index().objects
            infos = {name: view.info(name) for name in view}
            infos.update({name: object_info(name, 0, index) for name in index if name not in infos})
            self._infos[rank] = infos
        return self._infos[rank]

    def parts(self, rank: int, name: str) -> list[tuple[str, ObjectInfo]]:
        """A rank's part of a tensor: nothing, the object of this name, or several pieces."""
        if rank not in self._parts:
            parts = self._parts[rank] = {}
            for each, info in self.infos(rank).items():
                whole, separator, number = each.rpartition(PART)
                key = whole if separator and number.isdigit() else each
                parts.setdefault(key, []).append((each, info))
        return self._parts[rank].get(name, [])

    def find(self, name: str) -> int | None:
        """The rank that has an object, this one's number if it does."""
        return next((rank for rank in self._ranks if name in self.infos(rank)), None)

    def tensor(self, name: str, rank: int) -> torch.Tensor:
        """A new tensor with that rank's part."""
        at = self.infos(rank)[name].at
        value = self.view(at[0]).value(at[1]) if at else self.view(rank).value(name)
        assert isinstance(value, torch.Tensor)
        return value

    def tensors(self, prefix: str, rank: int) -> dict[str, torch.Tensor]:
        """The tensors whose names begin with this, by the rest of their names."""
        infos = self.infos(rank)
        return {name[len(prefix) :]: self.tensor(name, rank) for name in infos if name.startswith(prefix)}

    def plain(self, name: str, rank: int) -> Any:
        """Plain state that was saved as JSON and the tensors below its name."""
        return unflatten(json.loads(self.view(rank).read(name)), self.tensors(f"{name}/", rank))

    def __enter__(self) -> SavedStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


class Filling:
    """Tensors to fill from a saved step: planned and checked first, then read."""

    def __init__(self, saved: SavedStep) -> None:
        self._saved = saved
        self._ranges: dict[int, list[Range]] = {}
        self._after: list[Callable[[], object]] = []
        self.bytes = 0  # that are read

    def add(self, name: str, target: Any) -> bool:
        """Plans that `target`, a tensor, DTensor or Piece, gets this rank's part of the tensor `name`.
        Returns False if no rank saved one of that name.

        InvalidArgument: the saved dtype or shape differs. NotFound: the saved parts do not cover all of it.
        """
        want = held(target, name)
        if not want.tensor.is_contiguous() or want.tensor.is_conj() or want.tensor.is_neg():
            fresh = torch.empty(want.tensor.shape, dtype=want.tensor.dtype, device=want.tensor.device)
            self._after.append(functools.partial(want.tensor.copy_, fresh))
            want = dataclasses.replace(want, tensor=fresh)
        left = boxes(want.layout)
        found = False
        for rank in self._saved.ranks():
            for part, info in self._saved.parts(rank, name):
                found = True
                info = self._check(name, info, want, rank)
                shape = info.shape or ()
                copies, left = cover(left, want.tensor.shape, boxes(info.layout or whole(shape)), shape)
                source, source_name = info.at or (rank, part)
                self._plan(want.tensor, source, source_name, copies)
            if found and not left:
                return True
        if found and left:
            raise NotFound(
                f"{name}: no rank of step {self._saved.step} saved what begins at {left[0].start}, "
                f"of size {left[0].size}"
            )
        return found

    def _check(self, name: str, info: ObjectInfo, want: Held, rank: int) -> ObjectInfo:
        target = want.tensor
        dtype = str(target.dtype).split(".", 1)[-1]
        if self._saved.view(rank).index().world_size is None and rank == self._saved.own:
            # Version 1 of the index knows no parts: what lies there is this rank's, as it was.
            if info.kind == "tensor" and info.shape == tuple(target.shape):
                info = ObjectInfo(
                    "tensor", info.length, info.dtype, info.shape, want.global_shape, want.layout
                )
        saved_shape = info.global_shape or info.shape
        if info.kind != "tensor" or (info.dtype, saved_shape) != (dtype, want.global_shape):
            what = f"{info.dtype} of shape {saved_shape}" if info.kind == "tensor" else f"a {info.kind} value"
            raise InvalidArgument(
                f"{name}: saved as {what}, the target is {dtype} of shape {want.global_shape}"
            )
        return info

    def _plan(self, target: torch.Tensor, rank: int, name: str, copies: list[Copy]) -> None:
        if not copies:
            return
        size = target.element_size()
        self.bytes += sum(each.length * each.runs for each in copies) * size
        ranges = self._ranges.setdefault(rank, [])
        for each in copies:
            numbers = (each.source, each.length, each.runs, each.stride, each.target, each.target_stride)
            offset, length, count, stride, to, to_stride = numbers
            ranges.append(
                Range(
                    name,
                    target,
                    offset * size,
                    length * size,
                    count,
                    stride * size,
                    to * size,
                    to_stride * size,
                )
            )

    def read(self) -> None:
        """Corrupt, or another error: the targets are unspecified."""
        for rank, ranges in self._ranges.items():
            self._saved.view(rank).read_ranges(ranges)
        for each in self._after:
            each()


def open_step(client: Client, step: int | None, rank: int | None, timeout: float) -> SavedStep | None:
    """Opens a step for reading; default: the latest, or None if there is none. rank: see SavedStep; default:
    this rank."""
    world_size = None
    if step is None:
        found = client.latest(timeout)
        if found is None:
            return None
        step, world_size = found.step, found.world_size
    return SavedStep(client, step, client.rank if rank is None else rank, timeout, world_size)


def load_tensors(
    client: Client,
    into: Mapping[str, Any],
    *,
    step: int | None = None,
    rank: int | None = None,
    strict: bool = True,
    timeout: float = DEFAULT_TIMEOUT,
) -> int | None:
    """Fills tensors, DTensors or Pieces by name with the bytes saved by save_tensors(), on any number of
    ranks. Returns the step, or None if there is none to load. Only the needed bytes are read.

    step: default: the latest. rank: the rank whose shard is read first. strict: a tensor that no rank saved
    is an error; otherwise it is unchanged. InvalidArgument, NotFound: as load_state(), before anything is
    changed.
    """
    opened = open_step(client, step, rank, timeout)
    if opened is None:
        return None
    with opened as saved:
        filling = Filling(saved)
        missing = [name for name, target in into.items() if not filling.add(name, target)]
        if missing and strict:
            raise InvalidArgument(f"no rank of step {saved.step} saved {', '.join(missing[:5])}")
        filling.read()
    return saved.step
