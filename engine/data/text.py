"""Rows of tokens as samples of `seq_len + 1`; plain text as one, a token per byte."""

from __future__ import annotations

import copy
import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

STDLIB = "python:stdlib"
MAPPED_FROM = 64 * 2**20
EDGE = 2**20
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class DataError(Exception):
    """The data set cannot be used; the message says why and what to do."""


Part = NDArray[np.unsignedinteger]
"""A stretch of tokens in memory, or a file that is mapped."""


class TokenData:
    """Runs of tokens cut from the joined parts; sample i begins at token i · seq_len."""

    def __init__(self, path: str, seq_len: int, key: str, files: Sequence[Path], parts: Sequence[Part]) -> None:
        """Take what was read from the files; raises DataError that names the spec's block."""
        self.files, self.parts = files, parts
        self.ends = np.cumsum([len(part) for part in self.parts])
        self.first = 0
        self.tokens = sum(len(part) for part in self.parts)
        self.seq_len = seq_len
        self.path = path
        if self.tokens < seq_len + 1:
            raise DataError(f"{key}.path {path!r}: {self.tokens} tokens are fewer than one sample of {seq_len + 1}")

    def __len__(self) -> int:
        return max(0, (self.tokens - 1) // self.seq_len)

    def __getitem__(self, index: int) -> Tensor:
        start = self.first + index * self.seq_len
        return torch.from_numpy(self._read(start, start + self.seq_len + 1).astype(np.int64))

    def split(self, fraction: float) -> tuple[Self, Self]:
        """The tokens without their last part, and that part; no token is in both."""
        last = math.ceil(self.tokens * fraction)
        before, after = copy.copy(self), copy.copy(self)
        before.tokens, after.first, after.tokens = self.tokens - last, self.first + self.tokens - last, last
        return before, after

    def fingerprint(self) -> str:
        """A hash that changes when the tokens do: their number, and the first and last MiB of every part."""
        hasher = xxhash.xxh3_128()
        for part in self.parts:
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(np.ascontiguousarray(part[:EDGE]).data)
            hasher.update(np.ascontiguousarray(part[-EDGE:]).data)
        return hasher.hexdigest()

    def _read(self, start: int, stop: int) -> Part:
        number = int(np.searchsorted(self.ends, start, side="right"))
        pieces = []
        while start < stop:
            begin = int(self.ends[number]) - len(self.parts[number])
            piece = self.parts[number][start - begin : stop - begin]
            pieces.append(piece)
            start += len(piece)
            number += 1
        return np.concatenate(pieces)


class TextData(TokenData):
    """The joined text of files, one token per byte."""

    def __init__(self, path: str, seq_len: int, key: str = "dataset") -> None:
        """Read a file, a folder of files or the standard library; raises DataError that names the spec's block."""
        files = list(text_files(path, key))
        super().__init__(path, seq_len, key, files, list(_parts(files, key)))


def text_files(path: str, key: str = "dataset") -> Iterator[Path]:
    """The files that make up the text, in an order that does not depend on the machine; raises DataError."""
    if path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        for file in sorted(root.rglob("*.py")):
            if not _LEFT_OUT.intersection(file.relative_to(root).parts):
                yield file
        return
    yield from files_in(path, key)


def files_in(path: str, key: str, ending: str = "") -> Iterator[Path]:
    """A file, or a folder's files with this ending, in an order that does not depend on the machine; or DataError."""
    root = Path(path)
    if root.is_file():
        yield root
    elif root.is_dir():
        found = (file for file in root.rglob(f"*{ending}") if file.is_file() and not _is_hidden(file, root))
        if not (files := sorted(found)):
            raise DataError(f"{key}.path {path!r}: no files in it" + (f" that end in {ending}" if ending else ""))
        yield from files
    else:
        raise DataError(f"{key}.path {path!r}: no such file or folder (relative paths: from {Path.cwd()})")


def _is_hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _parts(files: list[Path], key: str) -> Iterator[NDArray[np.uint8]]:
    """Small files joined in memory, large ones mapped."""
    joined = bytearray()
    for file in files:
        try:
            if file.stat().st_size < MAPPED_FROM:
                joined += file.read_bytes()
                continue
            mapped = np.memmap(file, dtype=np.uint8, mode="r")
        except OSError as error:
            raise DataError(f"{key}.path: {file}: {error.strerror}") from error
        if joined:
            yield np.frombuffer(bytes(joined), dtype=np.uint8)
            joined.clear()
        yield mapped
    if joined:
        yield np.frombuffer(bytes(joined), dtype=np.uint8)
