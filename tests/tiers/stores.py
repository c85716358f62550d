"""Stores around a store, for what a real one seldom shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dtrain.tiers.format.digest import Hasher
from dtrain.tiers.stores.store import Progress, Store


class LateListings:
    """A store whose listings lag behind: a change shows in them only after `lag` further listings.

    Reads, and what a create finds, are of this moment, as everywhere.
    """

    def __init__(self, store: Store, lag: int) -> None:
        self.store, self.lag = store, lag
        self.listings = 0
        self._changed: dict[tuple[str, str], tuple[int, int | None]] = {}
        """(folder, name) → the listing from which on its latest change shows, and the size that shows until then."""

    @property
    def where(self) -> str:
        return self.store.where

    @property
    def renames(self) -> bool:
        return False

    def folders(self) -> list[str]:
        self.listings += 1
        return sorted(
            folder for folder in {*self.store.folders(), *(f for f, _ in self._changed)} if self._shown(folder)
        )

    def files(self, folder: str) -> dict[str, int]:
        self.listings += 1
        return self._shown(folder)

    def names(self, folder: str) -> list[str]:
        return sorted(self.files(folder))

    def _shown(self, folder: str) -> dict[str, int]:
        shown = dict(self.store.files(folder))
        for (where, name), (since, before) in self._changed.items():
            if where == folder and self.listings < since:
                shown.pop(name, None)
                if before is not None:
                    shown[name] = before
        return shown

    @contextmanager
    def _changing(self, folder: str, name: str) -> Iterator[None]:
        since, before = self._changed.get((folder, name), (0, None))
        if self.listings >= since:
            before = self.store.files(folder).get(name)
        yield
        self._changed[folder, name] = (self.listings + 1 + self.lag, before)

    def read(self, folder: str, name: str, max_bytes: int) -> bytes:
        return self.store.read(folder, name, max_bytes)

    def create(self, folder: str, name: str, data: bytes) -> None:
        with self._changing(folder, name):
            self.store.create(folder, name, data)

    def copy_in(
        self, folder: str, name: str, source: Path, told: Progress | None = None, hasher: Hasher | None = None
    ) -> str:
        with self._changing(folder, name):
            return self.store.copy_in(folder, name, source, told, hasher)

    def digest(self, folder: str, name: str, told: Progress | None = None) -> str:
        return self.store.digest(folder, name, told)

    def local(self, folder: str, name: str) -> AbstractContextManager[Path]:
        return self.store.local(folder, name)

    def sync(self, folder: str = "") -> None:
        self.store.sync(folder)

    def rename(self, folder: str, new: str) -> None:
        raise AssertionError("never asked of such a store")

    def delete(self, folder: str, names: Iterable[str]) -> None:
        for name in names:
            with self._changing(folder, name):
                self.store.delete(folder, [name])
