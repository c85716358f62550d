"""A store in a folder of a file system: local disk, shared disk, tmpfs, or a mounted bucket."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from .. import faults
from ..format import files
from ..format.digest import Hasher
from ..format.jsonfile import Unreadable
from .copyfile import copy_durable, digest_uncached
from .store import Progress

_NOT_ATOMIC = {"fuse", "fuseblk", "9p", "cifs", "smb3", "vfat", "exfat"}
"""Types of file systems where a rename of a folder may be copies and deletes, or may be seen half done."""


class DirectoryStore:
    """Checkpoints in a folder. Its files have the umask's mode; links are never followed."""

    def __init__(self, root: Path, commit: str = "auto") -> None:
        """Use the folder `root`, made when first written. `commit`: auto, rename, or manifest (never rename)."""
        self.root = root.absolute()
        self._commit = commit
        self._root_is_durable = False

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.root)

    @cached_property
    def renames(self) -> bool:
        """A rename is one change, unless the spec or the kind of file system says that it may not be."""
        if self._commit == "auto":
            return file_system_type(self.root).partition(".")[0] not in _NOT_ATOMIC
        return self._commit == "rename"

    def folders(self) -> list[str]:
        """Names of all folders, links left out."""
        try:
            with os.scandir(self.root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def files(self, folder: str) -> dict[str, int]:
        """Bytes of each regular file, links left out."""
        try:
            with os.scandir(self.root / folder) as entries:
                plain = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
                return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in plain}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def names(self, folder: str) -> list[str]:
        """Names of all entries: files, links, folders, pipes."""
        try:
            return sorted(os.listdir(self.root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, folder: str, name: str, max_bytes: int) -> bytes:
        """A small file whole."""
        path = self.root / folder / name
        faults.operation("disk.read", path)
        with os.fdopen(files.open_plain(path), "rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise Unreadable(f"{path}: larger than {max_bytes} bytes")
        return data

    def create(self, folder: str, name: str, data: bytes) -> None:
        """Write a small file beside its final name, then give it that name, so that nobody reads half of it."""
        self._make_folder(folder)
        path = self.root / folder / name
        if path.exists() or path.is_symlink():
            raise FileExistsError(errno.EEXIST, "exists already", str(path))
        staged = files.write_staged(path, data)
        try:
            files.publish(staged, path)
        except OSError:
            with contextlib.suppress(OSError):
                files.unlink(staged)
            raise
        files.sync_dir(path.parent)

    def copy_in(
        self, folder: str, name: str, source: Path, told: Progress | None = None, hasher: Hasher | None = None
    ) -> str:
        """Copy in the kernel, fsync, read back."""
        self._make_folder(folder)
        self._settle_root()
        return copy_durable(source, self.root / folder / name, told, hasher)

    def digest(self, folder: str, name: str, told: Progress | None = None) -> str:
        """Digest of what the disk holds."""
        os.close(files.open_plain(self.root / folder / name))
        return digest_uncached(self.root / folder / name, told)

    @contextmanager
    def local(self, folder: str, name: str) -> Iterator[Path]:
        """The file itself."""
        faults.operation("disk.read", self.root / folder / name)
        yield self.root / folder / name

    def sync(self, folder: str = "") -> None:
        """Fsync a folder."""
        files.sync_dir(self.root / folder)

    def rename(self, folder: str, new: str) -> None:
        """Rename a folder to a name that nothing has."""
        files.rename(self.root / folder, self.root / new)

    def delete(self, folder: str, names: Iterable[str]) -> None:
        """Delete files, then the folder unless something else is in it."""
        path = self.root / folder
        if not path.is_dir() or path.is_symlink():
            return
        for name in names:
            files.unlink(path / name)
        with contextlib.suppress(FileNotFoundError):
            if not any(path.iterdir()):
                files.remove_dir(path)

    def make_root(self) -> None:
        """Make the folder of all folders, its name durable."""
        if not self.root.is_dir():
            files.make_dirs(self.root)
            self._root_is_durable = True

    def _make_folder(self, folder: str) -> None:
        self.make_root()
        files.make_dir(self.root / folder)

    def _settle_root(self) -> None:
        """Make the name of a root that was there already durable: who made it may have died before it was."""
        if not self._root_is_durable:
            with contextlib.suppress(PermissionError):  # what we may not even list was not made by us
                files.sync_dir(self.root.resolve().parent)
            self._root_is_durable = True


def file_system_type(path: Path) -> str:
    """Type of the file system that a path lies (or will lie) on, by the longest mount point above it (proc(5))."""
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            mount = left.split()[4].encode().decode("unicode_escape")
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, right.split()[0]
    return kind
