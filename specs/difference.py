"""What differs between two specs, as one line per key that a person can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .load import spec_to_json
from .models import Spec

_TRAINING = {"model", "dataset", "training", "seed"}
"""Blocks of a spec by which a run is another one; where and on how many workers it runs, or is stored, are not."""
_HOW = ("model.like", "model.plan", "training.micro_batch_size")
"""Keys in them that say how the same is computed, or what the plan takes it for."""
HELD_OUT = "evaluation.fraction"
"""The part of the data that is not trained on; evaluating itself changes nothing."""


@dataclass(frozen=True)
class Change:
    """One key whose value is another now; None stands for a key that is not there."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.then} → {self.now}"

    def to_json(self) -> dict[str, Any]:
        """Form for documents."""
        return asdict(self)


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Keys that differ between two specs as JSON, in order of their names; where a run lies is none of its traits."""
    before, after = dict(_leaves(then)), dict(_leaves(now))
    return [
        Change(key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key != "output_dir"
    ]


def other_training(then: Spec, now: Spec) -> list[Change]:
    """The changes by which the steps to come are others than the run's own would have been.

    A later end is none, unless the learning rate falls towards it.
    """
    found = [
        change
        for change in changes(spec_to_json(then), spec_to_json(now))
        if change.key.partition(".")[0] in _TRAINING and not _within(change.key, _HOW)
    ]
    if then.max_steps != now.max_steps and now.training.scheduler.name != "constant":
        found.append(Change("max_steps", then.max_steps, now.max_steps))
    parts = [spec.evaluation.held_out if spec.evaluation is not None else 0.0 for spec in (then, now)]
    if parts[0] != parts[1]:
        found.append(Change(HELD_OUT, *parts))
    return sorted(found, key=lambda change: change.key)


def is_meant(change: Change, keys: Sequence[str]) -> bool:
    """Tell whether one of the keys that somebody has named covers a change."""
    also = [HELD_OUT, "evaluation.dataset"] if change.key == HELD_OUT else [change.key]  # either says what is held out
    return any(_within(key, keys) for key in also)


def _within(key: str, blocks: Sequence[str]) -> bool:
    return any(key == block or key.startswith((f"{block}.", f"{block}[")) for block in blocks)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for name, item in zip(_names(value), value, strict=True):
            yield from _leaves(item, f"{path}[{name}]")
    else:
        yield path, value


def _names(items: list[Any]) -> list[object]:
    """Names of what is in a list: tiers go by their type, for one put in front must not make all others differ."""
    types = [item.get("type") if isinstance(item, Mapping) else None for item in items]
    if all(isinstance(name, str) for name in types) and len(set(types)) == len(types):
        return list(types)
    return list(range(len(items)))
