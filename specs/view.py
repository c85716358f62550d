"""A spec's values as checks that span several keys see them, some of which may be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from .outline import default_of, names_of, places
from .tree import KeyPath


class View:
    """The values of a spec that may be wrong elsewhere; a key with a fault, or below one, reads as None."""

    def __init__(self, values: Mapping[str, Any], faulty: Iterable[KeyPath]) -> None:
        self._values = values
        self._faulty = frozenset(faulty)

    def get(self, *path: str | int) -> Any:
        """Return the value at `path`, its default where the spec says nothing."""
        if any(path[: len(bad)] == bad for bad in self._faulty):
            return None
        current: Any = self._values
        for depth, part in enumerate(path):
            if isinstance(current, BaseModel):
                current = getattr(current, str(part), None)
            elif isinstance(current, list) and isinstance(part, int) and part < len(current):
                current = current[part]
            elif isinstance(current, Mapping) and part in current:
                current = current[str(part)]
            else:
                place = places().get(names_of(path[:depth]))
                model = place.choose(current) if place is not None else None
                current = default_of(model, str(part)) if model is not None else None
        return current

    def whole(self, *path: str | int) -> int | None:
        """Return the whole number at `path`; None if it is none."""
        value = self.get(*path)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def world(self) -> tuple[int, int] | None:
        """Return nodes and workers per node."""
        nodes, workers = self.whole("cluster", "nodes"), self.whole("cluster", "workers_per_node")
        return None if nodes is None or workers is None else (nodes, workers)

    def tiers(self) -> list[tuple[int, str]]:
        """Return the tiers that can be read: position and type."""
        tiers = self.get("tiers")
        kinds = [(index, self.get("tiers", index, "type")) for index in range(len(tiers or []))]
        return [(index, kind) for index, kind in kinds if isinstance(kind, str)]
