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
    tp: int
    pp: int
    schedule: str
    global_batch: int
    micro_batch: int

    def data_parallel(self, nodes: int) -> int:
        """Ranks, or groups of ranks, that see different samples; 0 where tp and pp do not come out even."""
        whole, over = divmod(nodes * self.workers, self.tp * self.pp)
        return 0 if over else whole

    def fits(self, nodes: int) -> bool:
        """Tell whether tp, pp and the global batch come out even: every rank makes as many passes as the others.

        So the mean over a step is the same for every usable number, without weights. `dp_shard` follows the number.
        """
        return self.why_not(nodes) is None

    def why_not(self, nodes: int) -> str | None:
        """What does not come out even with so many nodes; None: all does."""
        world, among = nodes * self.workers, self.data_parallel(nodes)
        if not among:
            return f"tp * pp = {self.tp * self.pp} does not divide {world} workers"
        unit = self.micro_batch * among
        passes, over = divmod(self.global_batch, unit)
        if over or not passes:
            return f"global_batch_size {self.global_batch} is no multiple of micro_batch_size * {among} = {unit}"
        enough = {"1f1b": passes >= self.pp, "interleaved-1f1b": passes % self.pp == 0}.get(self.schedule, True)
        return None if enough else f"{passes} micro-batches are not what {self.schedule} over pp = {self.pp} needs"


def usable(count: NodeCount, shape: Shape) -> Iterator[int]:
    """The numbers of nodes that a run can go on with, the smallest first."""
    return (nodes for nodes in range(count.least, count + 1) if shape.fits(nodes))


def shards_among(asked: int, data_parallel: int) -> int:
    """dp_shard where a run whose spec asks for `asked` has this many data-parallel ranks.

    Never less than asked for, so that a rank holds no more than it was planned to: the least divisor of the ranks that
    is at least `asked`. With fewer ranks than that it is all of them.
    """
    return next((n for n in range(asked, data_parallel) if data_parallel % n == 0), max(1, data_parallel))
