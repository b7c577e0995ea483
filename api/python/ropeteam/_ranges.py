# SPDX-License-Identifier: Apache-2.0
"""Ranges of objects, and the C API's structs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import InvalidArgument
from ._native import RangeStruct, encode_name, unsigned
from ._values import Memory, target_memory


@dataclass(frozen=True)
class Range:
    """`count` runs of `length` bytes of an object, and their targets.

    Run i goes from byte ``offset + i * stride`` of the object to byte ``target_offset + i * target_stride``
    of `target`, a contiguous tensor or a writable buffer, as raw bytes. So a slice of a matrix's rows is one
    run, and a slice of its columns is one run a row. With more than one run both strides are at least
    `length`."""

    name: str
    target: Any
    offset: int
    length: int
    count: int = 1
    stride: int = 0
    target_offset: int = 0
    target_stride: int = 0


class RangeArray:
    """Ranges in the library's format. Holds their targets' memory during its lifetime.

    InvalidArgument: a run is outside its target, or a number is negative. The library checks the objects."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._memory: dict[int, Memory] = {}  # by the target's id: tensors of many ranges are looked at once
        self.structs = (RangeStruct * len(ranges))(*(self._struct(entry) for entry in ranges))

    def synchronize(self) -> None:
        """Waits for the work that torch has given to the targets' devices so far; the library waits only for
        the default stream."""
        streams = {
            memory.stream.cuda_stream: memory.stream for memory in self._memory.values() if memory.stream
        }
        for stream in streams.values():
            stream.synchronize()

    def __len__(self) -> int:
        return len(self.structs)

    def _struct(self, entry: Range) -> RangeStruct:
        memory = self._memory.get(id(entry.target))
        if memory is None:
            memory = self._memory[id(entry.target)] = target_memory(entry.target, entry.name)[0]
        count = unsigned(entry.count, 64, "count")
        length = unsigned(entry.length, 64, "length") if count else 0  # no runs: in C a count of 0 is 1
        begin = unsigned(entry.target_offset, 64, "target_offset")
        step = unsigned(entry.target_stride, 64, "target_stride")
        end = begin + length + (max(count, 1) - 1) * step
        if end > memory.length:
            raise InvalidArgument(
                f"{entry.name}: the last run ends at byte {end} of its target, which has {memory.length}"
            )
        return RangeStruct(
            name=encode_name(entry.name),
            offset=unsigned(entry.offset, 64, "offset"),
            length=length,
            count=count,
            stride=unsigned(entry.stride, 64, "stride"),
            data=(memory.address + begin) if memory.address is not None and length else None,
            data_stride=step,
        )
