"""A store in a bucket, through obstore: S3, Google Cloud Storage, Azure Blob Storage and what speaks like them.

There is no rename, so the manifest, created last and only if it is not there, is the commit. Requests are sent again
by obstore with back-off; what a retry may have left twice is harmless, since names are used once and every object is
read back before the manifest is written. Credentials come from the environment alone, and messages lose whatever
follows a `?`, where signed URLs carry theirs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import xxhash

from . import faults
from .jsonfile import Unreadable
from .store import Progress, StoreError

CHUNK = 8 * 2**20
CONCURRENCY = 4
REQUEST_TIMEOUT = timedelta(seconds=60)
RETRY_TIMEOUT = timedelta(seconds=90)
MAX_RETRIES = 8
_ENDPOINT = {"s3": "aws_endpoint", "az": "azure_storage_endpoint"}
_QUERY = re.compile(r"\?[^\s\"')]+")
_MAX_WORDS = 400


class ObjectStore:
    """Checkpoints below a URL. Local copies of objects lie in `spool` while they are read."""

    renames = False

    def __init__(self, url: str, options: Mapping[str, str], spool: Path | None) -> None:
        """Open the store; raises StoreError when the extra is missing or the URL or an option is not understood."""
        self.where = url.rstrip("/")
        self._spool = spool
        self._library: Any = _library()
        from obstore.store import from_url

        scheme = url.partition("://")[0]
        config: dict[str, Any] = {}
        if "endpoint" in options:
            if scheme not in _ENDPOINT:
                raise StoreError(f"{url}: an endpoint of your own is understood for s3:// and az:// only")
            config[_ENDPOINT[scheme]] = options["endpoint"]
        if "region" in options:
            config["aws_region"] = options["region"]
        try:
            open_url: Any = from_url  # its overloads want the options of each kind of store apart
            self._store: Any = open_url(
                self.where,
                config=config or None,
                client_options={
                    "allow_http": options.get("endpoint", "").startswith("http://"),
                    "timeout": REQUEST_TIMEOUT,
                },
                retry_config={"max_retries": MAX_RETRIES, "retry_timeout": RETRY_TIMEOUT},
            )
        except Exception as error:  # obstore's own errors have no base class of their own
            raise StoreError(f"{url}: {_words(error)}") from None

    def folders(self) -> list[str]:
        """Names of all folders."""
        with self._asking("object.list", ""):
            listed = self._library.list_with_delimiter(self._store)
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"])

    def files(self, folder: str) -> dict[str, int]:
        """Bytes of each object directly below a folder."""
        with self._asking("object.list", folder):
            listed = self._library.list_with_delimiter(self._store, folder)
        return {item["path"].rpartition("/")[2]: int(item["size"]) for item in listed["objects"]}

    def read(self, folder: str, name: str, max_bytes: int) -> bytes:
        """A small object whole."""
        with self._asking("object.get", f"{folder}/{name}"):
            result = self._library.get(self._store, f"{folder}/{name}")
            if result.meta["size"] > max_bytes:
                raise Unreadable(f"{self.where}/{folder}/{name}: larger than {max_bytes} bytes")
            return bytes(result.bytes())

    def create(self, folder: str, name: str, data: bytes) -> None:
        """Upload on condition that the name is free.

        A reply that was lost makes the retry fail although the first try has worked: the same content is no error.
        """
        try:
            with self._asking("object.put", f"{folder}/{name}"):
                self._library.put(self._store, f"{folder}/{name}", data, mode="create", use_multipart=False)
        except FileExistsError:
            if self.read(folder, name, len(data)) != data:
                raise

    def copy_in(self, folder: str, name: str, source: Path, told: Progress | None = None) -> str:
        """Upload in parts, then read back."""
        with self._asking("object.put", f"{folder}/{name}"):
            self._library.put(
                self._store,
                f"{folder}/{name}",
                source,
                use_multipart=source.stat().st_size > CHUNK,
                chunk_size=CHUNK,
                max_concurrency=CONCURRENCY,
            )
        return self.digest(folder, name, told)

    def digest(self, folder: str, name: str, told: Progress | None = None) -> str:
        """Digest of the object, by reading it."""
        hasher = xxhash.xxh3_128()
        with self._asking("object.get", f"{folder}/{name}"):
            for chunk in self._library.get(self._store, f"{folder}/{name}").stream(min_chunk_size=CHUNK):
                hasher.update(chunk)
                if told is not None:
                    told(len(chunk))
        return hasher.hexdigest()

    @contextmanager
    def local(self, folder: str, name: str) -> Iterator[Path]:
        """A copy in the spool, shared by all who read it at the same time; the last one removes it."""
        if self._spool is None:
            raise StoreError(f"{self.where}/{folder}/{name}: no folder for a local copy")
        self._spool.mkdir(parents=True, exist_ok=True)
        copy = self._spool / f"{folder}.{name}"
        descriptor = os.open(copy.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not copy.exists():
                self._download(folder, name, copy)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield copy
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                copy.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def _download(self, folder: str, name: str, copy: Path) -> None:
        part = copy.with_suffix(".part")
        with self._asking("object.get", f"{folder}/{name}"), part.open("wb") as file:
            for chunk in self._library.get(self._store, f"{folder}/{name}").stream(min_chunk_size=CHUNK):
                file.write(chunk)
        part.rename(copy)

    def sync(self, folder: str = "") -> None:
        """An object that was acknowledged is durable."""

    def rename(self, folder: str, new: str) -> None:
        """There is no such change in a bucket."""
        raise StoreError(f"{self.where}/{folder}: objects cannot be renamed")

    def delete(self, folder: str, names: Iterable[str]) -> None:
        """Delete objects, one request each, in order."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._asking("object.delete", f"{folder}/{name}"):
                self._library.delete(self._store, f"{folder}/{name}")

    @contextmanager
    def _asking(self, name: str, key: str) -> Iterator[None]:
        """One request; obstore's errors become OSErrors that say where."""
        where = f"{self.where}/{key}"
        faults.operation(name, where)
        known = self._library.exceptions
        try:
            yield
        except known.AlreadyExistsError:
            raise FileExistsError(17, "exists already", where) from None
        except (known.NotFoundError, FileNotFoundError):
            raise FileNotFoundError(2, "no such object", where) from None
        except (OSError, Unreadable):
            raise
        except Exception as error:
            raise StoreError(f"{where}: {_words(error)}") from None


def _library() -> Any:
    try:
        import obstore
    except ImportError:
        raise StoreError("the object tier needs one more package: pip install 'dtrain[object]'") from None
    return obstore


def _words(error: BaseException) -> str:
    """What an error says, in one line and without anything that may be a credential."""
    text = " ".join(_QUERY.sub("?…", str(error)).split())
    return text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]}…"
