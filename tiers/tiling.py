"""Whether boxes make up a tensor: together all of it, and no element twice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Box = tuple[Sequence[int], Sequence[int]]
"""Offset and shape."""
MAX_CUTS = 8
"""Cuts within cuts that are followed. Those of a mesh are two or three deep, and what a file says may be anything."""


def tiles(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Tell whether the boxes tile a tensor of this shape.

    Only those tilings are recognised that come of cutting through, again and again: a mesh gives no others. The cost
    is that of a few sorts.
    """
    if not boxes or any(len(offset) != len(shape) or len(size) != len(shape) for offset, size in boxes):
        return False
    if 0 in shape:
        return all(math.prod(size) == 0 for _, size in boxes)
    return _tiles([0] * len(shape), list(shape), boxes, MAX_CUTS)


def _tiles(begin: list[int], shape: list[int], boxes: Sequence[Box], cuts: int) -> bool:
    if len(boxes) == 1:
        return list(boxes[0][0]) == begin and list(boxes[0][1]) == shape
    if cuts == 0:
        return False
    for dim in range(len(shape)):
        parts = list(_cut_through(boxes, dim))
        if len(parts) == 1:
            continue
        position = begin[dim]
        for first, last, inside in parts:
            if first != position or last <= first:
                return False
            where, size = [*begin], [*shape]
            where[dim], size[dim] = first, last - first
            if not _tiles(where, size, inside, cuts - 1):
                return False
            position = last
        return position == begin[dim] + shape[dim]
    return False


def _cut_through(boxes: Sequence[Box], dim: int) -> Iterator[tuple[int, int, list[Box]]]:
    """Divide the boxes where a cut through all of them along one dimension meets none: begin, end, boxes between."""
    inside: list[Box] = []
    first, last = 0, -1
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        begin, end = box[0][dim], box[0][dim] + box[1][dim]
        if inside and begin >= last:
            yield first, last, inside
            inside = []
        first, last = (begin, end) if not inside else (first, max(last, end))
        inside.append(box)
    yield first, last, inside
