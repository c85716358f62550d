"""A spec's values as checks that span several keys see them, some of which may be wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from ..nodes import NodeCount, Shape, parse_nodes, usable
from ..text.tree import KeyPath
from .outline import default_of, names_of, places


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
        """Return nodes and workers per node; of an elastic number the largest that can be used, the most if none."""
        count, workers = self.nodes(), self.whole("cluster", "workers_per_node")
        if count is None or workers is None:
            return None
        shape = self._shape(workers) if count.elastic else None
        return max(usable(count, shape), default=int(count)) if shape is not None else int(count), workers

    @property
    def is_elastic(self) -> bool:
        """Tell whether the number of nodes may change."""
        count = self.nodes()
        return count is not None and count.elastic

    def nodes(self) -> NodeCount | None:
        """Return the number of nodes; None if it is none."""
        with contextlib.suppress(ValueError):
            return parse_nodes(self.get("cluster", "nodes"))
        return None

    def _shape(self, workers: int) -> Shape | None:
        tp, pp = (self.whole("strategy", key) or 0 for key in ("tp", "pp"))
        batch, micro = (self.whole("training", key) or 0 for key in ("global_batch_size", "micro_batch_size"))
        schedule = self.get("strategy", "pp_schedule")
        if min(tp, pp, batch, micro, workers) < 1 or not isinstance(schedule, str):
            return None
        return Shape(workers, tp, pp, schedule, batch, micro)

    def tiers(self) -> list[tuple[int, str]]:
        """Return the tiers that can be read: position and type."""
        tiers = self.get("tiers")
        kinds = [(index, self.get("tiers", index, "type")) for index in range(len(tiers or []))]
        return [(index, kind) for index, kind in kinds if isinstance(kind, str)]
