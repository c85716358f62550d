"""How fast a rank copies its shard while it trains, tried with the real model, its pieces and the copier itself."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from ...planners.devices import CPU_COPY_BYTES_PER_S, with_digest
from ...planners.sharding.shards import Piece, shard_bytes
from ...planners.windows import Windows, storage_parameters
from .copier import Copier, HostMover
from .live import Live
from .snapshots import Pace
from .state import TrainState


@dataclass(frozen=True)
class Trial:
    """A shard and somewhere to copy it to."""

    live: Live
    copier: Copier
    pace: Pace
    base: int
    """Address of the target."""
    nbytes: int

    def begin(self) -> None:
        """The update is done."""
        self.live.look()
        self.copier.begin(0, self.live.items, self.base, lambda digests: None)

    def finish(self) -> float:
        """Wait for the rest before the next update; returns the bytes that were copied per second."""
        self.copier.finish()
        return self.nbytes / self.copier.moving_s


@contextmanager
def trial(
    model: nn.Module,
    optimizer: Optimizer,
    pieces: Sequence[Piece],
    windows: int,
    forward_s: float,
    backward_s: float,
) -> Iterator[Trial | None]:
    """Prepare copies of `pieces` in so many forward and backward passes; None where there is nothing to copy.

    Of a strategy that cuts tensors further the pieces count, not where in the whole tensors here they lie. What the
    optimizer does not keep (of a weight that is not trained) is left out.
    """
    state = TrainState(model, optimizer)
    found = state.places()
    pieces = [piece for piece in pieces if piece.tensor.name in found]
    size = shard_bytes(pieces)
    if not size:
        yield None
        return
    planned = Windows(windows, forward_s, backward_s, with_digest(CPU_COPY_BYTES_PER_S))
    forward, backward = storage_parameters(size, windows, planned, ("memory",))
    pace = Pace(forward.bytes_per_window or 0, backward.bytes_per_window or 0, forward.slice_bytes)
    copier = Copier(HostMover(), pace.slice_bytes)
    try:
        with _touched_pages(size) as base:
            yield Trial(Live(state, pieces), copier, pace, base, size)
    finally:
        copier.stop()


@contextmanager
def _touched_pages(nbytes: int) -> Iterator[int]:
    """Address of pages of a tmpfs, as a slot has them; gone with the process at the latest."""
    descriptor = os.memfd_create("dtrain-profile")
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        with mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as target:
            anchor = ctypes.c_char.from_buffer(target)
            yield ctypes.addressof(anchor)
            del anchor
    finally:
        os.close(descriptor)
