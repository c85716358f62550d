"""Whole tensors from the pieces that lie in several ranks' files, without ever holding the state in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import cast

import xxhash

from ...specs.dtypes import DTYPE_BYTES
from ..format.boxes import Box, tile
from ..format.digest import state_digest
from ..format.jsonfile import Unreadable
from ..stores.store import Progress
from .recovery import Opened
from .stretches import Stretch, stretches


@dataclass(frozen=True, slots=True)
class Facts:
    """One tensor of the state: dtype (safetensors tag), global shape, and in how many pieces it is stored."""

    dtype: str
    shape: tuple[int, ...]
    pieces: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def facts_of(opened: Opened) -> dict[str, Facts]:
    """Every tensor of the state by name. Raises Unreadable when its pieces do not make it up exactly."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    boxes: dict[str, list[Box]] = {}
    for source in opened.sources:
        for entry in source.entries:
            if entry.is_state:
                kind = (entry.dtype, entry.global_shape)
                if kinds.setdefault(entry.name, kind) != kind:
                    raise Unreadable(f"{source.where}: {entry.name!r} is another tensor in another file")
                boxes.setdefault(entry.name, []).append((entry.offset, entry.shape))
    for name, (_, shape) in kinds.items():
        if why := _flaw(shape, boxes[name]):
            raise Unreadable(f"{opened.candidate.folder}: {name!r}: {why}")
    return {name: Facts(*kinds[name], len(boxes[name])) for name in sorted(kinds)}


def _flaw(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    try:
        return None if tile(shape, boxes) else "its pieces do not make up the tensor"
    except ValueError as error:
        return str(error)


def read_whole(
    opened: Opened,
    facts: Mapping[str, Facts],
    told: Progress | None = None,
    take: Callable[[Stretch], None] | None = None,
) -> str:
    """Read every byte, verified; `take` gets the state, each tensor from first to last byte. Returns the state digest.

    `facts` are those of `facts_of`. Raises Unreadable.
    """
    hashers = {name: xxhash.xxh3_128() for name in facts}
    found = stretches(opened, told or (lambda _: None))
    with closing(cast("Generator[Stretch, None, None]", found)):  # whatever `take` raises
        for stretch in found:
            hashers[stretch.name].update(stretch.data)
            if take is not None:
                take(stretch)
    return state_digest((name, info.dtype, info.shape, hashers[name].hexdigest()) for name, info in facts.items())
