"""Restore: all ranks load the same version, verified byte by byte, or none does."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...planners.sharding.shards import Held, TensorInfo, replicated
from ...specs.dtypes import DTYPE_BYTES
from ...tiers.format.jsonfile import Unreadable
from ...tiers.format.shardfile import Entry
from ...tiers.reading.recovery import MEMORY, PEER, Candidate, Content, Opened, Wanted, contents, open_candidate
from ...tiers.reading.whole import Facts, facts_of
from ..layout import local_of
from ..snapshot.state import StateError, TrainState, infos, set_random_state, unexpected
from .catalogue import Catalogue
from .exchange import Exchange, Exchanged

MAX_SHOWN = 12


class NothingUsable(Exception):
    """Every candidate is damaged; the message lists them."""


@dataclass(frozen=True)
class Restored:
    """What was loaded and what was passed over."""

    candidate: Candidate
    meta: dict[str, Any]
    seconds: float
    skipped: list[dict[str, Any]] = field(default_factory=list)
    fresh_random: bool = False
    mended: list[str] = field(default_factory=list)
    """What was damaged in a node's memory, and came from a copy on another one."""


def restore(
    state: TrainState,
    everything: Catalogue,
    candidates: Sequence[Candidate],
    rank: int,
    all_agree: Callable[[bool], bool],
    spool: Path | None = None,
    exchange: Exchange | None = None,
) -> Restored:
    """Load the first candidate of which every rank can read its own part whole.

    `everything` is what all ranks hold together, `all_agree` the logical and over them.

    Remote files are copied into the folder `spool` while they are read, once for all ranks of a node. What lies in the
    memory of several nodes comes by `exchange`.
    Raises NothingUsable when none is left, StateError when a checkpoint is whole but belongs to another model.
    """
    skipped: list[dict[str, Any]] = []
    for candidate in candidates:
        started = time.perf_counter()
        reason = ""
        opened: Stored | Exchanged | None = None
        fresh = False
        try:
            opened = _open(candidate, spool, exchange)
            fresh = _load(state, everything, opened, rank)
        except Unreadable as error:
            reason = str(error)
        if all_agree(not reason) and opened is not None:
            seconds = time.perf_counter() - started
            mended = opened.mended if isinstance(opened, Exchanged) else []
            return Restored(candidate, opened.meta, seconds, skipped, fresh, mended)
        skipped.append(
            {
                "tier": candidate.tier,
                "step": candidate.version.step,
                "attempt": candidate.version.attempt,
                "reason": reason or "another rank could not read it",
            }
        )
    listed = "\n".join(f"  step {item['step']} ({item['tier']}): {item['reason']}" for item in skipped)
    raise NothingUsable(f"no checkpoint can be read whole:\n{listed}")


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose files this rank can read itself."""

    opened: Opened

    @property
    def candidate(self) -> Candidate:
        """Which one."""
        return self.opened.candidate

    @property
    def meta(self) -> dict[str, Any]:
        """What is said beside tensors."""
        return self.opened.meta

    def facts(self) -> dict[str, Facts]:
        """Every tensor of the state by name."""
        return facts_of(self.opened)

    def contents(self, wanted: Wanted) -> Iterator[Content]:
        """The pieces that are wanted, verified."""
        return contents(self.opened, wanted)


def _open(candidate: Candidate, spool: Path | None, exchange: Exchange | None) -> Stored | Exchanged:
    if exchange is not None and candidate.tier in (MEMORY, PEER):
        return exchange.open(candidate)
    return Stored(open_candidate(candidate, spool))


def _load(state: TrainState, everything: Catalogue, opened: Stored | Exchanged, rank: int) -> bool:
    """Copy what this rank holds, verified, into the live tensors; True when there is no random state for it."""
    _check_same(everything, opened)
    boxes = {box.tensor.name: box for box in [*state.held(), *replicated(infos(state.changing()), 1)]}
    live = {name: local_of(tensor) for name, tensor in (state.constant() | state.changing()).items()}
    filled = dict.fromkeys(boxes, 0)
    random: dict[str, bytes] = {}

    def wanted(entry: Entry, of_rank: int) -> bool:
        if not entry.is_state:
            return of_rank == rank
        box = boxes.get(entry.name)
        return box is not None and _common(box, entry.offset, entry.shape) is not None

    for content in opened.contents(wanted):
        if content.is_state:
            filled[content.name] += _put(live[content.name], boxes[content.name], content)
        else:
            random[content.name] = bytes(content.data)
        content.data.release()
    short = [name for name, box in boxes.items() if filled[name] != box.nbytes]
    if short:
        raise Unreadable(f"{short[0]}: {filled[short[0]]} of {boxes[short[0]].nbytes} bytes are there")
    for name, data in random.items():
        set_random_state(name, data)
    return not random


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


def _common(box: Held, offset: tuple[int, ...], shape: tuple[int, ...]) -> Box | None:
    """The part of a stored piece that lies in what this rank holds; None: nothing of it does."""
    begin = tuple(map(max, box.offset, offset))
    end = tuple(min(a + n, b + m) for a, n, b, m in zip(box.offset, box.shape, offset, shape, strict=True))
    size = tuple(last - first for first, last in zip(begin, end, strict=True))
    return (begin, size) if all(n > 0 for n in size) else None


def _put(target: Tensor, box: Held, content: Content) -> int:
    """Write the part of a piece that this rank holds into its live tensor; returns the bytes."""
    common = _common(box, content.offset, content.shape)
    if common is None:
        return 0
    (begin, size), width = common, DTYPE_BYTES[content.dtype]
    whole_rows = size[1:] == content.shape[1:] == box.shape[1:]
    if whole_rows and target.device.type == "cpu" and target.is_contiguous():
        row = math.prod(size[1:]) * width
        to, first = ((begin[0] - box.offset[0]) * row, (begin[0] - content.offset[0]) * row) if size else (0, 0)
        nbytes = math.prod(size) * width
        source = (ctypes.c_char * nbytes).from_buffer_copy(content.data[first : first + nbytes])
        ctypes.memmove(target.data_ptr() + to, source, nbytes)
        return nbytes
    piece = torch.frombuffer(bytearray(content.data), dtype=target.dtype).reshape(content.shape)
    with torch.no_grad():
        target[_slices(begin, size, box.offset)] = piece[_slices(begin, size, content.offset)].to(target.device)
    return math.prod(size) * width


def _slices(begin: tuple[int, ...], size: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(at - zero, at - zero + n) for at, n, zero in zip(begin, size, origin, strict=True))


def _check_same(everything: Catalogue, opened: Stored | Exchanged) -> None:
    """Raise StateError when the checkpoint's tensors are not those of the model, over all ranks."""
    stored = {name: TensorInfo(name, facts.dtype, facts.shape) for name, facts in opened.facts().items()}
    differences = sorted(unexpected(stored, everything.tensors))
    ties = opened.meta.get("ties", {})
    if ties != everything.ties:
        differences.append(f"different: tied tensors are {ties} in the checkpoint, {everything.ties} in the model")
    if differences:
        shown = differences[:MAX_SHOWN] + [f"… and {len(differences) - MAX_SHOWN} more"] * (
            len(differences) > MAX_SHOWN
        )
        version = opened.candidate.version
        raise StateError(f"the checkpoint of {version} belongs to another model:\n  " + "\n  ".join(shown))
