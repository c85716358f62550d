"""Following a benchmark while it runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ...planners.methods import METHODS
from ..view.format import human_seconds, plural
from ..view.tail import JsonLines


class BenchView:
    """Reads what rank 0 writes and shows it; keeps all of it in `lines`. Use as a context manager."""

    def __init__(self, console: Console, path: Path) -> None:
        """Follow the file at `path`, which need not be there yet."""
        self.console, self.lines = console, list[dict[str, Any]]()
        self._source = JsonLines(path)
        parts = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self._bar = Progress(
            *parts, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task: TaskID | None = None
        self._rounds = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def poll(self) -> None:
        """Show what is new."""
        for line in self._source.poll():
            self.lines.append(line)
            self._show(line)

    def _show(self, line: Mapping[str, Any]) -> None:
        match line["what"]:
            case "trying":
                self.console.print(f"trying {METHODS[line['method']].label}", soft_wrap=True)
            case "failed":
                self.console.print(
                    f"warning: {line['method']} fails here and is left out: {line['error']}", soft_wrap=True
                )
            case "sized":
                each = plural(line["rounds"], "block")
                steps = plural(line["steps"], "timed step")
                self.console.print(f"{each} of each, {steps} in each block: about {human_seconds(line['seconds'])}")
                self._rounds = line["rounds"]
                self._task = self._bar.add_task("blocks", total=line["blocks"])
            case "block":
                self._count(line)

    def _count(self, line: Mapping[str, Any]) -> None:
        if self._task is not None:
            self._bar.advance(self._task)
        before = [other for other in self.lines[:-1] if other["what"] == "block"]
        if not self.console.is_terminal and (not before or before[-1]["round"] != line["round"]):
            self.console.print(f"round {line['round'] + 1} of {self._rounds}")
