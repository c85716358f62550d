"""Lines of JSON and files of token ids as samples of `seq_len + 1` tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from .text import DataError, Part, TokenData, files_in


class JsonlData(TokenData):
    """The texts of all lines, one after the other, a newline behind each; a file is a part."""

    def __init__(self, path: str, seq_len: int, field: str, key: str = "dataset") -> None:
        """Read a file or the `*.jsonl` of a folder; raises DataError that names the spec's block, file and line."""
        files = list(files_in(path, key, ".jsonl"))
        super().__init__(path, seq_len, key, files, [_texts(file, field, key) for file in files])


class BinaryData(TokenData):
    """Token ids as they lie in the files, which are mapped."""

    def __init__(self, path: str, seq_len: int, dtype: str, vocab_size: int | None, key: str = "dataset") -> None:
        """Map a file or the `*.bin` of a folder; raises DataError that names the spec's block and the file.

        `vocab_size`: what the ids must be below, where the spec says it; each sample is looked at when it is read.
        """
        files = list(files_in(path, key, ".bin"))
        kind = np.dtype(dtype).newbyteorder("<")
        self.vocab_size, self.key = vocab_size, key
        super().__init__(path, seq_len, key, files, [part for file in files for part in _ids(file, kind, key)])

    def _read(self, start: int, stop: int) -> Part:
        found = super()._read(start, stop)
        if self.vocab_size is not None and (largest := int(found.max())) >= self.vocab_size:
            raise DataError(
                f"{self.key}.path {self.path!r}: token {largest} among those from {start} to {stop - 1}, and "
                f"model.vocab_size is {self.vocab_size}; set it to {largest + 1} or more, or see whether "
                f"{self.key}.dtype is right"
            )
        return found


def _texts(file: Path, field: str, key: str) -> Part:
    joined = bytearray()
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    joined += _text(line, field, f"{key}.path: {file}:{number}", key) + b"\n"
    except OSError as error:
        raise DataError(f"{key}.path: {file}: {error.strerror}") from error
    return np.frombuffer(bytes(joined), dtype=np.uint8)


def _text(line: bytes, field: str, where: str, key: str) -> bytes:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not a line of JSON ({error})") from error
    if not isinstance(found, dict):
        raise DataError(f"{where}: must be an object with the key {field!r}, this is {_kind(found)}")
    if field not in found:
        has = ", ".join(found) or "none"
        raise DataError(f"{where}: no key {field!r} (keys: {has}); {key}.field names the key of the text")
    text = found[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: {field!r} is {_kind(text)}; {key}.field names the key of the text")
    return text.encode(errors="surrogatepass")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _ids(file: Path, kind: np.dtype[np.unsignedinteger], key: str) -> list[Part]:
    try:
        size = file.stat().st_size
        if size % kind.itemsize:
            raise DataError(f"{key}.path: {file}: {size} bytes are no whole number of {kind.name} ({key}.dtype)")
        return [np.memmap(file, dtype=kind, mode="r")] if size else []  # an empty file cannot be mapped
    except OSError as error:
        raise DataError(f"{key}.path: {file}: {error.strerror}") from error
