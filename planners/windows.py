"""The two sets of storage parameters: what is copied in each forward and in each backward pass.

A step has n forward and n backward passes, so the state is constant for T = n·(forward_s + backward_s), and for the
part e of the gradients' exchange that sticks out of the last backward pass. A rank must copy its shard of S bytes
over a channel of B bytes per second. The copy is spread over all windows in proportion to their time t, in whole
pages, at one pace p for all of them:

    bytes per window = p·B·t        p = min(1, max(S/(0.75·T·B), S/(U·B)))

- S at most 0.75·T·B: the shard is copied once three quarters of the window time have passed; the last quarter
  is slack for windows that turn out shorter or a channel that turns out slower.
- Where gradients cross the same link they do so in the last backward pass, and they go first. U is the time before
  it: the copy is done by then if it fits. U is not looked at where gradients have a link of their own.
- Above that the channel runs at its full rate and the slack shrinks to nothing. What gradients leave of a shared link
  in the time g of their exchange is B'.
- S above the capacity C = B·(T + e - g) + B'·g: each window gets more than it can hold, in the same proportion; the
  update then waits for the rest, and that wait is the predicted stall.

In each of these, n·forward + n·backward bytes are at least S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FINISH_AT = 0.75
"""Part of the window time after which the copy should be done."""
PAGE_BYTES = 4096
SLICE_S = 2e-4
"""A slice of more than the least takes at most this long, so that the copier can pause or stop between two of them."""
SLICES_PER_WINDOW = 8
"""A window has at least about this many slices, so that the copy can be spread over it."""
MIN_SLICE_BYTES = 64 * 1024
"""Below this the cost of handing over a slice outweighs the copy itself."""
MAX_SLICE_BYTES = 64 * 2**20
DEFAULT_SLICE_BYTES = 2**20
"""Slice while the channel's rate or the shard's size is not known."""
UNKNOWN_PASSES = (1.0, 2.0)
"""Times of the passes, up to a factor, while they are not known (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)."""


@dataclass(frozen=True, slots=True)
class StorageParameters:
    """The planner's answer for one kind of window."""

    windows: int
    """Windows of this kind in a step."""
    bytes_per_window: int | None
    """Bytes that a rank copies in one of them; None: the model's size is not known."""
    slice_bytes: int
    """Bytes handed to the copier at once."""
    tiers: tuple[str, ...]
    """Tiers that are written in these windows."""


@dataclass(frozen=True, slots=True)
class Windows:
    """One step as a rank's storage channel sees it."""

    micro_batches: int
    forward_s: float
    backward_s: float
    bytes_per_s: float
    """B, the channel's rate."""
    exchange_s: float = 0.0
    """e: the state is constant for this long after the last backward pass, too."""
    gradients_s: float = 0.0
    """g: from the begin of the last backward pass gradients hold the same link for this long; 0: they never do."""
    beside_bytes_per_s: float = 0.0
    """B': what the channel reaches meanwhile."""

    @property
    def window_s(self) -> float:
        """T."""
        return self.micro_batches * (self.forward_s + self.backward_s)

    @property
    def free_s(self) -> float:
        """U: until gradients need the link."""
        return self.window_s - self.backward_s if self.gradients_s > 0 else self.window_s

    @property
    def capacity_bytes(self) -> float:
        """C: the most that can be copied before the update would have to wait."""
        held_s = min(self.gradients_s, self.backward_s + self.exchange_s)
        constant_s = self.window_s + self.exchange_s
        return self.bytes_per_s * (constant_s - held_s) + self.beside_bytes_per_s * held_s

    def pace(self, shard_bytes: int) -> float:
        """Return p, the part of its rate that the channel is planned to run at."""
        copy_s = shard_bytes / self.bytes_per_s
        wanted = copy_s / (FINISH_AT * self.window_s)
        if self.gradients_s > 0:
            wanted = max(wanted, copy_s / self.free_s if self.free_s > 0 else math.inf)
        return min(1.0, wanted)

    def unpaced_end_s(self, shard_bytes: int) -> float:
        """Return when, after the update, a copy at full rate has ended, the gradients' share left to them."""
        if self.gradients_s <= 0 or shard_bytes <= self.bytes_per_s * self.free_s:
            return shard_bytes / self.bytes_per_s
        rest = shard_bytes - self.bytes_per_s * self.free_s
        if rest <= self.beside_bytes_per_s * self.gradients_s:
            return self.free_s + rest / self.beside_bytes_per_s
        rest -= self.beside_bytes_per_s * self.gradients_s
        return self.free_s + self.gradients_s + rest / self.bytes_per_s

    def stall_s(self, shard_bytes: int) -> float:
        """Return how long the update waits for the copy of one snapshot; 0 if it fits."""
        return max(0.0, self.unpaced_end_s(shard_bytes) - self.window_s - self.exchange_s)

    def copied_s(self, shard_bytes: int, forward_bytes: int, backward_bytes: int) -> float:
        """Return when, after the update, the shard is copied with these bytes per window."""
        if self.pace(shard_bytes) >= 1 or shard_bytes == 0:
            return self.unpaced_end_s(shard_bytes)
        pairs = (shard_bytes - 1) // (forward_bytes + backward_bytes)
        rest = shard_bytes - pairs * (forward_bytes + backward_bytes)
        begin_s = pairs * (self.forward_s + self.backward_s)
        if rest <= forward_bytes:
            return begin_s + rest / self.bytes_per_s
        return begin_s + self.forward_s + (rest - forward_bytes) / self.bytes_per_s


def storage_parameters(
    shard_bytes: int | None, micro_batches: int, windows: Windows | None, tiers: tuple[str, ...]
) -> tuple[StorageParameters, StorageParameters]:
    """Return the sets for forward and backward windows; the rule is this module's docstring.

    `windows` is None while the times are not known: then the shard is spread as if the backward pass took twice the
    time of the forward pass and all of it fitted.
    """
    if not tiers or shard_bytes is None:
        per_window = None if tiers else 0
        same = StorageParameters(micro_batches, per_window, DEFAULT_SLICE_BYTES, tiers)
        return same, same
    if windows is None:
        windows = Windows(micro_batches, *UNKNOWN_PASSES, bytes_per_s=max(1, shard_bytes) * 1e3)
        rate = math.inf
    else:
        rate = windows.bytes_per_s
    pair_s = windows.forward_s + windows.backward_s
    per_pair = max(windows.pace(shard_bytes) * windows.bytes_per_s * pair_s, shard_bytes / micro_batches)
    forward = _pages(per_pair * (windows.forward_s / pair_s))
    rest = -(-shard_bytes // micro_batches) - forward
    backward = _pages(max(per_pair * (windows.backward_s / pair_s), rest))
    slice_bytes = slice_size(max(forward, backward), rate)
    return (
        StorageParameters(micro_batches, forward, slice_bytes, tiers),
        StorageParameters(micro_batches, backward, slice_bytes, tiers),
    )


def slice_size(bytes_per_window: int, bytes_per_s: float) -> int:
    """Return the slice for windows of `bytes_per_window`: a power of two, at least a page.

    The largest that the channel copies in 0.2 ms, but not more than an eighth of a window; nor less than 64 KiB, for
    a slow channel would be made slower by the handing over. A window smaller than that is one slice.
    """
    by_time = DEFAULT_SLICE_BYTES if math.isinf(bytes_per_s) else max(bytes_per_s * SLICE_S, MIN_SLICE_BYTES)
    by_window = max(bytes_per_window / SLICES_PER_WINDOW, MIN_SLICE_BYTES)
    wanted = min(by_time, by_window, MAX_SLICE_BYTES, max(bytes_per_window, PAGE_BYTES))
    return max(PAGE_BYTES, int(2 ** math.floor(math.log2(wanted)))) if wanted >= 1 else PAGE_BYTES


def _pages(bytes_: float) -> int:
    """Round up to whole pages."""
    return math.ceil(bytes_ / PAGE_BYTES) * PAGE_BYTES
