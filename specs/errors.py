"""What is wrong with a spec: one `Problem` per fault, all of them in one `SpecError`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from .codes import Code

SHOWN_CHARACTERS = 60


def shown(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Make text fit for one line of a terminal: shortened, and without characters that act on it."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


@dataclass(frozen=True)
class Problem:
    """One fault: where it is, what is wrong, what to do."""

    file: str
    """Path of the spec as it was given, or the override."""
    line: int | None
    """Counted from 1; None where there is no line (overrides, JSON, files that cannot be read)."""
    column: int | None
    """Counted from 1."""
    key: str
    """Path of the key, like `tiers[1].every`; empty for the file as a whole."""
    value: str | None
    """The value as it is written, shortened; None where there is none."""
    message: str
    """What is wrong."""
    hint: str | None = None
    """What to do about it."""

    def __str__(self) -> str:
        place = shown(self.file, 200)
        if self.line is not None:
            place += f":{self.line}:{self.column}"
        key = f"{shown(self.key, 200)}: " if self.key else ""
        got = "" if self.value is None else f" (got {self.value or 'nothing'})"
        hint = f"\n    {self.hint}" if self.hint else ""
        return f"{place}  {key}{self.message}{got}{hint}"


class SpecError(Exception):
    """The spec cannot be used; `problems` holds every reason that could be found."""

    exit_code: ClassVar[int] = Code.BAD_SPEC

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the problems as plain JSON values."""
        return [asdict(problem) for problem in self.problems]
