"""Scaling of the loss for fp16, whose smallest gradients would else be zero.

Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, with the rule of torch.amp.GradScaler: an update that would not
be finite is left out and the scale halved; after so many good ones in a row it is doubled. GradScaler itself looks at
each rank's own gradients; here the norm that all ranks have agreed on decides, so that all of them leave out the same
update however the parameters are cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FIRST = 2.0**16
GROWTH_INTERVAL = 2000
"""Good updates in a row after which the scale is doubled."""
LEAST = 2.0**-14
"""The smallest normal fp16 number: gradients that are not finite below it are no matter of the scale."""


@dataclass
class LossScale:
    """The factor of the loss, and how long it has been good."""

    scale: float = FIRST
    good: int = 0

    def to_json(self) -> dict[str, Any]:
        """The form in a manifest."""
        return {"scale": self.scale, "good": self.good}

    @property
    def is_spent(self) -> bool:
        """Tell whether a smaller scale cannot be the answer any more."""
        return self.scale <= LEAST

    def update(self, *, finite: bool) -> None:
        """Take the outcome of an update."""
        if not finite:
            self.scale, self.good = self.scale / 2, 0
            return
        self.good += 1
        if self.good >= GROWTH_INTERVAL:
            self.scale, self.good = self.scale * 2, 0


def scale_of(precision: str, stored: dict[str, Any] | None = None) -> LossScale | None:
    """The scale to begin with: the checkpoint's, or a first one; None where the precision needs none."""
    if precision != "fp16-mixed":
        return None
    return LossScale(float(stored["scale"]), int(stored["good"])) if stored else LossScale()
