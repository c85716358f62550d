"""The live tensors of a rank's pieces: where they are, and whether somebody wrote into them while they were copied."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ...planners.packing import runs_of
from ...planners.sharding.shards import Piece
from ..layout import local_of
from .copier import Item
from .finite import FLOATS, Floats
from .packs import Gathered, Pack
from .packs import pack as pack_of
from .state import StateError, TrainState, tensor_bytes

_VERSION = operator.attrgetter("_version")


class Place(NamedTuple):
    """Where a piece is found, and where it goes."""

    parameter: nn.Parameter
    key: str | None
    """Under which the optimizer keeps the tensor for that parameter; None: the parameter itself."""
    begin: int
    """First byte in the tensor."""
    nbytes: int
    offset: int
    """First byte in the slot's data."""
    floats: Floats | None
    """Set where the numbers must be finite: in what is trained and in what the optimizer keeps of it."""


class Marks(NamedTuple):
    """What changes when somebody writes into a tensor, or puts another one in its place."""

    versions: list[int]
    addresses: list[int]


class _OnlyItself(TorchFunctionMode):
    """A tensor equals itself and nothing else: so lists and dicts of tensors are compared in C, by what they hold."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> bool:
        """Python has compared two tensors because they are not the same one."""
        return False


class Live:
    """Finds what is to be copied at the step boundary, and tells whether that stayed as it was.

    The training thread waits for this, so it makes nothing anew, and looks at thousands of tensors without a line of
    Python for each. What is tiny is gathered there and then, and may change as it likes after that.
    """

    def __init__(self, state: TrainState, pieces: Sequence[Piece]) -> None:
        """Nothing is looked up yet; the layout in the slot is that of the pieces in their order."""
        self.state, self.pieces = state, pieces
        self.items: list[Item] = []
        self.cut = any(isinstance(parameter, DTensor) for parameter in state.model.parameters())
        self._names = {parameter: name for name, parameter in state.model.named_parameters()}
        self._places = _places(state, pieces)
        kept = state.optimizer.state
        self._kept_at_start = len(kept)
        self._kept_of = {place.parameter: len(kept.get(place.parameter, ())) for place in self._places}
        """How much the optimizer keeps of each parameter."""
        self._runs: list[range] = []
        """The pieces of each item: small ones that follow each other are copied as one."""
        self._packs: dict[int, Pack] = {}
        """Those of the items that are put together."""
        self._gathered: list[Gathered] = []
        self._kept: list[dict[Any, Any]] | None = None
        """What the optimizer keeps, as it was when the items were found."""
        self._found: list[Tensor] = []
        """Tensors that are still where they were found as long as they have these addresses, the watched ones first."""
        self._addresses: list[int] = []
        self._watched: dict[str, Tensor] = {}
        self._marks = Marks([], [])
        """Those of the watched tensors when their copy was begun."""

    @property
    def run_lengths(self) -> list[int]:
        """How many pieces each item holds; empty where each holds one."""
        return list(map(len, self._runs)) if self._packs else []

    def look(self) -> None:
        """Find the tensors anew if any is another one than before, gather what is tiny, mark the others."""
        if not self._in_place():
            self._find()
        for pack in self._gathered:
            pack.fill()
        self._marks = Marks(self._versions(), self._addresses[: len(self._watched)])

    def changed(self) -> str | None:
        """The name of a tensor that somebody wrote into since `look`, or put another one in its place."""
        before, now = self._marks, Marks(self._versions(), self._addresses_of(list(self._watched.values())))
        if now == before:
            return None
        marks = zip(self._watched, *before, *now, strict=True)
        return next(name for name, *mark in marks if mark[:2] != mark[2:])

    def written(self) -> str | None:
        """Like `changed`, in half the time: one that is in the place of another is not looked for."""
        return None if self._versions() == self._marks.versions else self.changed()

    def last_items(self) -> dict[Tensor, int]:
        """The number of the last item with something of a parameter, or of what the optimizer keeps of it."""
        return {
            place.parameter: number
            for number, run in enumerate(self._runs)
            for place in self._places[run.start : run.stop]
        }

    def not_finite(self, number: int) -> str:
        """The tensor for which item `number` was given up: of a pack, the first piece that is not finite."""
        run, pack, floats = self._runs[number], self._packs.get(number), self.items[number].floats
        if pack is not None and floats is not None:
            data, end = tensor_bytes(pack.together), 0
            for piece in self.pieces[run.start : run.stop]:
                begin, end = end, end + piece.nbytes
                if not floats.all_in(data[begin:end]):
                    return piece.tensor.name
        return self.pieces[run.start].tensor.name

    def _in_place(self) -> bool:
        with _OnlyItself():
            same = list(self.state.optimizer.state.values()) == self._kept
        return same and self._addresses_of(self._found) == self._addresses

    def _addresses_of(self, tensors: Sequence[Tensor]) -> list[int]:
        return list(map(torch.Tensor.data_ptr, map(local_of, tensors) if self.cut else tensors))

    def _versions(self) -> list[int]:
        return list(map(_VERSION, self._watched.values()))

    def _find(self) -> None:
        tensors = self._live()
        whole = [local_of(tensor) for tensor in tensors]
        alike = [(tensor.dtype, place.floats) for tensor, place in zip(whole, self._places, strict=True)]
        self._runs = runs_of(self.pieces, alike, [tensor.is_contiguous() for tensor in whole])
        self.items, self._packs, self._gathered, self._watched = [], {}, [], {}
        gathered: dict[Tensor, None] = {}
        for number, run in enumerate(self._runs):
            first = self._places[run.start]
            if len(run) == 1:
                self.items.append(Item(whole[run.start], *first[2:]))
                self._watched[self.pieces[run.start].tensor.name] = tensors[run.start]
                continue
            pack = pack_of(self.pieces[run.start : run.stop], whole[run.start : run.stop])
            self._packs[number] = pack
            parameters = list({self._places[piece].parameter: None for piece in run})
            if isinstance(pack, Gathered):
                self._gathered.append(pack)
                gathered |= dict.fromkeys(parameters)
            else:
                self._watch_small(parameters)
            nbytes = sum(piece.nbytes for piece in self.pieces[run.start : run.stop])
            to_fill = None if isinstance(pack, Gathered) else pack
            self.items.append(Item(pack.together, 0, nbytes, first.offset, first.floats, to_fill))
        self._found = [*self._watched.values(), *gathered]
        self._addresses = self._addresses_of(self._found)
        self._kept = [dict(kept) for kept in self.state.optimizer.state.values()]

    def _watch_small(self, parameters: Sequence[nn.Parameter]) -> None:
        """What is kept of a small weight changes with it, so only that is looked at, and one step counter of a pack.

        One of them tells of every update: fused optimizers leave the version of what they write as it is.
        """
        for parameter in parameters:
            name = f"model.{self._names[parameter]}"
            if name not in self.state.moving:
                self._watched[name] = parameter
        for parameter in parameters:
            for key, kept in self.state.optimizer.state.get(parameter, {}).items():
                if kept.dim() == 0:
                    self._watched[f"optimizer.{self._names[parameter]}.{key}"] = kept
                    return

    def _live(self) -> list[Tensor]:
        """The live tensor of each place; raises StateError when the optimizer keeps others than at the start."""
        kept = self.state.optimizer.state
        same = len(kept) == self._kept_at_start
        same &= all(len(kept.get(parameter, ())) == count for parameter, count in self._kept_of.items())
        try:
            tensors = [p.parameter if p.key is None else kept[p.parameter][p.key] for p in self._places]
        except KeyError:
            same = False
        if not same:
            raise StateError("the optimizer keeps other tensors than at the start; they cannot be stored")
        return tensors


def _places(state: TrainState, pieces: Sequence[Piece]) -> list[Place]:
    places, offset, found = [], 0, state.places()
    for piece in pieces:
        parameter, key = found[piece.tensor.name]
        trained = key is not None or parameter.requires_grad
        floats = FLOATS.get(piece.tensor.dtype) if trained else None
        places.append(Place(parameter, key, piece.offset_bytes, piece.nbytes, offset, floats))
        offset += piece.nbytes
    return places
