"""Small JSON files and lines that other processes read while they are written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import read_plain
from .journal import journal, newest_first

MAX_BYTES = 256 * 2**20


class Unreadable(Exception):
    """A file of ours that is missing, cut, too large or not what it should be."""


def dumps(value: object) -> bytes:
    """Canonical JSON: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def replace(path: Path, data: bytes) -> None:
    """Put a file in place of whatever has this name, as one change for every reader; not made durable."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Read a JSON object; raises Unreadable with the reason."""
    try:
        data = read_plain(path, max_bytes)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise Unreadable(f"{path}: not a JSON object")
    return value


def append_line(path: Path, value: dict[str, Any]) -> str | None:
    """Append one line; one that cannot be written is counted. Returns what is to be told of lines lost before it."""
    return journal(path).append(json.dumps(value, separators=(",", ":")).encode())


def append_event(path: Path, event: str, step: int | None, attempt: int, /, **details: object) -> bool:
    """Append one line to events.jsonl; False when it cannot be written, which is told (see `journal`)."""
    lost = append_line(path, {"event": event, "step": step, "attempt": attempt, **details, "time": time.time()})
    if lost is not None:
        append_event(path, "warning", step, attempt, detail=lost)
    return not journal(path).lost


def finished_at(events: Path) -> int | None:
    """The step at which the run of these events was finished last; None: never."""
    return next((line.get("steps") for line in newest_lines(events) if line.get("event") == "finished"), None)


def newest_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines that are JSON objects, the last one first, of a very long file those near its end.

    None is read that is not asked for: such files grow as long as a run, by a line or more per step. A missing file has
    none. Raises OSError for what is no plain file.
    """
    for line in newest_first(path):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all that `newest_lines` has, in the order of the file: for short ones."""
    return list(newest_lines(path))[::-1]
