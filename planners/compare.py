"""What alternating blocks of steps say: ratios to the plain blocks beside them, with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from .methods import METHODS, PLAIN

CONFIDENCE = 0.95
STATISTIC = (
    "median over blocks of the mean step of a block divided by the mean of the plain blocks before and after it; "
    "interval by order statistics of those ratios (exact, whatever their distribution)"
)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of steps of one method, as measured on rank 0; the warm-up step is in `cpu_s` and `saves` only."""

    method: str
    step_s: float
    """Mean of the timed steps, what the save kept the training thread from included."""
    blocked_s: float
    """Mean time per step that the save kept the training thread."""
    tail_s: float
    """From the end of the last step until nothing was under way any more."""
    cpu_s: float
    """Processor time of all workers and their helpers, from the first step until nothing was under way any more."""
    saves: int
    """One for each step, that of the warm-up too."""
    memory_bytes: int
    disk_bytes: int
    disk_saves: int
    """How many of the saves reached a disk."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def block_from_json(value: Mapping[str, Any]) -> Block:
    """Read the form of `to_json`; further keys are left alone."""
    return Block(**{name: value[name] for name in Block.__slots__})


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and an interval that holds the true one with probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One method beside plain training."""

    method: str
    blocks: int
    saves: int
    disk_saves: int
    step_ratio: Interval
    blocked_s: float
    """Per save, median over blocks."""
    step_after_ratio: float
    """The step after a save without its blocked time, over a plain step: what goes on behind the training's back."""
    cpu_s: float
    """Per save, beyond what the steps themselves take."""
    memory_bytes: int
    """Per save."""
    disk_bytes: int
    """Per save."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def compare(blocks: Sequence[Block]) -> list[Compared]:
    """Compare every method with plain; `blocks` in the order they ran, plain first and last."""
    names = [name for name in METHODS if any(block.method == name for block in blocks)]
    return [_compare(name, blocks) for name in names]


def _compare(name: str, blocks: Sequence[Block]) -> Compared:
    mine = [(block, *_beside(blocks, place)) for place, block in enumerate(blocks) if block.method == name]
    saves = sum(block.saves for block, _, _ in mine)
    return Compared(
        method=name,
        blocks=len(mine),
        saves=saves,
        disk_saves=sum(block.disk_saves for block, _, _ in mine),
        step_ratio=median_interval([block.step_s / plain_s for block, plain_s, _ in mine]),
        blocked_s=median(block.blocked_s for block, _, _ in mine),
        step_after_ratio=median((block.step_s - block.blocked_s) / plain_s for block, plain_s, _ in mine),
        cpu_s=median(block.cpu_s / block.saves - cpu_s for block, _, cpu_s in mine),
        memory_bytes=round(sum(block.memory_bytes for block, _, _ in mine) / saves),
        disk_bytes=round(sum(block.disk_bytes for block, _, _ in mine) / saves),
    )


def _beside(blocks: Sequence[Block], place: int) -> tuple[float, float]:
    """Seconds and processor seconds of a plain step, from the plain blocks nearest before and after."""
    before = next(block for block in reversed(blocks[:place]) if block.method == PLAIN)
    after = next(block for block in blocks[place:] if block.method == PLAIN)
    return fmean((before.step_s, after.step_s)), fmean(block.cpu_s / block.saves for block in (before, after))


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The median, with the narrowest symmetric pair of order statistics that covers it with `confidence`.

    Of n independent values each lies below the true median with probability 1/2, so the k-th smallest and the k-th
    largest enclose it with probability 1 - 2·P(Binomial(n, 1/2) < k). Below six values no pair reaches 0.95: then
    it is the smallest and the largest, and `coverage` says how little that is.
    """
    ordered = sorted(values)
    k = 1
    while 2 * (k + 1) <= len(ordered) and _coverage(len(ordered), k + 1) >= confidence:
        k += 1
    return Interval(median(ordered), ordered[k - 1], ordered[-k], _coverage(len(ordered), k))


def _coverage(count: int, k: int) -> float:
    outside = 2 * sum(math.comb(count, i) for i in range(k)) / float(2**count)
    return max(0.0, 1 - outside)


def order(methods: Sequence[str], number: int) -> list[str]:
    """Sequence of the blocks in round `number`, closed by a plain one.

    Two neighbouring rounds run in opposite directions, so that a machine that drifts evenly cancels out; from pair to
    pair the methods move on by one place. A plain block stands after every two others.
    """
    shift = number // 2 % max(1, len(methods))
    turned = [*methods[shift:], *methods[:shift]]
    if number % 2:
        turned.reverse()
    sequence: list[str] = []
    for place, name in enumerate(turned):
        sequence.append(name)
        if place % 2 or place == len(turned) - 1:
            sequence.append(PLAIN)
    return sequence


def steps_that_suit(step_s: float) -> int:
    """Timed steps of a block: about a second of them, 1 to 10."""
    return min(10, max(1, round(1.0 / step_s)))


def rounds_that_fit(round_s: float, budget_s: float) -> int:
    """Blocks of each method: as many as the budget holds, 6 to 30; an interval of 95 % takes six."""
    return min(30, max(6, int(budget_s / round_s)))
