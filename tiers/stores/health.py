"""A tier that fails is tried again at longer and longer intervals; what was left out meanwhile is counted."""

from __future__ import annotations

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


class Health:
    """Whether a tier should be tried now. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        """Nothing has failed yet."""
        self.failures = 0
        self.left_out = 0
        self._again_at = 0.0

    @property
    def failing(self) -> bool:
        """Tell whether the last try failed."""
        return self.failures > 0

    def ready(self, now: float) -> bool:
        """Tell whether it is time for a try."""
        return now >= self._again_at

    def failed(self, now: float) -> None:
        """A try has failed: the next one after 1, 2, 4, … seconds, at most 60."""
        self.failures += 1
        self.left_out += 1
        self._again_at = now + min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self.failures - 1))

    def passed_over(self) -> None:
        """A checkpoint was left out without a try."""
        self.left_out += 1

    @property
    def worth_telling(self) -> bool:
        """Tell whether the checkpoint left out last is the first, second, fourth, … of the outage."""
        return is_power_of_two(self.left_out)

    def worked(self) -> int:
        """A try has worked; returns how many checkpoints were left out since the last one that did."""
        left_out, self.left_out = self.left_out, 0
        self.failures, self._again_at = 0, 0.0
        return left_out


def is_power_of_two(count: int) -> bool:
    """What repeats is told at doubling distances: a line for each would fill a disk that is full already."""
    return count > 0 and count & (count - 1) == 0
