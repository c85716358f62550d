"""How a checkpoint comes to be there, and how it goes: as one change that a crash can only cut before or after.

Where a folder's rename is atomic: all files are made in `.tmp-<name>`, then the folder gets its name. Deleting
renames it to `.trash-<name>` first. Where it is not (buckets, mounted buckets): `.tmp-<name>/begun.json` says that the
folder `<name>` is under way, the files are made in it, the manifest last, then the note goes. Deleting leaves such a
note in `.trash-<name>`, takes the manifest away first, and that durably, then the files. So the manifest decides: where
a crash leaves a note and the manifest is there, all files are there too, and only the note goes. Whatever a crash
leaves can be told from what people put there: without a note or a name of ours, nothing is ever deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Collection
from typing import Any, Protocol

from . import faults
from .format import files
from .format.jsonfile import Unreadable, dumps
from .format.layout import INTENT, MANIFEST, Version, is_note, is_ours, staging_name, trash_name, unfinished
from .stores.store import Store

_MAX_NOTE = 4 * 2**20  # names of some hundred thousand shards
_TOKEN = secrets.token_hex(8)
Check = Callable[[], None]
"""Raises when this writer has been fenced out; called right before a change that others see."""


class Commit(Protocol):
    """One of the two ways."""

    def begin(self, version: Version) -> str:
        """Start a checkpoint; returns the folder to make its files in. Raises FileExistsError for a foreign one."""

    def seal(self, version: Version, manifest: bytes, check: Check) -> None:
        """All files are there: make it a checkpoint."""

    def abandon(self, version: Version) -> None:
        """Remove what `begin` and whatever followed it have made."""

    def remove(self, version: Version, listed: Collection[str], check: Check) -> None:
        """Delete a checkpoint with the files that its manifest lists, and nothing else that lies there."""


def commit_of(store: Store) -> Commit:
    """The way that a store allows."""
    return ByRename(store) if store.renames else ByManifest(store)


def ours(store: Store, folder: str) -> list[str]:
    """Names of the files in a folder that dtrain gives, the manifest first, so that it goes first too."""
    return sorted(filter(_is_ours, store.files(folder)), key=lambda name: (name != MANIFEST, name))


def strangers(store: Store, folder: str, listed: Collection[str]) -> list[str]:
    """What lies in the folder of a checkpoint and is none of it: a manifest lists its shards."""
    return [name for name in store.names(folder) if not _belongs(name, listed)]


def is_somebodys(store: Store, folder: str) -> bool:
    """Tell whether a folder named like a checkpoint holds something, but nothing of ours."""
    names = store.names(folder)
    return bool(names) and not any(map(_is_ours, names))


def _belongs(name: str, listed: Collection[str] | None) -> bool:
    """A shard of the manifest (None: any shard), or a name of ours for what is no shard or is not finished."""
    final = files.final_name(name)
    return _is_ours(name) if listed is None or final != name else final in listed or is_note(final)


def clean(store: Store, note: str) -> bool:
    """End the unfinished write or delete that a folder called `note` stands for; False when the folder stays.

    It does when it is not one of ours, or somebody else has put something into it.
    """
    folder = unfinished(note)
    if folder is None:
        return False
    if INTENT in store.files(note):
        if _has_manifest(store, folder):
            store.delete(folder, [name for name in ours(store, folder) if files.final_name(name) != name])
            store.sync(folder)  # who gave the manifest its name may have died before that was durable
        else:
            listed = _said(store, note).get("files")
            _empty(store, folder, listed if isinstance(listed, list) else None)
    store.delete(note, ours(store, note))
    return not store.names(note)


def _note(version: Version, listed: Collection[str] | None = None) -> bytes:
    """With `listed`, the delete of a checkpoint with these files; else a write, whose files are not known yet."""
    about = {"folder": version.dirname, "writer": _writer()}
    return dumps(about if listed is None else {**about, "files": sorted(listed)})


def _said(store: Store, note: str) -> dict[str, Any]:
    """What a note says; nothing when it cannot be read."""
    with contextlib.suppress(FileNotFoundError, ValueError, Unreadable):
        said = json.loads(store.read(note, INTENT, _MAX_NOTE))
        return said if isinstance(said, dict) else {}
    return {}


def _writer() -> str:
    """This process, as no other one is called."""
    return f"{socket.gethostname()} {os.getpid()} {_TOKEN}"


def _is_ours(name: str) -> bool:
    return is_ours(files.final_name(name))


def _empty(store: Store, folder: str, listed: Collection[str] | None = None) -> None:
    """Delete what is ours in a folder, durably, also when a file of somebody's keeps it there; of shards the `listed`.

    The manifest goes durably before the rest: it is never there without all the files.
    """
    store.delete(folder, [MANIFEST])
    _sync(store, folder)
    store.delete(folder, [name for name in ours(store, folder) if _belongs(name, listed)])
    _sync(store, folder)
    store.sync()


def _has_manifest(store: Store, folder: str) -> bool:
    """By reading, not by listing: listings may be late."""
    try:
        store.read(folder, MANIFEST, 0)
    except Unreadable:
        return True  # it is longer than nothing
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _sync(store: Store, folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        store.sync(folder)


class ByRename:
    """The folder gets its name when everything is in it."""

    def __init__(self, store: Store) -> None:
        """Commit into `store`."""
        self.store = store

    def begin(self, version: Version) -> str:
        """Make way for the staging folder."""
        if self.store.files(version.dirname) or version.dirname in self.store.folders():
            raise FileExistsError(17, "a folder of this name exists already", f"{self.store.where}/{version.dirname}")
        staging = staging_name(version.dirname)
        self.store.delete(staging, ours(self.store, staging))
        return staging

    def seal(self, version: Version, manifest: bytes, check: Check) -> None:
        """Manifest, names durable, rename, name durable."""
        staging = staging_name(version.dirname)
        self.store.create(staging, MANIFEST, manifest)
        self.store.sync(staging)
        faults.point("drain.rename", version.step)
        check()
        self.store.rename(staging, version.dirname)
        try:
            self.store.sync()
        except OSError:
            with contextlib.suppress(OSError):  # nobody was told of it, and it may not be durable
                self._move_away(version, check)
            raise

    def abandon(self, version: Version) -> None:
        """Only what has no name yet: by now the name can be that of somebody who has taken the place over."""
        staging = staging_name(version.dirname)
        self.store.delete(staging, ours(self.store, staging))

    def remove(self, version: Version, listed: Collection[str], check: Check) -> None:
        """Move aside, then delete; a folder with other people's files in it is emptied where it is."""
        if strangers(self.store, version.dirname, listed):
            ByManifest(self.store).remove(version, listed, check)
            return
        self._move_away(version, check)

    def _move_away(self, version: Version, check: Check) -> None:
        trash = trash_name(version.dirname)
        self.store.delete(trash, ours(self.store, trash))
        check()
        self.store.rename(version.dirname, trash)
        self.store.sync()
        faults.point("prune.renamed", version.step)
        self.store.delete(trash, ours(self.store, trash))


class ByManifest:
    """The manifest makes it a checkpoint, a note beside it tells of unfinished work and of who is at it."""

    def __init__(self, store: Store) -> None:
        """Commit into `store`."""
        self.store = store

    def begin(self, version: Version) -> str:
        """Leave the note first."""
        note = staging_name(version.dirname)
        if INTENT in self.store.files(note):
            clean(self.store, note)
        if self.store.files(version.dirname):
            raise FileExistsError(17, "a folder of this name exists already", f"{self.store.where}/{version.dirname}")
        try:
            self.store.create(note, INTENT, _note(version))
            self.store.sync()
        except OSError:
            with contextlib.suppress(OSError):
                self.store.delete(note, ours(self.store, note))
            raise
        return version.dirname

    def seal(self, version: Version, manifest: bytes, check: Check) -> None:
        """Manifest last, then the note goes."""
        self.store.sync(version.dirname)
        self.store.sync()
        faults.point("drain.rename", version.step)
        check()
        self.store.create(version.dirname, MANIFEST, manifest)
        with contextlib.suppress(OSError):  # it is committed, and a note beside a manifest means nothing
            self.store.delete(staging_name(version.dirname), [INTENT])

    def abandon(self, version: Version) -> None:
        """Files first, the note last; nothing when the note is that of somebody who has taken the place over."""
        note = staging_name(version.dirname)
        if _said(self.store, note).get("writer") == _writer():
            _empty(self.store, version.dirname)
            self.store.delete(note, [INTENT])

    def remove(self, version: Version, listed: Collection[str], check: Check) -> None:
        """Note, manifest, files, note."""
        note = trash_name(version.dirname)
        check()
        if INTENT not in self.store.files(note):
            self.store.create(note, INTENT, _note(version, listed))
        self.store.sync(note)  # it may be there from a try that failed before it was durable
        self.store.sync()
        faults.point("prune.renamed", version.step)
        check()
        _empty(self.store, version.dirname, listed)
        self.store.delete(note, [INTENT])
