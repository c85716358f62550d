"""A store in a folder of a file system: local disk, shared disk, tmpfs, or a mounted bucket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import faults, files
from .copyfile import copy_durable, digest_uncached
from .jsonfile import Unreadable
from .store import Progress

COMMITS = ("auto", "rename", "manifest")
_NOT_ATOMIC = {"fuse", "fuseblk", "9p", "cifs", "smb3", "vfat", "exfat"}
"""Types of file systems where a rename of a folder may be copies and deletes, or may be seen half done."""


class DirectoryStore:
    """Checkpoints in a folder. Its files have the umask's mode; links are never followed."""

    def __init__(self, root: Path, commit: str = "auto") -> None:
        """Use the folder `root`, made when first written. `commit`: auto, rename, or manifest (never rename)."""
        self.root = root.absolute()
        self._commit = commit

    @property
    def where(self) -> str:
        """The folder."""
        return str(self.root)

    @property
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

    def read(self, folder: str, name: str, max_bytes: int) -> bytes:
        """A small file whole."""
        path = self.root / folder / name
        faults.operation("disk.read", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise Unreadable(f"{path}: larger than {max_bytes} bytes")
        return data

    def create(self, folder: str, name: str, data: bytes) -> None:
        """Write a small file beside its final name, then give it that name, so that nobody reads half of it."""
        self._make_folder(folder)
        path = self.root / folder / name
        if path.exists() or path.is_symlink():
            raise FileExistsError(17, "exists already", str(path))
        staged = path.with_name(f".{name}.new")
        staged.unlink(missing_ok=True)
        files.write_new(staged, data)
        try:
            files.rename(staged, path)
        except OSError:
            staged.unlink(missing_ok=True)
            raise
        files.sync_dir(path.parent)

    def copy_in(self, folder: str, name: str, source: Path, told: Progress | None = None) -> str:
        """Copy in the kernel, fsync, read back."""
        self._make_folder(folder)
        return copy_durable(source, self.root / folder / name, told)

    def digest(self, folder: str, name: str, told: Progress | None = None) -> str:
        """Digest of what the disk holds."""
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
            (path / f".{name}.new").unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if not any(path.iterdir()):
                files.remove_dir(path)

    def _make_folder(self, folder: str) -> None:
        if not self.root.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            files.sync_dir(self.root.parent)
        files.make_dir(self.root / folder)


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
