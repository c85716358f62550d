"""Weights as a Hugging Face folder: `model.safetensors`, or shards with an index, beside a note of where they are from.

Headers are written first, then the state is read stretch by stretch and each goes to its place, so that one piece is
mapped at a time, or the pieces of one tensor put together, whatever the size of the model. All of it happens in a
folder beside the target, which gets its name when everything is there and durable.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...specs.dtypes import DTYPE_BYTES
from .. import faults
from ..format import files
from ..format.jsonfile import Unreadable
from ..lock import FolderLock
from ..stores.access import NO_ROOM
from ..stores.store import Progress
from .recovery import Opened
from .stretches import Stretch
from .whole import Facts, facts_of, read_whole

PREFIX = "model."
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NOTE = "dtrain-export.json"
FORMAT = "dtrain-export-1"
CHUNK = 64 * 2**20


@dataclass(frozen=True)
class OutFile:
    """One file to write: its header, and for each of its tensors the position in the file."""

    name: str
    header: bytes
    positions: dict[str, int]
    nbytes: int


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: dict[str, int]
    """Bytes by name."""
    tensors: int
    tensor_bytes: int
    state_digest: str
    tied: dict[str, str]
    """Further names of shared parameters → the name they are stored under."""


def export(
    opened: Opened,
    out: Path,
    max_shard_bytes: int,
    about: Mapping[str, Any],
    told: Progress | None = None,
    *,
    ema: bool = False,
) -> Exported:
    """Write the weights of a checkpoint into the new folder `out`, every byte verified as it is read.

    With `ema` the averages of those that have one.

    `about` goes into the note. Raises FileExistsError when `out` holds something, Locked while another export writes
    there, Unreadable when the checkpoint is damaged, OSError when the place fails; nothing is left then.
    """
    facts = facts_of(opened)
    weights = {name.removeprefix(PREFIX): info for name, info in facts.items() if name.startswith(PREFIX)}
    if not weights:
        raise Unreadable(f"{opened.candidate.folder}: there are no weights in it")
    stored = {name: f"{PREFIX}{name}" for name in weights}
    if ema:
        stored |= {name: average for name in weights if (average := f"optimizer.{name}.ema") in facts}
    planned = plan(weights, max_shard_bytes)
    needed = sum(file.nbytes for file in planned)
    with _appearing(out, needed) as folder:
        digest = _write(opened, facts, planned, folder, told, stored)
        tied = {
            alias.removeprefix(PREFIX): kept.removeprefix(PREFIX)
            for alias, kept in (opened.meta.get("ties") or {}).items()
        }
        done = Exported(
            {file.name: file.nbytes for file in planned},
            len(weights),
            sum(info.nbytes for info in weights.values()),
            digest,
            tied,
        )
        if len(planned) > 1:
            files.write_new(folder / INDEX, _pretty(_index(planned, done.tensor_bytes)))
        note = {"format": FORMAT, **about, "state_digest": digest, "tied": tied, "files": done.files}
        files.write_new(folder / NOTE, _pretty(note))
    return done


def plan(weights: Mapping[str, Facts], max_shard_bytes: int) -> list[OutFile]:
    """Which tensor goes where: in order of their names, as many to a file as fit, a larger one alone."""
    groups: list[dict[str, Facts]] = [{}]
    filled = 0
    for name in sorted(weights):
        nbytes = weights[name].nbytes
        if groups[-1] and filled + nbytes > max_shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = weights[name]
        filled += nbytes
    count = len(groups)
    if count == 1:
        return [_out_file(SINGLE, groups[0])]
    return [
        _out_file(f"model-{number:05d}-of-{count:05d}.safetensors", group) for number, group in enumerate(groups, 1)
    ]


def _out_file(name: str, group: Mapping[str, Facts]) -> OutFile:
    """The widest dtypes first, so that every tensor is aligned."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for tensor in sorted(group, key=lambda tensor: (-DTYPE_BYTES[group[tensor].dtype], tensor)):
        facts, begins[tensor] = group[tensor], end
        end += facts.nbytes
        table[tensor] = {
            "dtype": facts.dtype,
            "shape": list(facts.shape),
            "data_offsets": [begins[tensor], end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    return OutFile(name, header, {tensor: len(header) + at for tensor, at in begins.items()}, len(header) + end)


def _index(planned: Sequence[OutFile], tensor_bytes: int) -> dict[str, Any]:
    weight_map = {tensor: file.name for file in planned for tensor in file.positions}
    return {"metadata": {"total_size": tensor_bytes}, "weight_map": dict(sorted(weight_map.items()))}


def _pretty(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _write(
    opened: Opened,
    facts: Mapping[str, Facts],
    planned: Sequence[OutFile],
    folder: Path,
    told: Progress | None,
    stored: Mapping[str, str],
) -> str:
    """Write all shards, each weight from what it is `stored` as.

    Returns the state digest of the checkpoint, for which all of it is read.
    """
    places: dict[str, tuple[Path, int]] = {}
    for file in planned:
        path = folder / file.name
        with files.creating(path) as descriptor:
            files.write(descriptor, file.header, path)
            os.ftruncate(descriptor, file.nbytes)
        places |= {stored[tensor]: (path, position) for tensor, position in file.positions.items()}

    def take(stretch: Stretch) -> None:
        if stretch.name in places:
            path, position = places[stretch.name]
            _put(path, position + stretch.begin, stretch.data)

    digest = read_whole(opened, facts, told, take)
    for file in planned:
        with _opened(folder / file.name) as descriptor:
            files.sync(descriptor, folder / file.name)
    return digest


def _put(path: Path, position: int, data: memoryview) -> None:
    """Write one stretch; every view is released, so that its file can be unmapped even when this fails."""
    with _opened(path) as descriptor:
        done = 0
        while done < len(data):
            with data[done : done + CHUNK] as chunk:
                faults.operation("disk.write", path, len(chunk))
                done += os.pwrite(descriptor, chunk, position + done)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _appearing(out: Path, needed: int) -> Iterator[Path]:
    """A folder that becomes `out` at the end, or goes away; what a killed export left there goes first."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(errno.EEXIST, "exists and is not an empty folder", str(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f".{out.name}.dtrain-export")
    folder.mkdir(exist_ok=True)
    with FolderLock(folder):
        mine = folder
        try:
            _clear(folder)
            if needed > _free(out.parent):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield folder
            files.sync_dir(folder)
            faults.operation("disk.rename", folder, str(out))
            mine = folder.rename(out)  # takes the place of an empty folder
            files.sync_dir(out.parent)
        except BaseException as error:
            shutil.rmtree(mine, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                room = f"the export needs {needed} bytes, free there: {_free(out.parent)}"
                raise OSError(error.errno, f"{os.strerror(error.errno)}: {room}", str(out)) from error
            raise


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _free(folder: Path) -> int:
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize
