"""Reading an append-only file of JSON lines while other processes write to it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ...tiers.format.files import open_plain

LAST_BYTES = 1 << 16
"""How far from the end `last_lines` looks: some 200 lines of metrics."""
MAX_LINE_BYTES = 1 << 22
"""A longer line is junk, whatever it holds; it keeps a runaway writer from filling this process."""
MAX_READ_BYTES = 1 << 26
"""Most that is read at once; the rest comes with the next call."""
MAX_RESTARTS_IN_LINE = 64


class JsonLines:
    """New whole lines of one file, each time `poll` is called.

    A last line without its newline is kept back until the newline is there. A line that is no JSON object is
    skipped and counted; where a writer died in the middle of a line and the next one wrote on behind it, the
    whole object at the end of that line is still taken. A file that has become shorter is read anew.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.skipped = 0
        """Lines that could not be read, wholly or in part."""
        self._offset = _size(path) if from_end else 0
        self._rest = b""
        self._overlong = False

    def poll(self) -> list[dict[str, Any]]:
        """Return the objects of the lines that were finished since the last call."""
        data = self._read()  # before `_rest` is looked at: a file that was cut short clears it
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._overlong and lines:
            lines, self._overlong = lines[1:], False  # the tail of a line whose beginning was thrown away
        if len(self._rest) > MAX_LINE_BYTES:
            self.skipped += not self._overlong
            self._rest, self._overlong = b"", True
        return [record for line in lines if (record := self._parse(line)) is not None]

    def _read(self) -> bytes:
        try:
            with os.fdopen(open_plain(self.path), "rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset, self._rest, self._overlong = 0, b"", False
                file.seek(self._offset)
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return b""  # not there yet, or out of reach for the moment
        self._offset += len(data)
        return data

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        if not line.strip():
            return None
        record = parse_object(line)
        if record is None:
            self.skipped += 1
            record = _object_at_end(line)
        return record


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of the last lines of a file, oldest first, without reading all of it."""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            start = max(0, file.seek(0, 2) - LAST_BYTES)
            file.seek(start)
            data = file.read(LAST_BYTES)
    except OSError:
        return []
    lines = data.split(b"\n")
    whole = lines[1:-1] if start else lines[:-1]
    return [record for line in whole if (record := parse_object(line)) is not None]


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Read one JSON object; anything else is None."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _object_at_end(line: bytes) -> dict[str, Any] | None:
    """Find a whole object that ends where the line ends; an object nested in a torn one never does."""
    position = 0
    for _ in range(MAX_RESTARTS_IN_LINE):
        position = line.find(b'{"', position + 1)
        if position < 0:
            return None
        record = parse_object(line[position:])
        if record is not None:
            return record
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
