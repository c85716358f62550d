"""The manifest: what a checkpoint consists of. Written last; its presence makes the checkpoint committed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .digest import digest
from .jsonfile import Unreadable, dumps
from .layout import FILE_NAME, MANIFEST, Version
from .shardfile import Entry

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
        entries = [[e.name, e.dtype, list(e.shape), e.start, list(e.global_shape), e.nbytes] for e in self.entries]
        return {**vars(self), "entries": entries, "digests": list(self.digests)}


def shard_file_from_json(value: dict[str, Any]) -> ShardFile:
    """Read the form of `to_json`; raises Unreadable."""
    try:
        entries = tuple(
            Entry(name, dtype, tuple(shape), start, tuple(whole), nbytes)
            for name, dtype, shape, start, whole, nbytes in value["entries"]
        )
        if FILE_NAME.fullmatch(value["name"]) is None:
            raise ValueError(f"file name {value['name']!r}")
        return ShardFile(**{**value, "entries": entries, "digests": tuple(value["digests"])})
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
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(int(info["bytes"]) for info in self.files.values())

    def to_bytes(self) -> bytes:
        """JSON with a digest of itself."""
        text = dumps(self.body)
        return b'{"digest":"' + digest(text).encode() + b'",' + text[1:]


def build(version: Version, world: int, run_id: str, meta: dict[str, Any], shards: Sequence[ShardFile]) -> Manifest:
    """Put a manifest together from the description of every rank's file; raises Unreadable when one is missing."""
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
    offset = [entry.start, *([0] * (len(entry.shape) - 1))] if entry.shape else []
    info["pieces"].append({"file": file, "offset": offset, "shape": list(entry.shape), "digest": content})


def parse_manifest(data: bytes, folder: str, where: str) -> Manifest:
    """Read and check the manifest of the checkpoint called `folder`; raises Unreadable with the reason."""
    where = f"{where}/{folder}/{MANIFEST}"
    try:
        body = json.loads(data)
        stored = body.pop("digest", None)
    except (ValueError, RecursionError, AttributeError) as error:
        raise Unreadable(f"{where}: not a JSON object ({error})") from error
    try:
        if stored != digest(dumps(body)):
            raise Unreadable(f"{where}: the manifest does not match its digest")
        _check(body, folder)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise Unreadable(f"{where}: {error}") from error
    return Manifest(body)


def _check(body: dict[str, Any], dirname: str) -> None:
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']!r}, this dtrain reads {FORMAT!r}")
    if Version(attempt=body["attempt"], step=body["step"]).dirname != dirname:
        raise ValueError(f"it speaks of step {body['step']} attempt {body['attempt']}, the folder is {dirname}")
    if len(body["files"]) != body["world"]:
        raise ValueError(f"{len(body['files'])} files for {body['world']} ranks")
    for name in body["files"]:
        if FILE_NAME.fullmatch(name) is None:
            raise ValueError(f"file name {name!r}")
    if body["rng"].keys() != {str(rank) for rank in range(body["world"])}:
        raise ValueError("the random state of a rank is missing")
    if not isinstance(body["data"]["samples"], int):
        raise ValueError("the position in the data is missing")
    for name, info in body["tensors"].items():
        if not _covers(info["shape"], info["pieces"]) or any(p["file"] not in body["files"] for p in info["pieces"]):
            raise ValueError(f"the pieces of {name!r} do not make up the tensor")


def _covers(shape: list[int], pieces: Iterable[dict[str, Any]]) -> bool:
    """Tell whether row pieces follow each other from the first row to the last."""
    if not shape:
        return len(list(pieces)) == 1
    row = 0
    for piece in sorted(pieces, key=lambda piece: int(piece["offset"][0])):
        if piece["offset"][0] != row or piece["shape"][1:] != shape[1:]:
            return False
        row += piece["shape"][0]
    return row == shape[0]
