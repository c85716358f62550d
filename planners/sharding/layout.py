"""Which part of every tensor each rank holds, by the strategy: what the engine does with a model, in arithmetic.

Tensor parallel cuts first, in equal parts: matrices that open a part of a layer, embedding and head by their rows,
those that close it by their columns (Shoeybi et al. 2019, arXiv:1909.08053); norms are whole. Then FSDP2 cuts the rows
of what is left in parts of ceil(rows / dp_shard), so that the last ranks may hold less, or nothing. A pipeline's stage
has its layers' tensors only; a tied embedding is with the first and with the last one. Moments are cut as their
parameter; step counters are whole in a stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...specs.models import GptModel, Spec, Training
from .layers import layers_of_stages, stages_per_rank
from .mesh import DIMS, WITHIN_STAGE, Mesh, mesh_of
from .shards import Held, Piece, TensorInfo, own, shard_bytes
from .state import kept

_OPENING = ("wq.weight", "wk.weight", "wv.weight", "gate.weight", "up.weight", "embedding.weight", "head.weight")
_CLOSING = ("wo.weight", "down.weight")
_LAYER = re.compile(r"layers\.(\d+)\.")
EMBEDDING = "embedding.weight"
FEW_RANKS = 64
"""Up to this many ranks are counted one by one."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """What the plan of a model of one's own cuts; how the built-in decoder is cut follows from the names."""

    cut_by: Mapping[str, int]
    """Dimension along which tensor parallel cuts a parameter."""
    stages: tuple[frozenset[str], ...]
    """Names of the parameters on each rank of a pipeline; one set of all names without one."""


@dataclass(frozen=True)
class Layout:
    """How the parameters of one job lie on its ranks."""

    mesh: Mesh
    stages: tuple[frozenset[str], ...]
    """Names of the parameters on each rank of a pipeline; one set of all names without one."""
    cut_by: Mapping[str, int]
    """Dimension along which tensor parallel cuts a parameter."""
    parameters: tuple[TensorInfo, ...]
    training: Training
    shared: frozenset[str] = frozenset()
    """Parameters that the first and the last stage of a pipeline both have: a tied embedding."""

    def box(self, tensor: TensorInfo, of: str, place: dict[str, int]) -> Held | None:
        """What the rank at `place` holds of a tensor that is cut as the parameter `of`, its holders left out."""
        offset, shape = [0] * len(tensor.shape), [*tensor.shape]
        if of in self.cut_by and self.mesh.tp > 1 and tensor.shape:
            dim = self.cut_by[of]
            offset[dim], shape[dim] = _part(shape[dim], self.mesh.tp, place["tp"])
        if self.mesh.dp_shard > 1 and tensor.shape:
            first, shape[0] = _part(shape[0], self.mesh.dp_shard, place["dp_shard"])
            offset[0] += first
        if 0 in shape and 0 not in tensor.shape:
            return None
        return Held(tensor, tuple(offset), tuple(shape), ())

    def held(self, rank: int) -> list[Held]:
        """What `rank` holds of the state, in the order in which it is stored."""
        place = self.mesh.place(rank)
        alike = _Alike(self.mesh, rank)
        return [
            Held(box.tensor, box.offset, box.shape, alike.holders(self._dims(box.tensor, of), ends=of in self.shared))
            for tensor, of in self._state(place["pp"])
            if (box := self.box(tensor, of, place)) is not None
        ]

    def _dims(self, tensor: TensorInfo, of: str) -> tuple[str, ...]:
        """The dimensions of the mesh over which a tensor is cut."""
        if not tensor.shape:
            return ()
        cut = ["dp_shard"] if self.mesh.data_parallel > 1 and self.mesh.dp_shard > 1 else []
        return (*cut, "tp") if of in self.cut_by else tuple(cut)

    def _state(self, pp_rank: int) -> Iterator[tuple[TensorInfo, str]]:
        """Tensors of the state on one rank of a pipeline, each with the parameter that it belongs to."""
        mine = [p for p in self.parameters if p.name in self.stages[pp_rank]]
        for p in mine:
            yield TensorInfo(f"model.{p.name}", p.dtype, p.shape), p.name
        for p in mine:
            for tensor in kept(p, self.training):
                yield tensor, p.name

    def shard(self, rank: int) -> list[Piece]:
        """What `rank` stores of the state."""
        return own(self.held(rank), rank)

    def parameter_bytes(self, names: Iterable[str], place: dict[str, int], *, gathered: bool) -> int:
        """Bytes of some parameters on one rank; `gathered`: while FSDP2 has put its parts together."""
        whole = Layout(Mesh(self.mesh.pp, 1, 1, self.mesh.tp), self.stages, self.cut_by, self.parameters, self.training)
        of, wanted = (whole if gathered else self), set(names)
        boxes = (of.box(p, p.name, place) for p in self.parameters if p.name in wanted)
        return sum(box.nbytes for box in boxes if box is not None)


def _part(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Begin and length of what one of `ranks` gets of a dimension: the last ones may get less, or nothing."""
    chunk = -(-size // ranks)
    first = min(rank * chunk, size)
    return first, min(chunk, size - first)


class _Alike:
    """Who holds the same as one rank, found once for each set of dimensions."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self._found: dict[tuple[tuple[str, ...], bool], tuple[int, ...]] = {}

    def holders(self, cut: tuple[str, ...], *, ends: bool) -> tuple[int, ...]:
        if (cut, ends) not in self._found:
            others = tuple(dim for dim in WITHIN_STAGE if dim not in cut)
            alike = self.mesh.at_ends if ends else self.mesh.alike
            self._found[cut, ends] = tuple(alike(self.rank, others))
        return self._found[cut, ends]


def layout_of(spec: Spec, parameters: Sequence[TensorInfo], cuts: Cuts | None = None) -> Layout:
    """How the strategy of a spec lays these parameters out; `cuts` are those of a model with a plan of its own."""
    mesh = mesh_of(spec)
    if cuts is not None:
        return Layout(mesh, cuts.stages, cuts.cut_by, tuple(parameters), spec.training)
    cut_by: dict[str, int] = {}
    if mesh.tp > 1:
        cut_by = {p.name: 0 for p in parameters if p.name.endswith(_OPENING)}
        cut_by |= {p.name: 1 for p in parameters if p.name.endswith(_CLOSING)}
    return Layout(mesh, _stages(spec, parameters), cut_by, tuple(parameters), spec.training, shared_by_ends(spec))


def shared_by_ends(spec: Spec) -> frozenset[str]:
    """Names of the parameters that the first and the last stage of a pipeline both hold."""
    tied = isinstance(spec.model, GptModel) and spec.model.tie_embeddings and spec.strategy.pp > 1
    return frozenset({EMBEDDING}) if tied else frozenset()


def _stages(spec: Spec, parameters: Sequence[TensorInfo]) -> tuple[frozenset[str], ...]:
    names = frozenset(p.name for p in parameters)
    if spec.strategy.pp == 1 or not isinstance(spec.model, GptModel):
        return (names,)
    pp, each = spec.strategy.pp, stages_per_rank(spec.strategy)
    ranges = layers_of_stages(spec.model.n_layers, pp * each)
    at = {layer: stage % pp for stage, layers in enumerate(ranges) for layer in layers}
    found: list[set[str]] = [set() for _ in range(pp)]
    for name in names:
        match = _LAYER.match(name)
        found[at[int(match[1])] if match else 0 if name == EMBEDDING else pp - 1].add(name)
    found[-1] |= shared_by_ends(spec)
    return tuple(frozenset(stage) for stage in found)


def largest_shard(layout: Layout) -> list[Piece]:
    """The largest shard.

    Of many ranks the first one of each stage is looked at: no part is larger than the first.
    """
    mesh = layout.mesh
    ranks: Iterable[int] = range(mesh.world)
    if mesh.world > FEW_RANKS:
        ranks = (mesh.rank({**dict.fromkeys(DIMS, 0), "pp": stage}) for stage in range(mesh.pp))
    return max(map(layout.shard, ranks), key=shard_bytes)
