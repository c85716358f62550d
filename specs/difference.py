"""What differs between two specs, as one line per key that a person can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any


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
