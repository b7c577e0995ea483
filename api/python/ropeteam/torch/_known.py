# SPDX-License-Identifier: Apache-2.0
"""A save with the structure of the previous one: only the addresses of its tensors are new.

A description of 400 tensors takes 8 ms in Python, as long as a copy of 150 MiB, and training waits meanwhile.
So save_tensors() and Client.save() keep the description of the last save, without its tensors. The next save
compares each tensor with its description and reads the address."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from .._native import PART_BACKGROUND, encode_name
from .._save import Contents, Save
from .._values import ObjectInfo, Source, encode_index, is_tensor, plain_tensor
from ._pieces import Piece

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _tensor_of(value: Any, name: str) -> Any:
    """The part of this rank. None: not a tensor."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Piece):
        return plain_tensor(value.tensor, name)
    return plain_tensor(value, name) if is_tensor(value) else None


def _description(value: Any, tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """All of a tensor except its address. None: its bytes cannot be read in place."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    own = (type(value), tensor.dtype, tensor.shape, tensor.device)
    if isinstance(value, Piece):
        return (*own, tuple(value.global_shape), tuple(value.offsets), tuple(value.replicas))
    if type(value) not in _PLAIN and hasattr(value, "placements"):
        return (*own, value.shape, value.placements, value.device_mesh)
    return own


class Known:
    """The structure of a save. It holds no tensor."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        infos: Mapping[str, ObjectInfo],
        tied: Mapping[str, str],
        world_size: int,
    ) -> None:
        """`objects` as the caller gave them, and their descriptions; `tied` has for each tensor the first
        name for the same memory."""
        self._descriptions: dict[str, Any] = {}
        addresses = {}
        for name, value in objects.items():
            tensor = _tensor_of(value, name)
            if tensor is None:
                self._descriptions[name] = infos[name].kind
            else:
                self._descriptions[name] = _description(value, tensor)
                addresses[name] = tensor.data_ptr()
        self._places = len(set(addresses.values()))
        self._tied = [(name, first) for name, first in tied.items() if name != first]
        self._index = encode_index(infos, world_size)
        #: For each object that this rank stores: its length, and the place of its name in the text.
        self._stored: dict[str, tuple[int, int]] = {}
        names: list[bytes] = []
        at = 0
        for name, info in infos.items():
            if info.at is None:
                self._stored[name] = (info.length, at)
                names.append(encode_name(name))
                at += len(names[-1]) + 1
        self._text = ctypes.create_string_buffer(b"\0".join(names))

    def contents(self, objects: Mapping[str, Any]) -> Contents | None:
        """The same objects with their present contents, which must stay until the save's commit. None:
        something else about them is new, or a tensor must be copied before it can be read."""
        if list(objects) != list(self._descriptions):
            return None
        fields = array.array("Q")
        held: list[Any] = []
        lengths: list[int] = []
        addresses: dict[str, int] = {}
        streams: dict[torch.device, int] = {}
        text = ctypes.addressof(self._text)
        for name, value in objects.items():
            held.append(value)  # a mapping may make its values when they are asked for
            tensor = _tensor_of(value, name)
            stream = 0
            if tensor is None:
                source = Source(value, name)
                description: Any = source.info.kind
                memory = source.memory()
                held.append(memory)
                address, length = memory.address or 0, memory.length
            else:
                description = _description(value, tensor)
                address = addresses[name] = tensor.data_ptr()
                length = self._stored.get(name, (0, 0))[0]
                if tensor.is_cuda and length:
                    if tensor.device not in streams:
                        streams[tensor.device] = torch.cuda.current_stream(tensor.device).cuda_stream
                    stream = streams[tensor.device]
            if description is None or description != self._descriptions[name]:
                return None
            if name in self._stored:
                at = text + self._stored[name][1]
                flags = PART_BACKGROUND if tensor is not None and tensor.is_cuda else 0
                fields.extend((at, address if length else 0, length, stream, flags))
                lengths.append(length)
        # The same names are tied, and no others.
        if len(set(addresses.values())) != self._places:
            return None
        if any(addresses[name] != addresses[first] for name, first in self._tied):
            return None

        def put(save: Save) -> None:
            save._put_named(fields)
            save._lent.extend(held)  # memory of a GPU is copied until the commit

        return Contents(put, self._index, lengths)
