"""Scaling of the loss for fp16, whose smallest gradients would else be zero.

Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, with the rule of torch.amp.GradScaler: an update that would not
be finite is left out and the scale halved; after so many good ones in a row it is doubled. GradScaler itself looks at
each rank's own gradients; here the norm that all ranks have agreed on decides, so that all of them leave out the same
update however the parameters are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIRST = 2.0**16
GROWTH_INTERVAL = 2000
"""Good updates in a row after which the scale is doubled."""
LOST_IN_A_ROW = 3
"""Losses that may be no number one after the other. The loss is looked at before it is scaled, so a smaller scale is no
answer to it: an unlucky batch has left the range of fp16 on its way through the model, or a weight is spoilt. The first
passes, the second does not."""
LEAST = 2.0**-14
"""The smallest normal fp16 number: gradients that are not finite below it are no matter of the scale."""


@dataclass
class LossScale:
    """The factor of the loss, and how long it has been good."""

    scale: float = FIRST
    good: int = 0
    lost: int = 0
    """Losses in a row that were not finite."""

    def to_json(self) -> dict[str, Any]:
        """The form in a manifest."""
        return {"scale": self.scale, "good": self.good, "lost": self.lost}

    def is_spent(self, *, loss_finite: bool) -> bool:
        """Tell whether leaving out one more update, with a smaller scale, cannot be the answer any more."""
        return self.scale <= LEAST if loss_finite else self.lost + 1 >= LOST_IN_A_ROW

    def update(self, *, finite: bool, loss_finite: bool = True) -> None:
        """Take the outcome of an update; one that was left out for its loss says nothing of the scale."""
        self.lost = 0 if loss_finite else self.lost + 1
        if not loss_finite:
            return
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
    if not stored:
        return LossScale()
    return LossScale(float(stored["scale"]), int(stored["good"]), int(stored.get("lost", 0)))


def lacks_scale(meta: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint was made with a scaled loss and does not say by how much."""
    precision = meta.get("spec", {}).get("training", {}).get("precision", "fp16-mixed")
    return precision == "fp16-mixed" and not meta.get("loss_scale")
