"""What a tier holds, told from the beginnings of the manifests: enough to list thousands of checkpoints at once.

A manifest is nearly all tensors. Its own digest covers the text as it was written, so that it can be checked without
parsing, and all that a list needs stands before the tensors, since the keys are sorted. Whoever opens a checkpoint
parses all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash

from ..commit import is_somebodys
from ..format.jsonfile import Unreadable
from ..format.layout import MANIFEST, Version, parse_version
from ..format.manifest import FORMAT, MAX_BYTES, parse_manifest
from ..stores.directory import DirectoryStore
from ..stores.store import StoreError
from ..tier import Rejected, Tier

REQUESTS = 16
"""At the same time, to a store that answers over a network."""
_BEGIN = b'{"digest":"'
_BODY = len(_BEGIN) + 32 + 2
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Glance:
    """A checkpoint whose manifest is as it was written and whose files have their sizes."""

    version: Version
    nbytes: int
    """Bytes of all files."""
    run_id: str
    """The run that made it."""


def glance(tier: Tier) -> tuple[list[Glance], list[Rejected]]:
    """The run's checkpoints and the folders named like one that are not usable, each newest first.

    Raises OSError when the place cannot be read.
    """
    named = ((parse_version(folder), folder) for folder in tier.store.folders())
    versions = sorted((version for version, _ in named if version is not None), reverse=True)
    found = _map(tier, versions)
    good = [one for one in found if isinstance(one, Glance)]
    return good, [one for one in found if isinstance(one, Rejected)]


def _map(tier: Tier, versions: Iterable[Version]) -> list[Glance | Rejected | None]:
    if isinstance(tier.store, DirectoryStore):
        return [_look(tier, version) for version in versions]
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(lambda version: _look(tier, version), versions))


def _look(tier: Tier, version: Version) -> Glance | Rejected | None:
    """One folder; None for another run's checkpoint, and for what is none."""
    folder, where = version.dirname, tier.store.where
    try:
        head = _head(_manifest(tier, folder), folder, where)
        files = head["files"]
        sizes = tier.store.files(folder)
        for name, info in files.items():
            if sizes.get(name) != info["bytes"]:
                is_there = f"{sizes[name]} bytes, should be {info['bytes']}" if name in sizes else "missing"
                raise Unreadable(f"{where}/{folder}/{name}: {is_there}")
    except Unreadable as error:
        if is_somebodys(tier.store, folder):
            return None
        return Rejected(tier.name, f"{where}/{folder}", version, str(error))
    if tier.run_id not in (None, head["run_id"]):
        return None
    return Glance(version, sum(int(info["bytes"]) for info in files.values()), str(head["run_id"]))


def _manifest(tier: Tier, folder: str) -> bytes:
    try:
        return tier.store.read(folder, MANIFEST, MAX_BYTES)
    except StoreError:
        raise  # the place fails: that says nothing about the checkpoint
    except OSError as error:
        raise Unreadable(f"{tier.store.where}/{folder}/{MANIFEST}: {error.strerror or error}") from error


def _head(data: bytes, folder: str, where: str) -> dict[str, Any]:
    """What stands before the tensors; of a manifest that is not written the way we do it, all. Raises Unreadable."""
    if data.startswith(_BEGIN) and _digest_is_right(data):
        try:
            head = _before_tensors(data[_BODY:].decode())
            named = Version(attempt=head["attempt"], step=head["step"]).dirname
            sizes = [info["bytes"] for info in head["files"].values()]
            is_ours = (named, head["format"]) == (folder, FORMAT) and len(sizes) == len(head["rng"]) > 0
            if is_ours and all(isinstance(size, int) for size in sizes):
                return head
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            pass  # whatever is wrong with it, the one who reads all of it can say
    return parse_manifest(data, folder, where).body


def _digest_is_right(data: bytes) -> bool:
    hasher = xxhash.xxh3_128(b"{")
    with memoryview(data) as view, view[_BODY:] as body:
        hasher.update(body)
    return data[len(_BEGIN) : _BODY] == hasher.hexdigest().encode() + b'",'


def _before_tensors(text: str) -> dict[str, Any]:
    head: dict[str, Any] = {}
    position = 0
    while True:
        key, position = _DECODER.raw_decode(text, position)
        if key == "tensors":
            return head
        head[key], position = _DECODER.raw_decode(text, position + 1)
        position += 1
