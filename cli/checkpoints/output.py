"""How the commands on checkpoints speak: data on stdout, talk and progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from ...specs.errors import shown
from ...tiers.stores.store import Progress

_MAX_CELL = 600
"""Characters of one line of a report; a reason with a path in it fits."""


def say(line: str) -> None:
    """One line of the answer for people, on stdout."""
    _write(sys.stdout, line)


def talk(line: str) -> None:
    """One line beside the answer, on stderr."""
    _write(sys.stderr, line)


def document(value: dict[str, Any]) -> None:
    """The answer for programs: one JSON document on stdout."""
    sys.stdout.write(json.dumps(value) + "\n")


def columns(rows: Sequence[Sequence[str]]) -> None:
    """Lines of the answer with their cells one below the other; the last column is as long as it is."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _write(stream: TextIO, line: str) -> None:
    """Names and reasons may come from a file: nothing in them acts on the terminal."""
    encoding = stream.encoding or "utf-8"
    stream.write(shown(line, _MAX_CELL).encode(encoding, "backslashreplace").decode(encoding) + "\n")


@contextmanager
def progress(words: str, nbytes: int) -> Iterator[Progress]:
    """A bar on stderr for reading `nbytes`; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    parts = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    label = TextColumn("{task.description}", markup=False)
    with Bar(label, *parts, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(words, total=nbytes)
        yield lambda moved: bar.advance(task, moved)
