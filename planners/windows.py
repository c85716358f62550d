"""The two sets of storage parameters: what is copied in each forward and in each backward pass.

A step has n forward and n backward passes, so the state is constant for T = n·(forward_s + backward_s). A
rank must copy its shard of S bytes over a channel of B bytes per second. The copy is spread over all windows
in proportion to their time t, in whole pages, at one pace for all of them:

    bytes per window = lead · S · t/T           lead = min(1/0.75, max(1, T·B/S))

- S at most 0.75·T·B: the shard is copied once three quarters of the window time have passed; the last quarter
  is slack for windows that turn out shorter or a channel that turns out slower.
- S up to T·B: the channel runs at its full rate and the slack shrinks to nothing.
- S above T·B: each window gets more than it can hold, in the same proportion; the update then waits for the
  rest, and that wait is the predicted stall S/B - T.

In each of the three, n·forward + n·backward bytes are at least S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FINISH_AT = 0.75
"""Part of the window time after which the copy should be done."""
PAGE_BYTES = 4096
SLICE_S = 2e-4
"""A slice takes at most this long, so that the copier can pause or stop between two of them."""
SLICES_PER_WINDOW = 8
"""A window has at least about this many slices, so that the copy can be spread over it."""
MIN_SLICE_BYTES = 64 * 1024
"""Below this the cost of handing over a slice outweighs the copy itself."""
MAX_SLICE_BYTES = 64 * 2**20
DEFAULT_SLICE_BYTES = 2**20
"""Slice while the channel's rate or the shard's size is not known."""
BACKWARD_TO_FORWARD = 2.0
"""Ratio of the passes' times while they are not known (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)."""


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


def storage_parameters(
    shard_bytes: int | None,
    micro_batches: int,
    passes_s: tuple[float, float] | None,
    bytes_per_s: float,
    tiers: tuple[str, ...],
) -> tuple[StorageParameters, StorageParameters]:
    """Return the sets for forward and backward windows; the rule is this module's docstring.

    `passes_s` holds the times of one forward and one backward pass; None: not known, then the shard is spread
    as if the backward pass took twice the time of the forward pass and all of it fitted.
    """
    if not tiers or shard_bytes is None:
        per_window = None if tiers else 0
        same = StorageParameters(micro_batches, per_window, DEFAULT_SLICE_BYTES, tiers)
        return same, same
    if passes_s is None or sum(passes_s) <= 0:
        passes_s, bytes_per_s = (1.0, BACKWARD_TO_FORWARD), math.inf
    forward_s, backward_s = passes_s
    lead = copy_lead(shard_bytes, micro_batches * (forward_s + backward_s), bytes_per_s)
    per_pass = lead * shard_bytes / micro_batches
    forward = _pages(per_pass * (forward_s / (forward_s + backward_s)))
    rest = -(-shard_bytes // micro_batches) - forward
    backward = _pages(max(per_pass * (backward_s / (forward_s + backward_s)), rest))
    slice_bytes = slice_size(max(forward, backward), bytes_per_s)
    return (
        StorageParameters(micro_batches, forward, slice_bytes, tiers),
        StorageParameters(micro_batches, backward, slice_bytes, tiers),
    )


def copy_lead(shard_bytes: int, window_s: float, bytes_per_s: float) -> float:
    """Return how much faster than "done with the last window" the copy is planned: 1 (no slack) to 1/0.75."""
    if shard_bytes == 0:
        return 1.0
    return min(1 / FINISH_AT, max(1.0, window_s * bytes_per_s / shard_bytes))


def stall_s(shard_bytes: int, window_s: float, bytes_per_s: float) -> float:
    """Return how long the update waits for the copy of one snapshot: S/B - T, or nothing if it fits."""
    return max(0.0, shard_bytes / bytes_per_s - window_s)


def slice_size(bytes_per_window: int, bytes_per_s: float) -> int:
    """Return the slice for windows of `bytes_per_window`: a power of two, at least a page.

    The largest that the channel copies in 0.2 ms, but not more than an eighth of a window nor less than
    64 KiB; a window smaller than that is one slice.
    """
    by_time = DEFAULT_SLICE_BYTES if math.isinf(bytes_per_s) else bytes_per_s * SLICE_S
    by_window = max(bytes_per_window / SLICES_PER_WINDOW, MIN_SLICE_BYTES)
    wanted = min(by_time, by_window, MAX_SLICE_BYTES, max(bytes_per_window, PAGE_BYTES))
    return max(PAGE_BYTES, int(2 ** math.floor(math.log2(wanted)))) if wanted >= 1 else PAGE_BYTES


def _pages(bytes_: float) -> int:
    """Round up to whole pages."""
    return math.ceil(bytes_ / PAGE_BYTES) * PAGE_BYTES
