"""The manifest: what a checkpoint consists of. Written last; its presence makes the checkpoint committed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .digest import digest
from .jsonfile import Unreadable, dumps, read
from .layout import FILE_NAME, MANIFEST, Version
from .memory import SlotRecord
from .shardfile import Entry, Shard

FORMAT = "dtrain-checkpoint-1"


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
        return dumps({**self.body, "digest": digest(dumps(self.body))})


def build(
    version: Version,
    shards: Sequence[tuple[str, Shard, SlotRecord, int, str]],
) -> Manifest:
    """Put a manifest together from (file name, header, commit record, bytes, digest) of every rank's file."""
    first = shards[0][2]
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    rng: dict[str, Any] = {}
    for name, shard, record, nbytes, content in shards:
        files[name] = {"bytes": nbytes, "digest": content, "header_digest": record.header_digest}
        for entry, entry_digest in zip(shard.entries, record.digests, strict=True):
            if entry.is_state:
                _add_piece(tensors, name, entry, entry_digest)
            else:
                where = rng.setdefault(str(record.rank), {"file": name, "tensors": {}})
                where["tensors"][entry.name] = entry_digest
    meta = dict(first.meta)
    body = {
        "format": FORMAT,
        "run_id": first.run_id,
        "step": version.step,
        "attempt": version.attempt,
        "world": first.world,
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


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint's folder; raises Unreadable with the reason."""
    body = read(folder / MANIFEST)
    where = str(folder / MANIFEST)
    stored = body.pop("digest", None)
    if stored != digest(dumps(body)):
        raise Unreadable(f"{where}: the manifest does not match its digest")
    try:
        _check(body, folder.name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
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
