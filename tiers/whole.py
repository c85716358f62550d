"""Whole tensors from the pieces that lie in several ranks' files, without ever holding the state in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import cast

import xxhash

from ..specs.dtypes import DTYPE_BYTES
from .digest import state_digest
from .jsonfile import Unreadable
from .recovery import Content, Opened, contents, entries_of
from .store import Progress


@dataclass(frozen=True, slots=True)
class Facts:
    """One tensor of the state: dtype (safetensors tag), global shape, and in how many pieces it is stored."""

    dtype: str
    shape: tuple[int, ...]
    pieces: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dimension 0."""
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def facts_of(opened: Opened) -> dict[str, Facts]:
    """Every tensor of the state by name: from the manifest, or in memory from the headers. Raises Unreadable."""
    found: dict[str, Facts] = {}
    for name, dtype, shape, pieces in _described(opened):
        if dtype not in DTYPE_BYTES:
            raise Unreadable(f"{opened.candidate.folder}: {name!r} has the unknown dtype {dtype!r}")
        before = found[name].pieces if name in found else 0
        found[name] = Facts(dtype, shape, before + pieces)
    return found


def _described(opened: Opened) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    described = opened.meta.get("tensors")
    if described is None:
        for entry in entries_of(opened):
            if entry.is_state:
                yield entry.name, entry.dtype, entry.global_shape, 1
        return
    for name, info in described.items():
        yield name, info["dtype"], tuple(map(int, info["shape"])), len(info["pieces"])


class StateHash:
    """The state digest of a checkpoint, fed with its verified pieces.

    Ranks hold rows in the order of their numbers, so a piece mostly follows the one before and is hashed at once;
    one that comes too early waits as a copy.
    """

    def __init__(self, facts: Mapping[str, Facts]) -> None:
        """Begin; `facts` are all tensors of the state."""
        self._facts = facts
        self._hashers = {name: xxhash.xxh3_128() for name in facts}
        self._done = dict.fromkeys(facts, 0)
        self._early: dict[str, dict[int, bytes]] = {}

    def add(self, piece: Content) -> None:
        """Take the next piece, in any order; raises Unreadable when it is none of the tensors that were announced."""
        facts = self._facts.get(piece.name)
        if facts is None or (facts.dtype, facts.shape) != (piece.dtype, piece.global_shape):
            raise Unreadable(f"rank {piece.rank}: {piece.name!r} is not the tensor that the manifest speaks of")
        position = (piece.offset[0] if piece.offset else 0) * facts.row_bytes
        if position != self._done[piece.name]:
            self._early.setdefault(piece.name, {})[position] = bytes(piece.data)
            return
        self._take(piece.name, piece.data)
        early = self._early.get(piece.name, {})
        while early and (data := early.pop(self._done[piece.name], None)) is not None:
            self._take(piece.name, data)

    def _take(self, name: str, data: bytes | memoryview) -> None:
        self._hashers[name].update(data)
        self._done[name] += len(data)

    def hexdigest(self) -> str:
        """The state digest; raises Unreadable when a tensor is not complete."""
        for name, facts in self._facts.items():
            if self._done[name] != facts.nbytes:
                raise Unreadable(f"{name!r}: its pieces make up {self._done[name]} of {facts.nbytes} bytes")
        return state_digest(
            (name, facts.dtype, facts.shape, self._hashers[name].hexdigest()) for name, facts in self._facts.items()
        )


def read_whole(
    opened: Opened,
    facts: Mapping[str, Facts],
    told: Progress | None = None,
    take: Callable[[Content], None] | None = None,
) -> str:
    """Read every byte, verified; `take` gets each piece of the state. Returns the state digest. Raises Unreadable."""
    state = StateHash(facts)
    with closing(cast("Generator[Content, None, None]", contents(opened))) as pieces:  # whatever `take` raises
        for piece in pieces:
            if piece.is_state:
                state.add(piece)
                if take is not None:
                    take(piece)
            if told is not None:
                told(len(piece.data))
    return state.hexdigest()
