"""The manifest: what a checkpoint consists of. Written last; its presence makes the checkpoint committed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...specs.dtypes import DTYPE_BYTES
from .boxes import tile
from .digest import digest
from .jsonfile import Unreadable, dumps
from .layout import MANIFEST, Version, check_name, shard_name
from .shardfile import RNG_PREFIX, Entry

FORMAT = "dtrain-checkpoint-1"
MAX_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ShardFile:
    """One rank's file as the manifest describes it; `digests` are those of the entries, in order."""

    name: str
    rank: int
    nbytes: int
    digest: str
    header_digest: str
    entries: tuple[Entry, ...]
    digests: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Form in which one node tells another."""
        entries = [
            [e.name, e.dtype, list(e.shape), list(e.offset), list(e.global_shape), e.nbytes] for e in self.entries
        ]
        return {**vars(self), "entries": entries, "digests": list(self.digests)}


def shard_file_from_json(value: dict[str, Any]) -> ShardFile:
    """Read the form of `to_json`; raises Unreadable."""
    try:
        entries = tuple(
            Entry(name, dtype, tuple(shape), tuple(offset), tuple(whole), nbytes)
            for name, dtype, shape, offset, whole, nbytes in value["entries"]
        )
        return ShardFile(
            **{**value, "name": check_name(value["name"]), "entries": entries, "digests": tuple(value["digests"])}
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"not the description of a shard ({error})") from error


@dataclass(frozen=True)
class Manifest:
    """A manifest that has been checked; `body` is its JSON without the digest of itself."""

    body: dict[str, Any]

    @property
    def version(self) -> Version:
        """The version of the state."""
        return Version(attempt=self.body["attempt"], step=self.body["step"])

    @property
    def run_id(self) -> str:
        """The run that made it."""
        return str(self.body["run_id"])

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """File name → bytes, digest, and the digests of header and entries."""
        files: dict[str, dict[str, Any]] = self.body["files"]
        return files

    @property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """Tensor name → dtype, global shape, pieces."""
        tensors: dict[str, dict[str, Any]] = self.body["tensors"]
        return tensors

    @property
    def made_by(self) -> Any:
        """Host and folder of the run when it was committed, as the fence says them; nothing where it is not known."""
        return self.body.get("made_by")

    def signed(self, made_by: Mapping[str, str]) -> Manifest:
        """The same with another `made_by`."""
        return Manifest({**self.body, "made_by": dict(made_by)}) if made_by else self

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(int(info["bytes"]) for info in self.files.values())

    def to_bytes(self) -> bytes:
        """JSON with a digest of itself."""
        text = dumps(self.body)
        return b'{"digest":"' + digest(text).encode() + b'",' + text[1:]


def build(version: Version, world: int, run_id: str, meta: dict[str, Any], shards: Sequence[ShardFile]) -> Manifest:
    """Put a manifest together from the description of every rank's file; raises Unreadable when one is missing.

    Raises Unreadable as well when the pieces of a tensor are not exactly the whole of it.
    """
    if sorted(shard.rank for shard in shards) != list(range(world)):
        raise Unreadable(f"{version}: shards of {len(shards)} ranks, should be {world}")
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    rng: dict[str, Any] = {}
    for shard in shards:
        files[shard.name] = {"bytes": shard.nbytes, "digest": shard.digest, "header_digest": shard.header_digest}
        for entry, entry_digest in zip(shard.entries, shard.digests, strict=True):
            if entry.is_state:
                _add_piece(tensors, shard.name, entry, entry_digest)
            else:
                where = rng.setdefault(str(shard.rank), {"file": shard.name, "tensors": {}})
                where["tensors"][entry.name] = entry_digest
    try:
        for name, info in tensors.items():
            _check_pieces(name, info)
    except ValueError as error:
        raise Unreadable(f"{version}: {error}") from error
    body = {
        "format": FORMAT,
        "run_id": run_id,
        "step": version.step,
        "attempt": version.attempt,
        "world": world,
        "files": files,
        "tensors": tensors,
        "rng": rng,
        **meta,
    }
    return Manifest(body)


def _add_piece(tensors: dict[str, Any], file: str, entry: Entry, content: str) -> None:
    info = tensors.setdefault(entry.name, {"dtype": entry.dtype, "shape": list(entry.global_shape), "pieces": []})
    if (info["dtype"], info["shape"]) != (entry.dtype, list(entry.global_shape)):
        raise Unreadable(f"{file}: {entry.name!r} is {entry.dtype} {list(entry.global_shape)}, elsewhere another")
    piece = {"file": file, "offset": list(entry.offset), "shape": list(entry.shape), "digest": content}
    info["pieces"].append(piece)


_HEAD = b'{"digest":"'
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_DIMENSIONS = 64


def parse_manifest(data: bytes, folder: str, where: str) -> Manifest:
    """Read and check the manifest of the checkpoint called `folder`; raises Unreadable with the reason."""
    where = f"{where}/{folder}/{MANIFEST}"
    try:
        body = _body(data)
        _check(body, folder)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise Unreadable(f"{where}: {error}") from error
    return Manifest(body)


def _body(data: bytes) -> dict[str, Any]:
    """The object without its digest, which is that of the bytes as they are, or of the same object as we write it."""
    end = len(_HEAD) + 32
    as_we_write = data.startswith(_HEAD) and data[end : end + 2] == b'",'
    if as_we_write and digest(text := b"{" + data[end + 2 :]).encode() == data[len(_HEAD) : end]:
        return _parse(text)
    body = _parse(data)
    if body.pop("digest", None) != digest(dumps(body)):
        raise ValueError("the manifest does not match its digest")
    return body


def _parse(text: bytes) -> dict[str, Any]:
    value = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_number)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is there twice")
    return table


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _check(body: dict[str, Any], dirname: str) -> None:
    """Every part that dtrain looks into, down to the last type."""
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']!r}, this dtrain reads {FORMAT!r}")
    attempt, step, world = (_count(body[key], key) for key in ("attempt", "step", "world"))
    if Version(attempt=attempt, step=step).dirname != dirname:
        raise ValueError(f"it speaks of step {step} attempt {attempt}, the folder is {dirname}")
    _text(body["run_id"], "run_id")
    if len(body["files"]) != world:
        raise ValueError(f"{len(body['files'])} files for {world} ranks")
    for rank in range(world):
        _check_file(body, rank)
    if len(body["rng"]) != world:
        raise ValueError("the random state of a rank is missing")
    _count(body["data"]["samples"], "the position in the data")
    for name, info in body["tensors"].items():
        _check_tensor(name, info, body["files"])


def _check_file(body: dict[str, Any], rank: int) -> None:
    name = shard_name(rank)
    if name not in body["files"]:
        raise ValueError(f"{name} is missing among the files")
    info, rng = body["files"][name], body["rng"][str(rank)]
    _count(info["bytes"], f"the bytes of {name}")
    _check_digest(info["digest"], name)
    _check_digest(info["header_digest"], name)
    if rng["file"] != name:
        raise ValueError(f"the random state of rank {rank} lies in {rng['file']!r}, not in {name}")
    for tensor, content in rng["tensors"].items():
        if not tensor.startswith(RNG_PREFIX):
            raise ValueError(f"{tensor!r} is no random state")
        _check_digest(content, tensor)


def _check_tensor(name: str, info: dict[str, Any], files: dict[str, Any]) -> None:
    if name.startswith(RNG_PREFIX):
        raise ValueError(f"{name!r} is the name of a random state")
    _shape(info["shape"], name)
    if info["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"{str(info['dtype'])[:40]!r} is no dtype that this dtrain reads ({name!r})")
    for piece in info["pieces"]:
        _check_digest(piece["digest"], name)
        if piece["file"] not in files:
            raise ValueError(f"a piece of {name!r} lies in {piece['file']!r}, which is none of the files")
        _shape(piece["offset"], name)
        _shape(piece["shape"], name)
    _check_pieces(name, info)


def _check_pieces(name: str, info: dict[str, Any]) -> None:
    """Hold the boxes, whose types are right, against the tensor; raises ValueError."""
    pieces = info["pieces"]
    if len({piece["file"] for piece in pieces}) != len(pieces):
        raise ValueError(f"two pieces of {name!r} lie in one file")
    try:
        whole = tile(info["shape"], [(piece["offset"], piece["shape"]) for piece in pieces])
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error
    if not whole:
        raise ValueError(f"the pieces of {name!r} do not make up the tensor")


def _count(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{what} is {str(value)[:40]!r}, not a number of things")
    return value


def _text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {str(value)[:40]!r}, not a text")


def _check_digest(value: object, what: str) -> None:
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise ValueError(f"{str(value)[:40]!r} is not a digest ({what!r})")


def _shape(value: object, what: str) -> list[int]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise ValueError(f"{str(value)[:40]!r} is not a shape ({what!r})")
    return [_count(size, f"a shape of {what!r}") for size in value]
