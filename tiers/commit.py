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
from collections.abc import Callable
from typing import Protocol

from . import faults, files
from .jsonfile import Unreadable, dumps
from .layout import INTENT, MANIFEST, Version, is_ours, staging_name, trash_name, unfinished
from .store import Store

_MAX_NOTE = 65536
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

    def remove(self, version: Version, check: Check) -> None:
        """Delete a checkpoint."""


def commit_of(store: Store) -> Commit:
    """The way that a store allows."""
    return ByRename(store) if store.renames else ByManifest(store)


def ours(store: Store, folder: str) -> list[str]:
    """Names of the files in a folder that dtrain gives, the manifest first, so that it goes first too."""
    return sorted(filter(_is_ours, store.files(folder)), key=lambda name: (name != MANIFEST, name))


def clean(store: Store, note: str) -> bool:
    """End an unfinished write or delete that a folder called `note` stands for; False when it is not one of ours."""
    folder = unfinished(note)
    if folder is None:
        return False
    if INTENT in store.files(note):
        if _has_manifest(store, folder):
            store.delete(folder, [name for name in ours(store, folder) if files.final_name(name) != name])
            store.sync(folder)  # who gave the manifest its name may have died before that was durable
        else:
            _empty(store, folder)
    store.delete(note, ours(store, note))
    return True


def _note(version: Version) -> bytes:
    return dumps({"folder": version.dirname, "writer": _writer()})


def _writer() -> str:
    """This process, as no other one is called."""
    return f"{socket.gethostname()} {os.getpid()} {_TOKEN}"


def _is_ours(name: str) -> bool:
    return is_ours(files.final_name(name))


def _empty(store: Store, folder: str) -> None:
    """Delete what is ours in a folder, durably, also when a file of somebody's keeps it there.

    The manifest goes durably before the rest: it is never there without all the files.
    """
    store.delete(folder, [MANIFEST])
    _sync(store, folder)
    store.delete(folder, ours(store, folder))
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

    def remove(self, version: Version, check: Check) -> None:
        """Move aside, then delete; a folder with other people's files in it is emptied where it is."""
        names = self.store.files(version.dirname)
        if not all(map(_is_ours, names)):
            ByManifest(self.store).remove(version, check)
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
        if self._writer_of(note) == _writer():
            _empty(self.store, version.dirname)
            self.store.delete(note, [INTENT])

    def _writer_of(self, note: str) -> object:
        with contextlib.suppress(FileNotFoundError, ValueError, Unreadable):
            said = json.loads(self.store.read(note, INTENT, _MAX_NOTE))
            return said.get("writer") if isinstance(said, dict) else None
        return None

    def remove(self, version: Version, check: Check) -> None:
        """Note, manifest, files, note."""
        note = trash_name(version.dirname)
        check()
        if INTENT not in self.store.files(note):
            self.store.create(note, INTENT, _note(version))
        self.store.sync(note)  # it may be there from a try that failed before it was durable
        self.store.sync()
        faults.point("prune.renamed", version.step)
        check()
        _empty(self.store, version.dirname)
        self.store.delete(note, [INTENT])
