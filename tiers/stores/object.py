"""A store in a bucket, through obstore: S3, Google Cloud Storage, Azure Blob Storage and what speaks like them.

There is no rename, so the manifest, created last and only if it is not there, is the commit. Requests are sent again
by obstore with back-off; what a retry may have left twice is harmless, since names are used once and every object is
read back before the manifest is written. Where an answer was lost, the object itself is asked. Credentials come from
the environment alone, and no message holds any.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash

from .. import faults
from ..format.digest import Hasher, digest
from ..format.jsonfile import Unreadable
from .spool import shared_copy
from .store import Progress, StoreError
from .wording import said

CHUNK = 8 * 2**20
"""Bytes of one request: a larger object goes up and comes down in parts, each with its own time limit and retries."""
MAX_PARTS = 10_000
"""What S3 takes for one object."""
CONCURRENCY = 4
CONNECT_TIMEOUT = timedelta(seconds=5)
REQUEST_TIMEOUT = timedelta(seconds=30)
RETRY_TIMEOUT = timedelta(seconds=45)
"""No request is sent again after this; with the one under way, an endpoint that never answers costs 75 s at most."""
MAX_RETRIES = 8
FIRST_BACKOFF = timedelta(seconds=0.1)
LONGEST_BACKOFF = timedelta(seconds=15)
CREATE_TRIES = 3
PAUSE_S = 0.2
_ENDPOINT = {"s3": "aws_endpoint", "az": "azure_storage_endpoint"}
_OPTIONS = {"endpoint", "region"}
_T = TypeVar("_T")


class Unsure(StoreError):
    """No answer came, or none that says whether the request was carried out."""


class ObjectStore:
    """Checkpoints below a URL. Local copies of objects lie in `spool` while they are read."""

    renames = False

    def __init__(self, url: str, options: Mapping[str, str], spool: Path | None) -> None:
        """Open the store; raises StoreError when the extra is missing or the URL or an option is not understood."""
        _refuse_credentials(url, options)
        self.where = url.rstrip("/")
        self._spool = spool
        self._library: Any = _library()
        from obstore.store import from_url

        open_url: Any = from_url  # its overloads want the options of each kind of store apart
        client: dict[str, Any] = {"timeout": REQUEST_TIMEOUT, "connect_timeout": CONNECT_TIMEOUT}
        if options.get("endpoint", "").startswith("http://"):
            client["allow_http"] = True
        backoff = {"init_backoff": FIRST_BACKOFF, "max_backoff": LONGEST_BACKOFF, "base": 2}
        try:
            self._store: Any = open_url(
                self.where,
                config=_config(url, options) or None,
                client_options=client,
                retry_config={"max_retries": MAX_RETRIES, "retry_timeout": RETRY_TIMEOUT, "backoff": backoff},
            )
        except self._library.exceptions.BaseError as error:
            raise StoreError(f"{self.where}: {said(error)}") from None

    def folders(self) -> list[str]:
        """Names of all folders."""
        listed = self._ask("object.list", "", lambda: self._library.list_with_delimiter(self._store))
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"])

    def files(self, folder: str) -> dict[str, int]:
        """Bytes of each object directly below a folder."""
        listed = self._ask("object.list", folder, lambda: self._library.list_with_delimiter(self._store, folder))
        return {item["path"].rpartition("/")[2]: int(item["size"]) for item in listed["objects"]}

    def names(self, folder: str) -> list[str]:
        """Names of the objects directly below a folder, and of what looks like folders in it."""
        listed = self._ask("object.list", folder, lambda: self._library.list_with_delimiter(self._store, folder))
        paths = [*(item["path"] for item in listed["objects"]), *(one.rstrip("/") for one in listed["common_prefixes"])]
        return sorted(path.rpartition("/")[2] for path in paths)

    def read(self, folder: str, name: str, max_bytes: int) -> bytes:
        """A small object whole."""
        key = f"{folder}/{name}"

        def get() -> bytes:
            result = self._library.get(self._store, key)
            if result.meta["size"] > max_bytes:
                raise Unreadable(f"{self.where}/{key}: larger than {max_bytes} bytes")
            return bytes(result.bytes())

        return self._ask("object.get", key, get)

    def create(self, folder: str, name: str, data: bytes) -> None:
        """Upload on condition that the name is free.

        A reply that was lost makes the retry fail although the first try has worked, and a request without an answer
        may have worked or may yet: so the object says what is so, and the request is repeated until that is clear.
        """
        key = f"{folder}/{name}"
        deadline = time.monotonic() + RETRY_TIMEOUT.total_seconds()
        for left in reversed(range(CREATE_TRIES)):
            try:
                self._ask("object.put", key, lambda: self._put(key, data, mode="create", use_multipart=False))
                return
            except (FileExistsError, Unsure) as error:
                there = self._content(folder, name, len(data))
                if there == data:
                    return
                if there is not None:
                    raise FileExistsError(17, "exists already", f"{self.where}/{key}") from None
                if not left or time.monotonic() > deadline:
                    raise error if isinstance(error, Unsure) else self._confused(key) from None
            time.sleep(PAUSE_S)

    def _confused(self, key: str) -> StoreError:
        return StoreError(f"{self.where}/{key}: the store refuses to create it, as if it were there, but it is not")

    def _content(self, folder: str, name: str, size: int) -> bytes | None:
        """What an object holds; b"" stands for anything larger than `size`, None for no object."""
        try:
            return self.read(folder, name, size)
        except FileNotFoundError:
            return None
        except Unreadable:
            return b""

    def copy_in(
        self, folder: str, name: str, source: Path, told: Progress | None = None, hasher: Hasher | None = None
    ) -> str:
        """Upload in parts, then read back. Replaces an object of this name: the commit has looked before."""
        key, size = f"{folder}/{name}", source.stat().st_size
        part = max(CHUNK, -(-size // MAX_PARTS))
        try:
            self._ask(
                "object.put",
                key,
                lambda: self._put(
                    key, source, use_multipart=size > CHUNK, chunk_size=part, max_concurrency=CONCURRENCY
                ),
            )
        except (FileNotFoundError, Unsure):
            # the last answer may have been lost; what is there now decides, and its digest is the caller's to check
            with contextlib.suppress(OSError):
                return self._read_back(folder, name, told, hasher)
            raise
        return self._read_back(folder, name, told, hasher)

    def digest(self, folder: str, name: str, told: Progress | None = None) -> str:
        """Digest of the object, by reading it."""
        return self._read_back(folder, name, told, None)

    def _read_back(self, folder: str, name: str, told: Progress | None, hasher: Hasher | None) -> str:
        hasher = hasher or xxhash.xxh3_128()
        hasher.reset()
        for chunk in self._chunks(folder, name):
            with memoryview(chunk) as view:
                hasher.update(view)
            if told is not None:
                told(len(chunk))
        return hasher.hexdigest()

    def local(self, folder: str, name: str) -> AbstractContextManager[Path]:
        """A copy in the spool, shared by all who read it at the same time; the last one removes it."""
        if self._spool is None:
            raise StoreError(f"{self.where}/{folder}/{name}: no folder for a local copy")

        def fetch(file: BinaryIO) -> None:
            for chunk in self._chunks(folder, name):
                file.write(chunk)

        place = digest(self.where.encode())[:8]  # copies of two stores never mix
        return shared_copy(self._spool, f"{place}.{folder}.{name}", fetch)

    def _chunks(self, folder: str, name: str) -> Iterator[bytes]:
        """An object's content in order, CONCURRENCY requests ahead. Raises OSError when less comes than is there."""
        key = f"{folder}/{name}"
        size = int(self._ask("object.get", key, lambda: self._library.head(self._store, key))["size"])
        starts = iter(range(0, size, CHUNK))
        with ThreadPoolExecutor(CONCURRENCY, "dtrain-object") as pool:

            def ahead(count: int) -> Iterator[Future[bytes]]:
                for start in itertools.islice(starts, count):
                    yield pool.submit(self._range, key, start, min(CHUNK, size - start))

            under_way = deque(ahead(CONCURRENCY))
            try:
                while under_way:
                    chunk = under_way.popleft().result()
                    under_way += ahead(1)
                    yield chunk
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _range(self, key: str, start: int, length: int) -> bytes:
        def get() -> bytes:
            return bytes(self._library.get_range(self._store, key, start=start, length=length))

        data = self._ask(None, key, get)
        if len(data) != length:
            raise StoreError(f"{self.where}/{key}: {len(data)} bytes came where {length} were asked for")
        return data

    def sync(self, folder: str = "") -> None:
        """An object that was acknowledged is durable."""

    def rename(self, folder: str, new: str) -> None:
        """There is no such change in a bucket."""
        raise StoreError(f"{self.where}/{folder}: objects cannot be renamed")

    def delete(self, folder: str, names: Iterable[str]) -> None:
        """Delete objects, one request each, in order."""
        for name in names:
            key = f"{folder}/{name}"
            with contextlib.suppress(FileNotFoundError):
                self._ask("object.delete", key, lambda key=key: self._library.delete(self._store, key))  # type: ignore[misc]

    def _put(self, key: str, content: bytes | Path, **how: Any) -> None:
        self._library.put(self._store, key, content, **how)

    def _ask(self, operation: str | None, key: str, request: Callable[[], _T]) -> _T:
        """One request (`operation` is its fault point); obstore's errors become OSErrors that say where."""
        where = f"{self.where}/{key}".rstrip("/")
        known = self._library.exceptions
        tries = 0
        while True:
            tries += 1
            if operation is not None:
                faults.operation(operation, where)
            try:
                return request()
            except known.AlreadyExistsError:
                raise FileExistsError(17, "exists already", where) from None
            except (known.NotFoundError, FileNotFoundError) as error:
                if "NoSuchBucket" in str(error):
                    raise StoreError(f"{where}: {said(error)}") from None
                raise FileNotFoundError(2, "no such object", where) from None
            except known.BaseError as error:
                if not _cut_list(error) or tries > MAX_RETRIES:
                    raise (Unsure if _unsure(error) else StoreError)(f"{where}: {said(error)}") from None
            except BaseException as error:
                if type(error).__name__ != "PanicException":  # of obstore's Rust part, and no Exception for Python
                    raise
                raise StoreError(f"{where}: obstore failed: {said(error)}") from None
            time.sleep(PAUSE_S)


def _cut_list(error: BaseException) -> bool:
    """Tell whether a list broke off in its body, the one case that obstore does not try again."""
    return "ListResponseBody" in str(error)


def _unsure(error: BaseException) -> bool:
    """Tell whether the request may have been carried out all the same."""
    text = str(error)
    signs = ("kind: Timeout", "kind: Interrupted", "kind: Request", "status: 5")
    return "kind: Connect" not in text and any(sign in text for sign in signs)


def _refuse_credentials(url: str, options: Mapping[str, str]) -> None:
    for what, text in (("the URL", url), ("the endpoint", options.get("endpoint", ""))):
        if any(sign in text for sign in "@?#"):
            kind = "of a store" if what == "the URL" else "of an object store"
            raise StoreError(
                f"{what} {kind} holds one of `@`, `?`, `#`: credentials come from the environment, never from there"
            )


def _config(url: str, options: Mapping[str, str]) -> dict[str, str]:
    """obstore's names for our options."""
    if unknown := options.keys() - _OPTIONS:
        raise StoreError(f"{url}: no such option: {', '.join(sorted(unknown))}; there are endpoint and region")
    scheme = url.partition("://")[0]
    config = {}
    if "endpoint" in options:
        if scheme not in _ENDPOINT:
            raise StoreError(f"{url}: an endpoint of your own is understood for s3:// and az:// only")
        if not options["endpoint"].startswith(("http://", "https://")):
            raise StoreError(f"{url}: the endpoint {options['endpoint']} does not begin with http:// or https://")
        config[_ENDPOINT[scheme]] = options["endpoint"]
    if "region" in options:
        if scheme != "s3":
            raise StoreError(f"{url}: a region is understood for s3:// only")
        config["aws_region"] = options["region"]
    return config


def _library() -> Any:
    try:
        import obstore
    except ImportError:
        raise StoreError("the object tier needs one more package: pip install 'dtrain[object]'") from None
    return obstore
