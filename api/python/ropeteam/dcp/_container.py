# SPDX-License-Identifier: Apache-2.0
"""The bytes that torch.save would write for a tensor, as pieces: the tensor's own memory between two short
strings.

torch.save writes a zip file. Its first record pickles the tensor's dtype, shape and strides, one record is
the storage, and the directory of the zip follows. So the bytes before and after the data depend only on the
tensor's form. They are made once per form, with torch.serialization.skip_data, from a tensor whose memory is
not accessed. The zip's CRC32 of the data is then 0, and its serialization id differs; torch.load checks
neither.
"""

from __future__ import annotations

import functools
import io
from typing import Any, NamedTuple, Union

import torch

from ..torch._pt import pickled

#: A piece of a file: bytes, or a one-dimensional uint8 tensor over existing memory.
Piece = Union[bytes, torch.Tensor]


class Form(NamedTuple):
    """The properties of a tensor that determine its container."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements from the start of the storage to the tensor
    length: int  # bytes of the storage
    conj: bool = False
    neg: bool = False


class Container(NamedTuple):
    """A torch.save file: head, `length` bytes of data, tail."""

    head: bytes
    length: int
    tail: bytes


class _Capture(io.RawIOBase):
    """Collects what torch.save writes before and after the data, which it seeks over."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.tail = bytearray()
        self.skipped = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        (self.tail if self.skipped else self.head).extend(view)
        return len(view)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.skipped = offset
        return 0


@functools.lru_cache(maxsize=1 << 16)
def container(form: Form) -> Container:
    """The bytes that torch.save writes around a CPU tensor of this form. The first time takes 0.2 ms."""
    storage = torch.UntypedStorage(form.length)  # neither read nor written, so it takes no memory
    tensor = torch.empty(0, dtype=form.dtype).set_(storage, form.offset, form.shape, form.stride)
    if form.conj:
        tensor = tensor.conj()
    if form.neg:
        tensor = torch._neg_view(tensor)
    capture = _Capture()
    with torch.serialization.skip_data():
        torch.save(tensor, capture)
    return Container(bytes(capture.head), form.length, bytes(capture.tail))


def contiguous_form(dtype: torch.dtype, shape: tuple[int, ...]) -> Form:
    """The form of a new tensor of this dtype and shape."""
    strides, elements = [], 1
    for size in reversed(shape):
        strides.append(elements)
        elements *= max(size, 1)
    length = 0 if 0 in shape else elements * dtype.itemsize
    return Form(dtype, tuple(shape), tuple(reversed(strides)), 0, length)


def _plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
    )


def form_of(tensor: torch.Tensor) -> Form | None:
    """The form of the CPU tensor that is written for a plain tensor. None: the tensor must be cloned first.

    If a tensor is part of a larger storage, the rest of the storage is not written. If its elements have no
    gaps, a clone would have the same strides and the same bytes, so none is made."""
    conj, neg = tensor.is_conj(), tensor.is_neg()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        shape, stride = tuple(tensor.shape), tensor.stride()
        return Form(tensor.dtype, shape, stride, int(tensor.storage_offset()), tensor.nbytes, conj, neg)
    if conj or neg:
        return None
    if tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return Form(tensor.dtype, tuple(tensor.shape), tensor.stride(), 0, tensor.nbytes)
    return None


def exact(tensor: torch.Tensor) -> tuple[torch.Tensor, Form | None]:
    """A detached tensor, cloned if it cannot be written in place, and its form. None: only torch.save itself
    can write the tensor, for example a subclass's."""
    tensor = tensor.detach()
    if hasattr(tensor, "wait"):  # a collective is still running
        tensor = tensor.wait()
    if not _plain(tensor):
        return tensor, None
    form = form_of(tensor)
    if form is None:
        tensor = tensor.clone()
        form = form_of(tensor)
    return tensor, form


def data(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    """The memory that `form` describes, as uint8."""
    begin = (int(tensor.storage_offset()) - form.offset) * tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), begin, (form.length,), (1,))


def pieces(tensor: torch.Tensor) -> list[Piece]:
    """The tensor that torch.save would write after .detach().cpu(), without the rest of its storage."""
    tensor, form = exact(tensor)
    if form is None:
        tensor = tensor.cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        return [pickled(tensor)]
    box = container(form)
    return [box.head, data(tensor, form), box.tail]


def length_of(piece: Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.numel()
