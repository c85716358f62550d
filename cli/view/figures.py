"""Predicted against measured: the plan's figures beside the medians of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...planners.document import timed_backward_s
from .format import human_bytes, human_percent, human_seconds
from .state import RunState, integer, number


@dataclass(frozen=True)
class Figure:
    """One quantity that the plan predicts and the run measures; None: not known."""

    key: str
    label: str
    predicted: float | None
    measured: float | None
    write: Callable[[float | None], str]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, or None where there is nothing to divide."""
        if self.predicted is None or self.measured is None or self.predicted <= 0:
            return None
        return self.measured / self.predicted


def figures(state: RunState, plan: Mapping[str, Any]) -> list[Figure]:
    """Return the figures in the order in which they are shown."""
    iteration, model = (_part(plan, key) for key in ("iteration", "model"))
    passes = integer(iteration, "micro_batches")

    def timed(key: str, label: str, predicted: float | None, measured: float | None) -> Figure:
        return Figure(key, label, predicted, measured, human_seconds)

    def median(key: str) -> float | None:
        return state.series[key].median

    def per_pass(key: str) -> float | None:
        return _per_pass(median(key), passes)

    bytes_per_rank = _figure(model, "state_bytes_per_rank")
    return [
        timed("forward_s", "forward, per pass", _figure(iteration, "forward_s"), per_pass("forward_s")),
        timed("backward_s", "backward, per pass", planned_backward_s(plan), per_pass("backward_s")),
        timed("optimizer_s", "optimizer update", _figure(iteration, "optimizer_s"), median("optimizer_s")),
        timed("step_s", "step", planned_step_s(plan), median("step_s")),
        Figure("stall", "stall, share of the step", _planned_stall(plan), state.overhead, human_percent),
        _overhead(plan),
        Figure("snapshot_bytes", "snapshot, per rank", bytes_per_rank, median("snapshot_bytes"), human_bytes),
        *_settled(plan),
        *_memory(state, plan),
    ]


def _planned_stall(plan: Mapping[str, Any]) -> float | None:
    stall_s, step_s = _figure(_part(plan, "expected"), "stall_s"), planned_step_s(plan)
    return stall_s / step_s if stall_s is not None and step_s else None


def _overhead(plan: Mapping[str, Any]) -> Figure:
    """Stall, and what the passes are slower beside the copies: only the workers can measure that."""
    measured = _part(plan, "measured")
    step = _figure(measured, "step")
    at = "" if step is None else f" at step {step:.0f}"
    predicted, seen = _figure(_part(plan, "expected"), "overhead"), _figure(measured, "overhead")
    return Figure("overhead", f"overhead{at}", predicted, seen, human_percent)


def _settled(plan: Mapping[str, Any]) -> list[Figure]:
    """What the workers have measured themselves and left beside the plan."""
    measured = _part(plan, "measured")
    if not measured:
        return []
    rate, seen = _figure(_part(plan, "storage"), "bytes_per_s"), _figure(measured, "copy_bytes_per_s")
    return [Figure("copy_bytes_per_s", "copy, per second and rank", rate, seen, human_bytes)]


def _memory(state: RunState, plan: Mapping[str, Any]) -> list[Figure]:
    """What the rank with the most of it took of its device's memory: known at the end only."""
    seen = None if state.finished is None else number(state.finished, "device_bytes_per_rank")
    predicted = _figure(_part(plan, "memory"), "device_bytes_per_rank")
    return [] if seen is None else [Figure("device_bytes", "memory of a rank, peak", predicted, seen, human_bytes)]


def _part(plan: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = plan.get(key)
    return part if isinstance(part, Mapping) else {}


def _figure(part: Mapping[str, Any], key: str) -> float | None:
    value = number(part, key)
    return value if value is not None and math.isfinite(value) else None


def _per_pass(total: float | None, passes: int | None) -> float | None:
    """Divide a step's sum by its passes; without their number it cannot be told."""
    return total / passes if total is not None and passes else None


def planned_backward_s(plan: Mapping[str, Any]) -> float | None:
    """A backward pass as a run measures it."""
    iteration = _part(plan, "iteration")
    backward, exchange = (_figure(iteration, key) for key in ("backward_s", "exchange_s"))
    return timed_backward_s(backward, exchange, integer(iteration, "micro_batches"))


def planned_step_s(plan: Mapping[str, Any]) -> float | None:
    """The plan's own figure for a step, else the sum of its parts; one missing part leaves no sum."""
    iteration = _part(plan, "iteration")
    told = _figure(iteration, "step_s")
    if told is not None:
        return told
    passes = integer(iteration, "micro_batches")
    forward, backward, update = (_figure(iteration, key) for key in ("forward_s", "backward_s", "optimizer_s"))
    if not passes or forward is None or backward is None or update is None:
        return None
    return passes * (forward + backward) + update
