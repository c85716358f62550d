"""The one seam to the places where checkpoints lie: folders of files that are written once and never changed.

`DirectoryStore` is a local or shared file system, `ObjectStore` a bucket. Commit, retention, verification and
draining are written against `Store` alone. A file is addressed as (folder, name); there is one level of folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..format.digest import Hasher

Progress = Callable[[int], None]
"""Told the bytes moved since the last call."""


class StoreError(OSError):
    """A store cannot be reached or does not do what is asked; the message says where and why."""


class Store(Protocol):
    """A place for checkpoints. Every method raises OSError when the place fails."""

    @property
    def where(self) -> str:
        """The place in words a person can use; never with credentials."""

    @property
    def renames(self) -> bool:
        """Tell whether a whole folder changes its name as one change that is never seen half done."""

    def folders(self) -> list[str]:
        """Names of all folders; [] when the place does not exist yet."""

    def files(self, folder: str) -> dict[str, int]:
        """Bytes of each file in a folder; {} when there is no such folder."""

    def names(self, folder: str) -> list[str]:
        """Names of all that is in a folder, whatever it is; [] when there is no such folder."""

    def read(self, folder: str, name: str, max_bytes: int) -> bytes:
        """A small file whole. Raises FileNotFoundError, and Unreadable when it is larger than `max_bytes`."""

    def create(self, folder: str, name: str, data: bytes) -> None:
        """Write a small file durably and as one change. Raises FileExistsError when the name is taken."""

    def copy_in(
        self, folder: str, name: str, source: Path, told: Progress | None = None, hasher: Hasher | None = None
    ) -> str:
        """Copy a large file in durably and read it back; returns the digest of what the place now holds.

        `hasher` gets what was read, too: in order, and from the start again after a reset.

        Raises FileExistsError when the name is taken.
        """

    def digest(self, folder: str, name: str, told: Progress | None = None) -> str:
        """Digest of what the place holds, past any cache that can be passed. Raises FileNotFoundError."""

    def local(self, folder: str, name: str) -> AbstractContextManager[Path]:
        """A file of this machine with the content: the file itself, or a copy that goes away again."""

    def sync(self, folder: str = "") -> None:
        """Make the names in a folder (by default: the names of the folders) durable."""

    def rename(self, folder: str, new: str) -> None:
        """Give a folder another name, which must not be taken (FileExistsError). Only where `renames`."""

    def delete(self, folder: str, names: Iterable[str]) -> None:
        """Delete files of a folder, and the folder once it is empty; what is gone already is no error."""


@dataclass(frozen=True)
class Place:
    """Where a store is, as data that goes from process to process; holds no credentials."""

    type: str
    """Type of the tier: `disk` or `object`."""
    url: str
    """An absolute path, or a URL."""
    options: Mapping[str, str] = field(default_factory=dict)
    """For a URL: endpoint, region and the like. For a path: `commit`, one of auto, rename, manifest."""

    def to_json(self) -> dict[str, Any]:
        """Form for job files."""
        return {"type": self.type, "url": self.url, "options": dict(self.options)}


def place_from_json(value: dict[str, Any]) -> Place:
    """Read the form of job files."""
    return Place(value["type"], value["url"], dict(value["options"]))


def open_store(place: Place, spool: Path | None = None) -> Store:
    """Open the store of a place; `spool` is a folder for local copies of remote files.

    Raises StoreError when it cannot be opened (an extra is missing, the URL is not understood).
    """
    from .directory import DirectoryStore

    if "://" not in place.url:
        return DirectoryStore(Path(place.url), place.options.get("commit", "auto"))
    if place.url.startswith("file://"):
        return DirectoryStore(Path(place.url.removeprefix("file://")), "manifest")
    from .object import ObjectStore

    return ObjectStore(place.url, place.options, spool)
