"""A store in memory: the same contract as a folder or a bucket, with both ways to commit, for tests of the storage."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dtrain.tiers import faults
from dtrain.tiers.format.digest import Hasher, digest
from dtrain.tiers.format.jsonfile import Unreadable
from dtrain.tiers.format.layout import check_name
from dtrain.tiers.stores.store import Progress


class FakeStore:
    """Folders of files as dicts. Every change is named to `faults` just before it is made."""

    def __init__(self, *, renames: bool) -> None:
        self.renames = renames
        self.where = f"fake (renames={renames})"
        self.content: dict[str, dict[str, bytes]] = {}

    def folders(self) -> list[str]:
        return sorted(self.content)

    def files(self, folder: str) -> dict[str, int]:
        return {name: len(data) for name, data in self.content.get(folder, {}).items()}

    def names(self, folder: str) -> list[str]:
        return sorted(self.content.get(folder, {}))

    def read(self, folder: str, name: str, max_bytes: int) -> bytes:
        faults.operation("disk.read", self._at(folder, name))
        data = self._get(folder, name)
        if len(data) > max_bytes:
            raise Unreadable(f"{self._at(folder, name)}: larger than {max_bytes} bytes")
        return data

    def create(self, folder: str, name: str, data: bytes) -> None:
        self._refuse_taken(folder, name)
        self._make_folder(folder)
        faults.operation("disk.write", self._at(folder, name), len(data))
        faults.operation("disk.link", self._at(folder, name), name)
        self._refuse_taken(folder, name)
        self.content[folder][name] = bytes(data)

    def copy_in(
        self, folder: str, name: str, source: Path, told: Progress | None = None, hasher: Hasher | None = None
    ) -> str:
        self._refuse_taken(folder, name)
        self._make_folder(folder)
        faults.operation("disk.create", self._at(folder, name))
        self.content[folder][name] = b""
        data = source.read_bytes()
        for end in (len(data) // 2, len(data)):
            faults.operation("disk.write", self._at(folder, name), end)
            self.content[folder][name] = data[:end]
        faults.operation("disk.sync", self._at(folder, name))
        if hasher is not None:
            hasher.reset()
            hasher.update(memoryview(self._get(folder, name)))
        return self.digest(folder, name, told)

    def digest(self, folder: str, name: str, told: Progress | None = None) -> str:
        faults.operation("disk.read", self._at(folder, name))
        data = self._get(folder, name)
        if told is not None:
            told(len(data))
        return digest(data)

    @contextmanager
    def local(self, folder: str, name: str) -> Iterator[Path]:
        with tempfile.NamedTemporaryFile() as file:
            file.write(self.read(folder, name, 2**40))
            file.flush()
            yield Path(file.name)

    def sync(self, folder: str = "") -> None:
        faults.operation("disk.sync_dir", self._at(folder, ""))
        if folder and folder not in self.content:
            raise FileNotFoundError(errno.ENOENT, "no such folder", self._at(folder, ""))

    def rename(self, folder: str, new: str) -> None:
        assert self.renames, "asked for what this store cannot do"
        if new in self.content:
            raise FileExistsError(errno.EEXIST, "exists already", self._at(new, ""))
        faults.operation("disk.rename", self._at(folder, ""), new)
        self.content[new] = self.content.pop(folder)

    def delete(self, folder: str, names: Iterable[str]) -> None:
        if folder not in self.content:
            return
        for name in names:
            faults.operation("disk.unlink", self._at(folder, name))
            self.content[folder].pop(name, None)
        if not self.content[folder]:
            faults.operation("disk.rmdir", self._at(folder, ""))
            del self.content[folder]

    def _at(self, folder: str, name: str) -> str:
        return f"{self.where}/{folder}/{name}"

    def _get(self, folder: str, name: str) -> bytes:
        try:
            return self.content[folder][name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", self._at(folder, name)) from None

    def _refuse_taken(self, folder: str, name: str) -> None:
        if check_name(name) in self.content.get(folder, {}):
            raise FileExistsError(errno.EEXIST, "exists already", self._at(folder, name))

    def _make_folder(self, folder: str) -> None:
        if folder not in self.content:
            faults.operation("disk.mkdir", self._at(folder, ""))
            self.content[folder] = {}
