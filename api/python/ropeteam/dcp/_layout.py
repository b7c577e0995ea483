# SPDX-License-Identifier: Apache-2.0
"""A rank's files, laid out as FileSystemWriter lays them out."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ._container import Piece, data, exact, length_of, pieces

#: Maps a write item to the object that is written: BytesIO or bytes, or a tensor.
Resolve = Callable[[WriteItem], Any]


class Options(NamedTuple):
    """The fields of FileSystemWriter with the same names."""

    single_file_per_rank: bool
    thread_count: int
    serialization_format: SerializationFormat


@dataclass
class File:
    name: str
    length: int = 0
    parts: list[Piece] = field(default_factory=list)
    #: For each part, the item with its value; None for bytes around values.
    items: list[WriteItem | None] = field(default_factory=list)

    def add(self, added: Iterable[Piece], item: WriteItem | None) -> None:
        for piece in added:
            self.length += length_of(piece)
            self.parts.append(piece)
            self.items.append(item if item and _is_value(piece, item) else None)


def _is_value(piece: Piece, item: WriteItem) -> bool:
    return isinstance(piece, bytes) is bool(item.type == WriteItemType.BYTE_IO)


@dataclass(frozen=True)
class Layout:
    files: list[File]
    results: list[WriteResult]


def lay_out(plan: SavePlan, resolve: Resolve, options: Options, by_size: bool = False) -> Layout:
    """by_size: tensors in the order in which FileSystemWriter copies them from a GPU ahead of writing."""
    if options.single_file_per_rank:
        buckets = filesystem._split_by_size_and_type(options.thread_count, list(plan.items))
    else:
        buckets = [[item] for item in plan.items]
    layout = Layout([], [])
    for number, items in enumerate(buckets):
        file = File(f"{plan.storage_data.prefix}{number}{filesystem.DEFAULT_SUFFIX}")
        tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
        if by_size:
            tensors.sort(key=filesystem._item_size)
        for item in items:
            if item.type == WriteItemType.BYTE_IO:
                value = resolve(item)
                _add(layout, file, item, [value.getvalue() if isinstance(value, io.BytesIO) else value])
        if options.serialization_format == SerializationFormat.SAFETENSORS:
            _add_safetensors(layout, file, tensors, resolve)
        else:
            for item in tensors:
                _add(layout, file, item, pieces(resolve(item)))
        layout.files.append(file)
    return layout


def _result(item: WriteItem, file: File, offset: int, length: int) -> WriteResult:
    return WriteResult(item.index, length, filesystem._StorageInfo(file.name, offset, length))


def _add(layout: Layout, file: File, item: WriteItem, added: Iterable[Piece]) -> None:
    offset = file.length
    file.add(added, item)
    layout.results.append(_result(item, file, offset, file.length - offset))


def _add_safetensors(layout: Layout, file: File, items: list[WriteItem], resolve: Resolve) -> None:
    """The tensors as safetensors.torch.save would write them. FileSystemWriter gives all of them the offset
    at which that begins."""
    from safetensors.torch import save
    from torch.distributed.checkpoint import _hf_utils as names

    tensors: dict[str, torch.Tensor] = {}
    by_name = {item.index.fqn: item for item in items}
    saved_offsets: dict[str, Any] = {}
    for item in items:
        tensor = resolve(item).detach()
        if not tensor.is_contiguous():
            raise ValueError(
                f"{item.index.fqn}: safetensors has no strides: make it contiguous before the save"
            )
        if item.index.fqn in tensors:
            raise ValueError(
                f"{item.index.fqn}: two parts of one tensor on one rank, which safetensors cannot name"
            )
        tensors[item.index.fqn] = tensor
        assert item.tensor_data is not None
        saved_offsets[item.index.fqn] = {"saved_offsets": item.tensor_data.chunk.offsets}
        layout.results.append(_result(item, file, file.length, tensor.nbytes))
    metadata = {
        names.CUSTOM_METADATA_KEY: json.dumps(saved_offsets),
        names.DCP_VERSION_KEY: str(names.HF_DCP_VERSION),
        names.FORMAT_KEY: names.FORMAT_VALUE,
    }
    # The library orders tensors by dtype and name. Empty ones of the same dtypes and names show how.
    empty = save(
        {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}, metadata=metadata
    )
    header = json.loads(empty[8 : 8 + int.from_bytes(empty[:8], "little")])
    ordered = [name for name in header if name != "__metadata__"]
    end = 0
    for name in ordered:
        begin, end = end, end + tensors[name].nbytes
        header[name].update(shape=list(tensors[name].shape), data_offsets=[begin, end])
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.add([len(text).to_bytes(8, "little") + text], None)
    for name in ordered:
        tensor, form = exact(tensors[name].resolve_conj().resolve_neg())
        if form is None:
            raise ValueError(f"{name}: a {type(tensor).__name__}, of which safetensors knows nothing")
        file.add([data(tensor, form)], by_name[name])
