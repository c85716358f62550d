"""Whether the launchers of all nodes reach each other on both channels: each company tries it once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..network.reach import Door, Doors, door_from_json, unreachable
from .alone import ASK_S, NodeMissing
from .company import Company


class Ways:
    """What node 0 knows of the ways between the nodes."""

    def __init__(self, company: Company, wait_while: Callable[[Callable[[], object], float], None]) -> None:
        """Nothing is tried yet. `wait_while` takes messages in as long as there is something to wait for."""
        self.company, self.wait_while = company, wait_while
        self._doors: dict[int, list[Door]] = {}
        self._tried: dict[int, list[str]] = {}
        self._reached: set[str] = set()
        """Words of the launchers that have reached each other."""

    @property
    def known(self) -> bool:
        """Whether all that are there have reached each other."""
        return self.company.words <= self._reached

    def forget(self) -> None:
        """A way may be cut: all are to be tried again."""
        self._reached = set()

    def take_doors(self, node: int, doors: Iterable[Any]) -> None:
        """A node says where it can be reached; raises ValueError for what is none."""
        self._doors[node] = [door_from_json(door) for door in doors]

    def take_problems(self, node: int, problems: Iterable[object]) -> None:
        """A node has tried all others."""
        self._tried[node] = [str(line) for line in problems]

    def reach(self, interfaces: tuple[str, str], others: Iterable[int]) -> bool:
        """Have every node try all others; False when one of the `others` was lost meanwhile. Raises NodeMissing."""
        words = self.company.words
        mine = Doors(*interfaces)
        try:
            doors = {0: mine.doors, **{node: self._doors[node] for node in self.company.ready & self._doors.keys()}}
            self._tried = {}
            told = {str(node): [door.to_json() for door in found] for node, found in doors.items()}
            self.company.tell_all({"kind": "reach", "doors": told})
            problems = unreachable(0, doors)
            self.wait_while(lambda: self.company.ready - self._tried.keys(), ASK_S)
        finally:
            mine.close()
        problems += [line for _, lines in sorted(self._tried.items()) for line in lines]
        if problems:
            raise NodeMissing("\n".join(problems))
        if not self._tried.keys() >= set(others):
            return False
        self._reached = words
        return True
