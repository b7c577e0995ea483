# SPDX-License-Identifier: Apache-2.0
"""StorageReader: reads byte ranges of a step's files for torch.distributed.checkpoint."""

from __future__ import annotations

import io
import itertools
import json
import pathlib
import pickle
import re
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from .._client import DEFAULT_TIMEOUT, Client, StepInfo, View
from .._errors import Corrupt, NotFound, RopeteamError, Unsupported
from .._ranges import Range
from ..torch._pt import load_pt, pickled
from ..torch._unpickle import loads
from ._container import container, contiguous_form
from ._writer import METADATA, NOTE, NOTE_VERSION, CheckpointId, StorageWriter, as_step

_LOCAL_METADATA = re.compile(r"__(\d+)\.metadata")
_FILE_OF_RANK = re.compile(r"__(\d+)_\d+\.")

#: A box with more runs than this is read whole.
_RANGES_MAX = 4096

#: What a pickle of DCP's metadata may use.
_METADATA_TABLE: dict[str, Any] = {
    f"{each.__module__}.{each.__qualname__}": each
    for each in (
        dcp_metadata.BytesStorageMetadata,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.Metadata,
        dcp_metadata.MetadataIndex,
        dcp_metadata.StorageMeta,
        dcp_metadata.TensorProperties,
        dcp_metadata.TensorStorageMetadata,
        dcp_metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        OrderedDict,
        pathlib.PosixPath,
        torch.Size,
        torch.serialization._get_layout,
    )
}
_METADATA_TABLE.update({str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)})
#: The end of an error about something else.
_TRUST = "StorageReader(…, unsafe_pickle=True) loads it, and runs any code that the checkpoint brings"


def latest(client: Client, timeout: float = DEFAULT_TIMEOUT) -> StepInfo | None:
    """The newest committed step if StorageWriter saved it, else the newest such step on storage; None if
    there is none. As in Client.latest(), every rank of one incarnation gets the same answer until it has
    completed a step."""
    found = client.latest(timeout)
    if found is None or _has_metadata(client, found.step, timeout):
        return found
    try:
        stored = client.storage_steps(timeout=timeout)
    except Unsupported:
        return None  # no storage
    for entry in stored:
        if not entry.problem and entry.step != found.step and _has_metadata(client, entry.step, timeout):
            return StepInfo(entry.step, entry.incarnation, entry.world_size)
    return None


def _has_metadata(client: Client, step: int, timeout: float) -> bool:
    try:
        view = client.view(step, 0, timeout, partial=True)  # only its names are needed
    except NotFound:
        return False  # a step on storage; this job cannot have a shard of it
    with view:
        return METADATA in view or NOTE in view or any(map(_LOCAL_METADATA.fullmatch, view.names()))


@dataclass
class _Item:
    """A read item in progress."""

    request: ReadItem
    name: str  # of the file
    offset: int
    length: int
    head: bytearray  # read first: all of a value, or the bytes before a tensor's data
    expected: bytes | None = None  # the head if contiguous tensor data follow it
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


class StorageReader(dcp_storage.StorageReader):  # type: ignore[misc]
    """Loads a step that StorageWriter saved, by ``dcp.load(state, storage_reader=StorageReader(rope))``.

    The world may have another size, and the state other shardings. From each rank's shard only the byte
    ranges that this rank's state needs are read, straight into the state's tensors. A tensor that was saved
    with strides, or is loaded as another dtype, goes through a temporary one.

    step: default: latest(). ``checkpoint_id=step`` of dcp.load is the same.
    timeout: seconds, for each read.

    unsafe_pickle: unpickle .metadata and values that are not tensors as torch's reader does. Then a
    checkpoint can run code here. False: .metadata may have only DCP's own classes, and values only what
    torch.load accepts with weights_only=True, with numpy's plain arrays and scalars.

    dcp.load raises the errors. NotFound: there is no such step, or StorageWriter did not save it. Corrupt: no
    copy has good bytes. Unsupported: a class is not allowed. Anything loaded before an error stays loaded.
    """

    def __init__(
        self,
        client: Client,
        step: CheckpointId | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        unsafe_pickle: bool = False,
    ) -> None:
        super().__init__()
        self._unsafe = unsafe_pickle
        self._client = client
        self._step = None if step is None else as_step(step)
        self._timeout = timeout
        self._load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._ranks: dict[int, int] = {}  # Ropeteam's rank for each DCP rank, if they differ

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        if checkpoint_id is not None:
            self._step = as_step(checkpoint_id)
        self._load_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        return str(self._step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return StorageWriter.validate_checkpoint_id(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The step's metadata. If the ranks saved without collectives, each wrote its own: then all of them
        together, this rank's first; with ``rank`` only that rank's."""
        if self._step is None:
            found = latest(self._client, self._timeout)
            if found is None:
                raise NotFound("no step has been saved by torch.distributed.checkpoint")
            self._step = found.step
        rank = kwargs.get("rank")
        metadata = self._global_metadata() if rank is None else _merge(self._local_metadata([rank]))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_rank: dict[int, list[_Item]] = {}
        for request in plan.items:
            item = self._item(request)
            by_rank.setdefault(self._rank_of(item.name), []).append(item)
        for rank, items in by_rank.items():
            with self._view(rank) as view:
                _read(view, items, planner, self._unsafe)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # ---- where things are

    def _view(self, rank: int) -> View:
        assert self._step is not None
        # From another rank's shard only the needed bytes are read; this rank's own is read whole, as its
        # copy.
        partial = rank != self._client.rank
        return self._client.view(self._step, rank, self._timeout, partial=partial)

    def _global_metadata(self) -> Metadata:
        """This rank's shard is read first: several groups of ranks may each have saved a checkpoint."""
        names: list[str] = []
        for rank in dict.fromkeys((self._client.rank, 0)):
            try:
                view = self._view(rank)
            except NotFound:
                if rank == 0:
                    raise
                continue  # a smaller world saved the step
            with view:
                if METADATA in view or NOTE in view:
                    return self._coordinators(view)
                if any(map(_LOCAL_METADATA.fullmatch, view.names())):
                    return _merge(self._local_metadata(itertools.count()))
                names = view.names()
        raise NotFound(
            f"step {self._step} was not saved by torch.distributed.checkpoint: rank 0's shard has no "
            f"{METADATA}, but {names[:5]}"
        )

    def _coordinators(self, view: View) -> Metadata:
        note: dict[str, Any] = {"version": NOTE_VERSION, "coordinator": view.rank}
        if NOTE in view:
            note = json.loads(view.read(NOTE))
        if note["version"] != NOTE_VERSION:
            raise Unsupported(f"{NOTE} has version {note['version']}, this package reads {NOTE_VERSION}")
        if note["coordinator"] != view.rank:
            with self._view(note["coordinator"]) as other:
                return self._coordinators(other)
        self._ranks = dict(enumerate(note.get("ranks", [])))
        return _unpickle(view, METADATA, self._unsafe)

    def _local_metadata(self, wanted: Iterable[int]) -> list[Metadata]:
        """The metadata of these DCP ranks, as far as they exist; this rank's own first."""
        found: dict[int, Metadata] = {}
        ranks = set(wanted) if isinstance(wanted, Sequence) else None
        for rope_rank in itertools.count():
            try:
                view = self._view(rope_rank)
            except NotFound:
                break
            with view:
                for match in filter(None, map(_LOCAL_METADATA.fullmatch, view.names())):
                    if ranks is None or int(match[1]) in ranks:
                        self._ranks[int(match[1])] = rope_rank
                        found[rope_rank] = _unpickle(view, match[0], self._unsafe)
        if not found:
            raise NotFound(f"step {self._step} has no metadata of ranks of their own")
        return [found[rank] for rank in sorted(found, key=lambda rank: (rank != self._client.rank, rank))]

    def _rank_of(self, name: str) -> int:
        match = _FILE_OF_RANK.match(name)
        if match is None:
            raise Corrupt(f"step {self._step}: {name} is not the name of a rank's file")
        return self._ranks.get(int(match[1]), int(match[1]))

    def _item(self, request: ReadItem) -> _Item:
        assert self._metadata is not None
        index = request.storage_index
        info = self._metadata.storage_data[index]
        if getattr(info, "transform_descriptors", None):
            raise Unsupported(f"{index.fqn}: saved with extensions {info.transform_descriptors}")
        item = _Item(request, info.relative_path, info.offset, info.length, bytearray())
        if request.type == LoadItemType.BYTE_IO:
            item.head = bytearray(info.length)
            return item
        saved = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        item.dtype = saved.properties.dtype
        item.shape = tuple(_chunk(saved, index).sizes)
        box = container(contiguous_form(item.dtype, item.shape))
        if info.length == len(box.head) + box.length + len(box.tail):
            item.expected = box.head
            item.head = bytearray(len(box.head))
        return item


def _chunk(saved: TensorStorageMetadata, index: MetadataIndex) -> Any:
    hint = index.index
    if hint is not None and hint < len(saved.chunks) and saved.chunks[hint].offsets == index.offset:
        return saved.chunks[hint]
    return next(chunk for chunk in saved.chunks if chunk.offsets == index.offset)


def _unpickle(view: View, name: str, unsafe: bool) -> Metadata:
    where = f"step {view.step}, rank {view.rank}: {name}"
    encoded = view.read(name)
    try:
        metadata = pickle.loads(encoded) if unsafe else loads(encoded, _METADATA_TABLE, _TRUST)
    except MemoryError:
        raise
    except RopeteamError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:  # pickle may raise anything
        raise Corrupt(f"{where} is not DCP's metadata: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise Corrupt(f"{where} is a {type(metadata).__name__}, not DCP's metadata")
    return metadata


def _merge(metadatas: list[Metadata]) -> Metadata:
    """Merges the metadata of ranks that saved without collectives. For entries of several ranks, the first
    one counts."""
    merged = Metadata({}, planner_data={}, storage_data={}, storage_meta=metadatas[0].storage_meta)
    for metadata in metadatas:
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                merged.state_dict_metadata.setdefault(name, entry)
                continue
            known = merged.state_dict_metadata.setdefault(name, replace(entry, chunks=[]))
            if isinstance(known, TensorStorageMetadata):
                known.chunks += [
                    c for c in entry.chunks if MetadataIndex(name, c.offsets) not in merged.storage_data
                ]
        merged.storage_data = {**metadata.storage_data, **merged.storage_data}
        merged.planner_data = {**(metadata.planner_data or {}), **merged.planner_data}
    return merged


# ---- reading


def _read(view: View, items: list[_Item], planner: LoadPlanner, unsafe: bool) -> None:
    view.read_ranges(
        [Range(item.name, item.head, item.offset, len(item.head)) for item in items if item.head]
    )
    ranges: list[Range] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    tensors: list[tuple[ReadItem, torch.Tensor]] = []
    for item in items:
        request = item.request
        if request.type == LoadItemType.BYTE_IO:
            planner.load_bytes(request, io.BytesIO(item.head if unsafe else _checked(view, item)))
            continue
        target = planner.resolve_tensor(request).detach()
        if target.size() != request.lengths:
            raise AssertionError(
                f"req {request.storage_index} mismatch sizes {target.size()} vs {request.lengths}"
            )
        tensors.append((request, target))
        if item.expected is None or item.head != item.expected:
            copies.append((target, _by_torch(view, item)))
            continue
        begin = item.offset + len(item.head)
        found = _ranges(item, begin, target) if target.dtype == item.dtype else None
        if found is None:
            own = torch.empty(tuple(request.lengths), dtype=item.dtype)
            found = _ranges(item, begin, own)
            copies.append((target, own))
            if found is None:
                own = copies[-1] = (target, _whole(view, item, begin))
                found = []
        ranges += found
    view.read_ranges(ranges)
    for target, source in copies:
        target.copy_(source)
    for request, target in tensors:
        planner.commit_tensor(request, target)


def _checked(view: View, item: _Item) -> bytes:
    """DCP's planner unpickles anything. So the value is loaded here, and the planner gets it pickled again."""
    return pickled(_load(view, item, memoryview(item.head)))


def _load(view: View, item: _Item, file: memoryview) -> Any:
    try:
        return load_pt(file, ("_io.BytesIO",), "cpu", _TRUST)
    except (Unsupported, Corrupt) as error:
        name = item.request.storage_index.fqn
        raise type(error)(f"step {view.step}, rank {view.rank}: {name}: {error}") from error


def _by_torch(view: View, item: _Item) -> torch.Tensor:
    """The box of a tensor that was not saved contiguous, or by another version of torch, or as
    safetensors."""
    elements = 1
    for size in item.shape:
        elements *= size
    assert item.dtype is not None
    if item.length == elements * item.dtype.itemsize and view.read(item.name, item.offset, 2) != b"PK":
        return _box(_from_safetensors(view, item), item.request)
    tensor = _load(view, item, memoryview(view.read(item.name, item.offset, item.length)))
    if not isinstance(tensor, torch.Tensor):
        raise Corrupt(f"{item.request.storage_index.fqn} is a {type(tensor).__name__}, not a tensor")
    return _box(tensor, item.request)


def _from_safetensors(view: View, item: _Item) -> torch.Tensor:
    header_bytes = int.from_bytes(view.read(item.name, item.offset, 8), "little")
    header = json.loads(view.read(item.name, item.offset + 8, header_bytes))
    begin = header[item.request.storage_index.fqn]["data_offsets"][0]
    return _whole(view, item, item.offset + 8 + header_bytes + begin)


def _whole(view: View, item: _Item, begin: int) -> torch.Tensor:
    tensor = torch.empty(item.shape, dtype=item.dtype)
    view.read_into(item.name, tensor, begin)
    return tensor


def _box(tensor: torch.Tensor, request: ReadItem) -> torch.Tensor:
    return narrow_tensor_by_index(tensor, request.storage_offsets, request.lengths)


def _ranges(item: _Item, begin: int, target: torch.Tensor) -> list[Range] | None:
    """The box of a contiguous tensor, whose data begin at `begin` of its file, as ranges into the target.
    None: it cannot go straight into the target's memory, or has too many ranges."""
    if (
        target.is_conj()
        or target.is_neg()
        or target.layout is not torch.strided
        or type(target) is not torch.Tensor
    ):
        return None
    if target.device.type != "cpu" and not target.is_contiguous():
        return None
    width = target.element_size()
    strides = contiguous_form(target.dtype, item.shape).stride
    begin += width * sum(offset * stride for offset, stride in zip(item.request.storage_offsets, strides))
    if target.numel() == 0:
        return []
    # From the innermost dimension on: dimensions without gaps on both sides form one run.
    run = width
    outer: list[tuple[int, int, int]] = []
    for size, stride, own in reversed(list(zip(target.shape, strides, target.stride()))):
        if size == 1:
            continue
        if not outer and stride * width == own * width == run:
            run *= size
        else:
            outer.append((size, stride * width, own * width))
    count, stride, own_stride = outer.pop(0) if outer else (1, 0, 0)
    if count > 1 and own_stride < run:
        return None
    repeats = 1
    for size, _, _ in outer:
        repeats *= size
    if repeats > _RANGES_MAX:
        return None
    last = sum((size - 1) * own for size, own in zip(target.shape, target.stride())) * width
    memory = torch.empty(0, dtype=torch.uint8, device=target.device)
    memory.set_(target.untyped_storage(), int(target.storage_offset()) * width, (last + width,), (1,))
    result = []
    for at in itertools.product(*(range(size) for size, _, _ in outer)):
        source = begin + sum(i * step for i, (_, step, _) in zip(at, outer))
        place = sum(i * step for i, (_, _, step) in zip(at, outer))
        result.append(Range(item.name, memory, source, run, count, stride, place, own_stride))
    return result
