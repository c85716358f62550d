"""Where a rank stands among the others: one coordinate per parallel degree.

Ranks are counted row by row over (pp, dp_replicate, dp_shard, tp), the order in which torch's device mesh is built: the
ranks of one tensor parallel group, which talk most, follow each other, and the stages of a pipeline, which talk least,
lie furthest apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...specs.models import Spec

DIMS = ("pp", "dp_replicate", "dp_shard", "tp")
WITHIN_STAGE = DIMS[1:]
"""Ranks that differ only in these have the same part of the model's layers."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The degrees of a job."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Degrees in the order of DIMS."""
        return self.pp, self.dp_replicate, self.dp_shard, self.tp

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of ranks, that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def by_ddp(self) -> bool:
        """Whether each rank has the whole model, so that DDP exchanges gradients."""
        return (self.pp, self.dp_shard, self.tp) == (1, 1, 1)

    @property
    def by_fsdp(self) -> bool:
        """Whether FSDP2 puts weights together and divides, or sums, gradients."""
        return self.data_parallel > 1 and not self.by_ddp

    def place(self, rank: int) -> dict[str, int]:
        """The coordinates of `rank`."""
        place = {}
        for dim, degree in zip(reversed(DIMS), reversed(self.shape), strict=True):
            rank, place[dim] = divmod(rank, degree)
        return place

    def rank(self, place: Mapping[str, int]) -> int:
        """The rank with these coordinates."""
        rank = 0
        for dim, degree in zip(DIMS, self.shape, strict=True):
            rank = rank * degree + place[dim]
        return rank

    def data_rank(self, rank: int) -> int:
        """Which of the `data_parallel` parts of a step's samples the rank sees."""
        place = self.place(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def alike(self, rank: int, dims: tuple[str, ...]) -> list[int]:
        """The ranks that differ from `rank` in no dimension but `dims`, in their order."""
        place = self.place(rank)
        ranges = [range(degree) if dim in dims else (place[dim],) for dim, degree in zip(DIMS, self.shape, strict=True)]
        return [self.rank(dict(zip(DIMS, where, strict=True))) for where in itertools.product(*ranges)]

    def stage(self, rank: int) -> list[int]:
        """The ranks that have the same layers as `rank`."""
        return self.alike(rank, WITHIN_STAGE)

    def at_stage(self, rank: int, stage: int) -> int:
        """The rank at the same place of another stage."""
        return self.rank({**self.place(rank), "pp": stage})

    def at_ends(self, rank: int, dims: tuple[str, ...]) -> list[int]:
        """As `alike`, on the first and on the last stage: the ranks that hold what both of these hold."""
        return [other for other in self.alike(rank, ("pp", *dims)) if self.place(other)["pp"] in (0, self.pp - 1)]

    def to_json(self) -> dict[str, int]:
        """The form in a manifest."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp, "pp": self.pp}

    def words(self) -> Iterator[str]:
        """The degrees above 1, or the first if all are 1."""
        above = {dim: degree for dim, degree in self.to_json().items() if degree > 1}
        yield from (f"{dim} {degree}" for dim, degree in (above or {"dp_replicate": 1}).items())


ALONE = Mesh()
"""One rank."""


def mesh_of(spec: Spec) -> Mesh:
    """The mesh that a spec asks for."""
    strategy = spec.strategy
    return Mesh(strategy.pp, strategy.replicas(spec.world_size), strategy.dp_shard, strategy.tp)
