"""The number of nodes: one, or the least and the most that an elastic run goes on with; which of them can be used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import CoreSchema, core_schema

_RANGE = re.compile(r"\s*(\d{1,9})\s*:\s*(\d{1,9})\s*")


class NodeCount(int):
    """The most nodes that a run has, as a number; `least` is what it needs to go on, the same unless it is elastic."""

    least: int

    def __new__(cls, most: int, least: int | None = None) -> NodeCount:
        """Of a fixed number `least` is left out."""
        made = super().__new__(cls, most)
        made.least = most if least is None else least
        return made

    @property
    def elastic(self) -> bool:
        """Tell whether the number may change while the run goes on."""
        return self.least < self

    def to_spec(self) -> int | str:
        """The form in a spec."""
        return f"{self.least}:{int(self)}" if self.elastic else int(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return core_schema.is_instance_schema(
            cls, serialization=core_schema.plain_serializer_function_ser_schema(cls.to_spec)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "pattern": r"^\d+:\d+$"}]}


def parse_nodes(value: object) -> NodeCount:
    """`4`, or `"2:4"`: 2 to 4. Raises ValueError."""
    if isinstance(value, NodeCount):
        return value
    if isinstance(value, str) and (match := _RANGE.fullmatch(value)) is not None:
        least, most = int(match[1]), int(match[2])
        if not 0 < least <= most:
            raise ValueError(f"the least number of nodes must be from 1 to the most, {most}; write it like 2:4")
        return NodeCount(most, least)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ValueError("not a number of nodes; write it like 4, or 2:4 for 2 to 4")
    return NodeCount(value)


Nodes = Annotated[NodeCount, BeforeValidator(parse_nodes, json_schema_input_type=int | str)]


@dataclass(frozen=True)
class Shape:
    """What must divide evenly for a number of nodes to be usable."""

    workers: int
    shard: int
    tp: int
    pp: int
    schedule: str
    global_batch: int
    micro_batch: int

    def fits(self, nodes: int) -> bool:
        """Tell whether the degrees and the global batch come out even: every rank makes as many passes as the others.

        So the mean over a step is the same for every usable number, without weights.
        """
        world, cuts = nodes * self.workers, self.shard * self.tp * self.pp
        if world % cuts:
            return False
        passes, over = divmod(self.global_batch, self.micro_batch * (world // (self.tp * self.pp)))
        if over or not passes:
            return False
        return {"1f1b": passes >= self.pp, "interleaved-1f1b": passes % self.pp == 0}.get(self.schedule, True)


def usable(count: NodeCount, shape: Shape) -> Iterator[int]:
    """The numbers of nodes that a run can go on with, the smallest first."""
    return (nodes for nodes in range(count.least, count + 1) if shape.fits(nodes))
