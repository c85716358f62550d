"""Boxes: the parts into which ranks cut a tensor, each an offset and a shape with one number per dimension."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

Box = tuple[Sequence[int], Sequence[int]]
"""Offset and shape."""
MAX_CUT = 4
"""Dimensions in which one tensor may be cut. The time to check a tiling doubles with each."""
_Spans = tuple[tuple[int, int], ...]


def inside(whole: Sequence[int], box: Box) -> bool:
    """Tell whether a box lies in a tensor of shape `whole`."""
    offset, shape = box
    return len(offset) == len(shape) == len(whole) and all(
        begin >= 0 and size >= 0 and begin + size <= length
        for begin, size, length in zip(offset, shape, whole, strict=True)
    )


def tile(whole: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Tell whether `boxes`, at least one, make up a tensor of shape `whole`: each element lies in exactly one of them.

    Takes time in proportion to the number of boxes, a few times that where bands are cut differently. Raises
    ValueError for a tensor that is cut in more than MAX_CUT dimensions.
    """
    if not boxes or not all(inside(whole, box) for box in boxes):
        return False
    filled = [box for box in boxes if all(box[1])]
    if sum(math.prod(shape) for _, shape in filled) != math.prod(whole):
        return False
    cut = [d for d, length in enumerate(whole) if any(shape[d] != length for _, shape in filled)]
    if len(cut) > MAX_CUT:
        raise ValueError(f"it is cut in {len(cut)} dimensions, at most {MAX_CUT} are read")
    signed = Counter(tuple((offset[d], offset[d] + shape[d]) for d in cut) for offset, shape in filled)
    if filled:
        signed[tuple((0, whole[d]) for d in cut)] -= 1
    return _cancel(signed)


def _cancel(signed: Mapping[_Spans, int]) -> bool:
    """Tell whether boxes, each counted so many times, add up to nothing at every point.

    Along the first dimension the sum changes only where a box begins or ends; so it is zero everywhere if and only if
    at each of these places the changes, which are boxes of one dimension less, add up to nothing.
    """
    left = {spans: count for spans, count in signed.items() if count}
    if not left or () in left:
        return not left
    changes: dict[int, Counter[_Spans]] = defaultdict(Counter)
    for ((begin, end), *others), count in left.items():
        rest = tuple(others)
        changes[begin][rest] += count
        changes[end][rest] -= count
    return all(_cancel(change) for change in changes.values())
