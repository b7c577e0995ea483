# SPDX-License-Identifier: Apache-2.0
"""Save: one shard while it is being saved. _client.py has the Client that begins it."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from . import _native
from ._errors import InvalidArgument
from ._native import Handle, encode_name, library, unsigned
from ._values import (
    INDEX_NAME,
    METADATA_NAME,
    RESERVED_PREFIX,
    JsonValue,
    Memory,
    ObjectInfo,
    Source,
    Value,
    encode_index,
    encode_metadata,
)

_NAMED_PART_FIELDS = 5  # numbers in a ropeteam_named_part_t: the name's address and the part's four


class Save:
    """One shard while it is being saved. A context manager: leaving it commits, leaving it by an exception
    aborts.

    Two threads must not use it at the same time.
    """

    def __init__(self, step: int, world_size: int, handle: Handle) -> None:
        self.step = step
        self._world_size = world_size
        self._handle: Handle | None = handle
        self._settled = False  # committed or aborted, or an attempt failed: only close() is left for the C handle
        self._infos: dict[str, ObjectInfo] = {}
        self._index: bytes | None = None  # the index object, if the caller has encoded it
        self._reserved: list[memoryview] = []
        self._lent: list[Any] = []  # the owners of CUDA memory that is being copied until the commit

    def put(self, name: str, value: Value, *, background: bool = False) -> None:
        """Copies a tensor, buffer or JSON value into the shard; after the return the caller may reuse it. See
        Client.save().

        background: a CUDA tensor is copied while the program continues, after the work that torch's current
        stream has at this call. It must not be changed before commit() has returned."""
        source = Source(value, name)
        self._put_sources(name, [source], source.info, background)

    def put_parts(self, name: str, parts: Sequence[Value], *, background: bool = False) -> None:
        """Copies tensors and buffers into the shard as one object of plain bytes, one after the other without
        gaps. Use it for a file whose layout the program makes itself, from pieces in place.

        Each part is copied once, straight into the arena; it may be empty. A tensor gives its elements' bytes
        in row order. A tensor that is not contiguous is first copied into a contiguous one, which is kept
        until this call returns. TypeError: a part is a JSON value; encode it first. InvalidArgument, NoSpace:
        as put(), and the save is unchanged.

        background: as put(), for the CUDA tensors among the parts."""
        sources = [Source(part, f"part {index} of {name}") for index, part in enumerate(parts)]
        for index, source in enumerate(sources):
            if source.info.kind == "json":
                kind = type(parts[index]).__name__
                raise TypeError(f"part {index} of {name} is a {kind}: a tensor or a buffer is needed")
        length = sum(source.info.length for source in sources)
        self._put_sources(name, sources, ObjectInfo(kind="bytes", length=length), background)

    def append(self, value: Value) -> None:
        """Appends the bytes of a tensor or buffer to the last object, which must come from put() with a
        buffer or from put_parts(). Use it if the length is not known in advance. NoSpace: the object is
        unchanged."""
        source = Source(value, "what is appended")
        name = next(reversed(self._infos), None)
        if source.info.kind == "json" or name is None or self._infos[name].kind != "bytes":
            raise InvalidArgument(f"append of a {type(value).__name__} to {name!r}: both must be plain bytes")
        lib = library()
        memory = source.memory()
        if memory.stream is not None:
            memory.stream.synchronize()
        lib.check(lib.save_append(self._use().pointer, memory.address, memory.length))
        self._infos[name] = ObjectInfo(kind="bytes", length=self._infos[name].length + memory.length)

    def reserve(self, name: str, length: int) -> memoryview:
        """Reserves `length` bytes of the arena, 64-byte aligned. Fill them in place before the commit, which
        computes their checksums.

        The view must not be used after the commit, abort or close: it is released then. Drop objects made
        from it (torch.frombuffer, numpy.frombuffer) before that."""
        self._check_name(name)
        lib = library()
        handle = self._use()
        pointer = ctypes.c_void_p()
        number = unsigned(length, 64, "length")
        lib.check(lib.save_reserve(handle.pointer, encode_name(name), number, ctypes.byref(pointer)))
        self._infos[name] = ObjectInfo(kind="bytes", length=length)
        if length == 0:
            return memoryview(bytearray())
        assert pointer.value is not None
        array = (ctypes.c_ubyte * length).from_address(pointer.value)
        array._ropeteam_handle = handle  # type: ignore[attr-defined]
        view = memoryview(array).cast("B")
        self._reserved.append(view)
        return view

    def put_metadata(self, metadata: Mapping[str, JsonValue]) -> None:
        """Gives the step's metadata, once; see Client.save()."""
        self._put(METADATA_NAME, encode_metadata(metadata))

    def commit(self) -> None:
        """Seals the shard: on return it is LOCAL. After any error the save is aborted."""
        handle = self._use()
        try:
            index = encode_index(self._infos, self._world_size) if self._index is None else self._index
            if index is not None:
                self._put(INDEX_NAME, index)
            self._release()
            self._settled = True
            lib = library()
            lib.check(lib.save_commit(handle.pointer))
        finally:
            self.close()

    def abort(self) -> None:
        """Discards the save and frees its memory."""
        handle = self._use()
        self._settled = True
        try:
            self._release()
            lib = library()
            lib.check(lib.save_abort(handle.pointer))
        finally:
            self.close()

    def close(self) -> None:
        """Aborts if neither committed nor aborted. Closing twice is allowed."""
        self._release()
        lent, self._lent = self._lent, []  # until the end of this call: the library makes no copies after it
        handle, self._handle = self._handle, None
        if handle is not None and not self._settled:
            # Aborted here and not when the handle is freed, because reserved memory that is still referenced
            # would delay that. The status does not matter: the save has ended in any case.
            self._settled = True
            library().save_abort(handle.pointer)
        del lent

    @property
    def closed(self) -> bool:
        """Whether it was committed, aborted or closed."""
        return self._handle is None

    def __enter__(self) -> Save:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.closed:
            return
        if kind is None:
            self.commit()
        else:
            self.close()

    def _use(self) -> Handle:
        handle = self._handle
        if handle is None:
            raise InvalidArgument(
                f"the save of step {self.step} is over: it was committed, aborted or closed"
            )
        return handle

    def _check_name(self, name: str) -> None:
        if isinstance(name, str) and is_own(name):
            raise InvalidArgument(
                f"name {name!r}: {METADATA_NAME!r}, and names that begin with {RESERVED_PREFIX!r}, are "
                "reserved for the package"
            )

    def _put_sources(self, name: str, sources: Sequence[Source], info: ObjectInfo, background: bool) -> None:
        self._check_name(name)
        self._use()
        if info.at is not None:
            self._infos[name] = info
            return
        memories = [source.memory() for source in sources]  # held until the library has read them
        fields = array.array("Q")
        for memory in memories:
            fields.extend(self._part(memory, background))
        self._put_fields(name, fields, info)

    def _part(self, memory: Memory, background: bool) -> tuple[int, int, int, int]:
        """The numbers of a ropeteam_part_t. Memory copied in the background is held until the end."""
        stream, flags = 0, 0
        # A temporary copy is freed at return: many of them at once could fill the device.
        if memory.stream is not None and background and not memory.temporary:
            stream, flags = memory.stream.cuda_stream, _native.PART_BACKGROUND
            self._lent.append(memory)
        elif memory.stream is not None:
            memory.stream.synchronize()  # the library waits only for torch's default stream
        return memory.address or 0, memory.length, stream, flags

    def _put_many(self, sources: Mapping[str, Source]) -> None:
        """put(background=True) of each. After an error the save has ended."""
        pending: list[tuple[str, Memory]] = []
        for name, source in sources.items():
            self._check_name(name)
            if source.info.at is None:
                memory = source.memory()
                pending.append((name, memory))
                if memory.temporary:  # only one at a time is in memory
                    self._put_pending(pending)
            self._infos[name] = source.info
        self._put_pending(pending)

    def _put_pending(self, pending: list[tuple[str, Memory]]) -> None:
        names = [encode_name(name) for name, _ in pending]
        text = ctypes.create_string_buffer(b"\0".join(names))
        address = ctypes.addressof(text)
        fields = array.array("Q")
        for name, (_, memory) in zip(names, pending):
            fields.extend((address, *self._part(memory, background=True)))
            address += len(name) + 1
        self._put_named(fields)
        pending.clear()

    def _put_named(self, fields: array.array[int]) -> None:
        """Objects in the library's format, five numbers each. The caller holds their memory and that of the
        names; memory copied in the background until the commit."""
        lib = library()
        handle = self._use()
        count = len(fields) // _NAMED_PART_FIELDS
        if count:
            objects = (_native.NamedPart * count).from_buffer(fields)
            lib.check(lib.save_put_many(handle.pointer, objects, count))

    def _put_fields(self, name: str, fields: array.array[int], info: ObjectInfo) -> None:
        """The object's parts in the library's format, four numbers each. The caller holds the memory."""
        lib = library()
        handle = self._use()
        count = len(fields) // 4
        parts = (_native.Part * count).from_buffer(fields)
        lib.check(lib.save_put_parts(handle.pointer, encode_name(name), parts, count))
        self._infos[name] = info

    def _put(self, name: str, value: bytes) -> None:
        lib = library()
        handle = self._use()
        lib.check(lib.save_put(handle.pointer, encode_name(name), value, len(value)))

    def _release(self) -> None:
        reserved, self._reserved = self._reserved, []
        for view in reserved:
            try:
                view.release()
            except BufferError:
                pass  # an object made from it still exists: reserve() says that the caller must drop it


@dataclass(frozen=True)
class Contents:
    """The objects of a complete save."""

    put: Callable[[Save], None]  # puts all of them
    index: bytes | None  # the index object
    lengths: Sequence[int]  # of the objects that are stored


def is_own(name: str) -> bool:
    return name == METADATA_NAME or name.startswith(RESERVED_PREFIX)
