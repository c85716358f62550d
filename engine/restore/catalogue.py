"""What the ranks hold together: every tensor of the state, whoever has it, and the digest over all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...planners.sharding.shards import Piece, TensorInfo, own, replicated
from ...tiers.format.digest import digest, state_digest
from ...tiers.format.jsonfile import dumps
from ..layout import local_of
from ..parallel.context import Context
from ..snapshot.state import DTYPE_TAGS, StateError, TrainState, infos, tensor_bytes

TORCH_DTYPES = {tag: dtype for dtype, tag in DTYPE_TAGS.items()}


@dataclass(frozen=True)
class Place:
    """A box of a tensor and the rank that gives it."""

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Catalogue:
    """Every tensor of the state, over all ranks."""

    tensors: dict[str, TensorInfo]
    places: dict[str, list[Place]]
    """Boxes that make up each tensor, none of them twice."""
    ties: dict[str, str]


def catalogue(state: TrainState, context: Context) -> Catalogue:
    """Put together what all ranks hold; every rank must call it."""
    if context.device_mesh is None:
        return whole_here(state)
    said = {"pieces": [_said(piece) for piece in _given(state, context)], "ties": state.ties()}
    tensors: dict[str, TensorInfo] = {}
    places: dict[str, list[Place]] = {}
    ties: dict[str, str] = {}
    for rank, data in enumerate(context.gather_bytes(dumps(said))):
        heard = json.loads(data)
        ties |= heard["ties"]
        for name, dtype, whole, offset, shape in heard["pieces"]:
            tensors[name] = TensorInfo(name, dtype, tuple(whole))
            places.setdefault(name, []).append(Place(rank, tuple(offset), tuple(shape)))
    return Catalogue(tensors, places, ties)


def whole_here(state: TrainState) -> Catalogue:
    """The catalogue of a state that is whole on every rank."""
    tensors = {info.name: info for info in infos(state.constant() | state.changing())}
    places = {name: [Place(0, (0,) * len(info.shape), info.shape)] for name, info in tensors.items()}
    return Catalogue(tensors, places, state.ties())


def _given(state: TrainState, context: Context) -> list[Piece]:
    """The pieces that this rank stores, buffers included."""
    pieces = own(state.held(), context.rank)
    if context.rank == context.stage[0]:
        pieces += [Piece(box, 0, box.rows) for box in replicated(infos(state.changing()), 1)]
    return pieces


def _said(piece: Piece) -> list[Any]:
    return [piece.tensor.name, piece.tensor.dtype, list(piece.tensor.shape), list(piece.offset), list(piece.shape)]


def state_digest_of(state: TrainState, everything: Catalogue, context: Context) -> str:
    """The state digest of the live state, on rank 0; every rank must call it. Elsewhere an empty text.

    Rank 0 puts the tensors together one by one, so it never holds more than one of another rank's.
    """
    if context.device_mesh is None:
        return state.digest() if context.rank == 0 else ""
    mine = {piece.tensor.name: piece for piece in _given(state, context)}
    live = state.constant() | state.changing()
    if context.rank != 0:
        for name in sorted(everything.places):
            if name in mine:
                _send(local_of(live[name]), mine[name], context)
        return ""
    return state_digest(_gathered(everything, live, mine, context))


def check_ends(state: TrainState, context: Context) -> None:
    """Raise StateError unless both ends of a pipeline hold the same of what they share; every rank must call it."""
    mine = b""
    if state.ends is not None and state.ends.parameter is not None:
        parameter = state.ends.parameter
        held = [parameter, *(value for value in state.optimizer.state[parameter].values() if isinstance(value, Tensor))]
        mine = "".join(digest(tensor_bytes(local_of(tensor))) for tensor in held).encode()
    found = context.gather_bytes(mine)
    first, last = (found[context.mesh.at_stage(context.rank, stage)] for stage in (0, context.mesh.pp - 1))
    if not context.all_agree(first == last):
        raise StateError("the first and the last stage of the pipeline do not hold the same tied embedding")


def _gathered(
    everything: Catalogue, live: Mapping[str, Tensor], mine: Mapping[str, Piece], context: Context
) -> Iterator[tuple[str, str, tuple[int, ...], str]]:
    for name in sorted(everything.places):
        info = everything.tensors[name]
        whole = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype])
        for place in everything.places[name]:
            if place.rank == context.rank:
                part = _rows(local_of(live[name]), mine[name]).cpu()
            else:
                part = torch.empty(place.shape, dtype=whole.dtype)
                if part.numel():
                    dist.recv(part.reshape(-1).view(torch.uint8), place.rank, group=context.control)
            where = tuple(slice(at, at + size) for at, size in zip(place.offset, place.shape, strict=True))
            whole[where] = part
        yield name, info.dtype, info.shape, digest(tensor_bytes(whole))


def _send(tensor: Tensor, piece: Piece, context: Context) -> None:
    part = _rows(tensor, piece).contiguous().cpu()
    if part.numel():
        dist.send(part.reshape(-1).view(torch.uint8), 0, group=context.control)


def _rows(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.detach()[piece.start : piece.stop] if tensor.dim() else tensor.detach()
