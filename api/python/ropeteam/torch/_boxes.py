# SPDX-License-Identifier: Apache-2.0
"""Which part of a tensor a rank has, and how one part is copied out of another. Integers only, no torch.

A part is a product of one set of indexes for each dimension: `Layout`. A set is written as contiguous runs,
[(start, length), …], in the order in which the part has them. It is nearly always one run; a _StridedShard of
an uneven dimension can have several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Runs = tuple[tuple[int, int], ...]
Layout = tuple[Runs, ...]


class Box(NamedTuple):
    """A contiguous range in every dimension."""

    start: tuple[int, ...]  # in the whole tensor
    size: tuple[int, ...]
    at: tuple[int, ...]  # in the part


class Copy(NamedTuple):
    """`runs` runs of `length` elements; run i goes from `source + i * stride` to `target + i *
    target_stride`."""

    source: int
    target: int
    length: int
    runs: int
    stride: int
    target_stride: int


def whole(shape: Sequence[int]) -> Layout:
    return tuple(((0, size),) for size in shape)


def box_layout(offset: Sequence[int], shape: Sequence[int]) -> Layout:
    return tuple(((start, size),) for start, size in zip(offset, shape))


def layout_shape(layout: Layout) -> tuple[int, ...]:
    return tuple(sum(length for _, length in runs) for runs in layout)


def shard(runs: Runs, parts: int, index: int, split_factor: int = 1) -> Runs:
    """The share of torch.distributed.tensor for place `index` of `parts` in a dimension. For Shard it is
    torch.chunk's part; for _StridedShard the same of each of `split_factor` chunks, one after the other."""
    taken: list[tuple[int, int]] = []
    count = sum(length for _, length in runs)
    outer = -(-count // split_factor)
    for begin in range(0, count, outer) if outer else ():
        inner = -(-min(outer, count - begin) // parts)
        end = min(begin + outer, count)
        taken += _take(runs, min(begin + index * inner, end), min(begin + (index + 1) * inner, end))
    joined: list[tuple[int, int]] = []
    for start, length in taken:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return tuple(joined) or ((runs[0][0] if runs else 0, 0),)


def _take(runs: Runs, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The indexes at the places [begin, end) of the runs."""
    for start, length in runs:
        first, last = max(begin, 0), min(end, length)
        if first < last:
            yield start + first, last - first
        begin, end = begin - length, end - length


def boxes(layout: Layout) -> list[Box]:
    """A layout as boxes; none of them is empty."""
    dimensions = []
    for runs in layout:
        ends = itertools.accumulate(length for _, length in runs)
        dimensions.append(
            [(start, length, end - length) for (start, length), end in zip(runs, ends) if length]
        )
    return [
        Box(tuple(each[0] for each in one), tuple(each[1] for each in one), tuple(each[2] for each in one))
        for one in itertools.product(*dimensions)
    ]


def cover(
    wanted: Iterable[Box], target_shape: Sequence[int], source: Iterable[Box], source_shape: Sequence[int]
) -> tuple[list[Copy], list[Box]]:
    """How to copy what is wanted out of a source, as far as the source has it, and what is still missing."""
    left = list(wanted)
    copies: list[Copy] = []
    for have in source:
        next_left: list[Box] = []
        for want in left:
            common = _intersection(want, have)
            if common is None:
                next_left.append(want)
                continue
            at = tuple(h + c - s for h, c, s in zip(have.at, common.start, have.start))
            copies += _copies(common, target_shape, at, source_shape)
            next_left += _without(want, common)
        left = next_left
        if not left:
            break
    return copies, left


def _intersection(want: Box, have: Box) -> Box | None:
    start = tuple(map(max, want.start, have.start))
    size = tuple(
        min(w + ws, h + hs) - s
        for w, ws, h, hs, s in zip(want.start, want.size, have.start, have.size, start)
    )
    if any(each <= 0 for each in size):
        return None
    return Box(start, size, tuple(a + s - w for a, s, w in zip(want.at, start, want.start)))


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """The rest of a box around a hole in it, as boxes that do not overlap. For each dimension in turn: the
    parts before and after the hole, restricted to the hole in the dimensions already done."""
    start, size, at = list(box.start), list(box.size), list(box.at)
    for d in range(len(start)):
        before = hole.start[d] - start[d]
        behind = start[d] + size[d] - hole.start[d] - hole.size[d]
        for length, skip in ((before, 0), (behind, before + hole.size[d])):
            if length > 0:
                moved = (tuple(v[:d] + [v[d] + skip] + v[d + 1 :]) for v in (start, at))
                yield Box(next(moved), tuple(size[:d] + [length] + size[d + 1 :]), next(moved))
        start[d], size[d], at[d] = hole.start[d], hole.size[d], at[d] + before


def _copies(
    box: Box, target_shape: Sequence[int], at: Sequence[int], source_shape: Sequence[int]
) -> Iterator[Copy]:
    """A box that is at `box.at` in the target and at `at` in the source, both row-major."""
    inner = len(
        box.size
    )  # from here on every dimension is whole on both sides, so that rows follow each other
    while inner and box.size[inner - 1] == target_shape[inner - 1] == source_shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # and of this one a part
    from_strides, to_strides = _strides(source_shape), _strides(target_shape)
    length = math.prod(box.size[inner:])
    outer = max(inner - 1, 0)
    count, stride, target_stride = 1, 0, 0
    if inner:
        count, stride, target_stride = box.size[outer], from_strides[outer], to_strides[outer]
    for place in itertools.product(*map(range, box.size[:outer])):
        steps = (*place, *(0 for _ in range(len(box.size) - outer)))
        source = sum((a + p) * s for a, p, s in zip(at, steps, from_strides))
        target = sum((a + p) * s for a, p, s in zip(box.at, steps, to_strides))
        yield Copy(source, target, length, count, stride, target_stride)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]
