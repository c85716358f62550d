"""Restore: all ranks load the same version, verified byte by byte, or none does."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..planners.shards import TensorInfo
from ..specs.dtypes import DTYPE_BYTES
from ..tiers.jsonfile import Unreadable
from ..tiers.recovery import Candidate, Content, Opened, contents, open_candidate
from .state import StateError, TrainState, infos, set_random_state, tag_of, unexpected

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


def restore(
    state: TrainState,
    candidates: Sequence[Candidate],
    rank: int,
    all_agree: Callable[[bool], bool],
    spool: Path | None = None,
) -> Restored:
    """Load the first candidate that every rank can read whole; `all_agree` is the logical and over all ranks.

    Remote files are copied into the folder `spool` while they are read, once for all ranks of a node.
    Raises NothingUsable when none is left, StateError when a checkpoint is whole but belongs to another model.
    """
    skipped: list[dict[str, Any]] = []
    for candidate in candidates:
        started = time.perf_counter()
        reason = ""
        opened: Opened | None = None
        fresh = False
        try:
            opened = open_candidate(candidate, spool)
            fresh = _load(state, opened, rank)
        except Unreadable as error:
            reason = str(error)
        if all_agree(not reason) and opened is not None:
            seconds = time.perf_counter() - started
            return Restored(candidate, opened.meta, seconds, skipped, fresh)
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


def _load(state: TrainState, opened: Opened, rank: int) -> bool:
    """Copy every verified byte into the live tensors; True when this rank has no random state in the checkpoint."""
    live = state.constant() | state.changing()
    filled = dict.fromkeys(live, 0)
    stored: dict[str, TensorInfo] = {}
    random: dict[str, bytes] = {}
    for content in contents(opened):
        if content.is_state:
            stored[content.name] = TensorInfo(content.name, content.dtype, content.global_shape)
            target = live.get(content.name)
            if target is not None and tuple(target.shape) == content.global_shape:
                filled[content.name] += _put(target, content)
        elif content.rank == rank:
            random[content.name] = bytes(content.data)
        content.data.release()
    _check_complete(state, stored, live, filled, opened)
    for name, data in random.items():
        set_random_state(name, data)
    return not random


def _put(target: Tensor, content: Content) -> int:
    """Write rows into a live tensor; returns the bytes. Nothing is written where the dtype differs."""
    start = content.offset[0] if content.offset else 0
    width = math.prod(content.global_shape[1:]) * DTYPE_BYTES[content.dtype]
    if tag_of(target, content.name) != content.dtype:
        return 0
    size = len(content.data)
    if size == 0:
        return 0
    if target.device.type == "cpu" and target.is_contiguous():
        source = (ctypes.c_char * size).from_buffer_copy(content.data)
        ctypes.memmove(target.data_ptr() + start * width, source, size)
        return size
    flat = torch.frombuffer(bytearray(content.data), dtype=target.dtype).reshape(content.shape)
    with torch.no_grad():
        (target[start : start + content.shape[0]] if content.shape else target).copy_(flat)
    return size


def _check_complete(
    state: TrainState,
    stored: dict[str, TensorInfo],
    live: dict[str, Tensor],
    filled: dict[str, int],
    opened: Opened,
) -> None:
    expected = {info.name: info for info in infos(live)}
    differences = sorted(unexpected(stored, expected))
    ties = opened.meta.get("ties", {})
    if ties != state.ties():
        differences.append(f"different: tied tensors are {ties} in the checkpoint, {state.ties()} in the model")
    if differences:
        shown = differences[:MAX_SHOWN] + [f"… and {len(differences) - MAX_SHOWN} more"] * (
            len(differences) > MAX_SHOWN
        )
        version = opened.candidate.version
        raise StateError(f"the checkpoint of {version} belongs to another model:\n  " + "\n  ".join(shown))
    short = [name for name, info in expected.items() if filled[name] != info.nbytes]
    if short:
        raise Unreadable(f"{short[0]}: {filled[short[0]]} of {expected[short[0]].nbytes} bytes are there")
