"""Small JSON files and lines that other processes read while they are written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

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
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise Unreadable(f"{path}: larger than {max_bytes} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise Unreadable(f"{path}: not a JSON object")
    return value


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one line in a single write, so that lines of several processes never mix."""
    data = json.dumps(value, separators=(",", ":")).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def end_last_line(path: Path) -> None:
    """After a crash in the middle of a line: end it, so that the next one is not glued to it."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def append_event(path: Path, event: str, step: int | None, attempt: int, /, **details: object) -> None:
    """Append one line to events.jsonl."""
    append_line(path, {"event": event, "step": step, "attempt": attempt, **details, "time": time.time()})


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines that are JSON objects; a missing file has none."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().split(b"\n"):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines
