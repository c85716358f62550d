"""Says in a person's words what a YAML parser found wrong, and where the cause (not the symptom) stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from yaml.error import MarkedYAMLError

ODD_CHARACTERS = {
    "\t": "a tab",
    "\u00a0": "a no-break space (U+00A0)",
    "\u2007": "a figure space (U+2007)",
    "\u202f": "a narrow no-break space (U+202F)",
    "\u3000": "an ideographic space (U+3000)",
    "\u200b": "a zero-width space (U+200B)",
    "\ufeff": "a byte order mark (U+FEFF)",
}
"""Characters that look like a space (or like nothing) but do not separate in YAML."""

UNSPACED = re.compile(r"[A-Za-z_][\w.-]*:(?=[^\s/])")
"""A key, a colon and no space after it; not the start of an address like `s3://`."""

_UNSPACED_LINE = re.compile(rf"\s*(?:- +)?(?P<key>{UNSPACED.pattern})")


@dataclass(frozen=True)
class Fault:
    """A fault of the text; line and column are counted from 0."""

    line: int
    column: int
    message: str
    hint: str | None


def odd_character(text: str) -> str | None:
    """Name the first character of `text` that only looks like a space."""
    return next((name for char, name in ODD_CHARACTERS.items() if char in text), None)


def _tab(number: int, line: str) -> Fault | None:
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" not in indent:
        return None
    return Fault(number, indent.index("\t"), "a tab is used for indentation", "indent with spaces only")


def _odd_space(number: int, line: str) -> Fault | None:
    code = line.split(" #", maxsplit=1)[0]
    for column, char in enumerate(code):
        if char in ODD_CHARACTERS and char != "\t":
            message = f"{ODD_CHARACTERS[char]} stands where a normal space belongs"
            return Fault(number, column, message, "replace it with a space (U+0020)")
    return None


def _unspaced(number: int, line: str) -> Fault | None:
    match = _UNSPACED_LINE.match(line)
    if match is None:
        return None
    key = match["key"]
    message = f"no space after the colon of `{key}`"
    return Fault(number, match.start("key"), message, f"write `{key} {line[match.end() :].strip()[:40]}`")


_LOOKS: tuple[Callable[[int, str], Fault | None], ...] = (_tab, _odd_space, _unspaced)

_WORDS: tuple[tuple[str, str, str], ...] = (
    (
        "character '\\t' that cannot start",
        "a tab stands where only spaces may",
        "replace the tab with spaces",
    ),
    (
        "that cannot start any token",
        "unquoted text cannot start with this character",
        "put the text in single quotes",
    ),
    (
        "mapping values are not allowed",
        "a second `: ` in one line, or a wrong indentation",
        "put text that holds `: ` in quotes; keys of one block start in one column",
    ),
    (
        "could not find expected ':'",
        "this line is not `key: value`",
        "write a colon and a space after the key",
    ),
    (
        "expected <block end>",
        "the indentation fits no block above it",
        "keys of one block start in one column",
    ),
    (
        "expected ',' or",
        "a comma or a closing bracket is missing",
        "check that every `[` and `{` is closed",
    ),
    (
        "expected alphabetic or numeric",
        "`*` starts an alias and `&` an anchor, and a name must follow",
        "put text that starts with `*` or `&` in quotes",
    ),
    (
        "expected '<document start>'",
        "text before or after the document",
        "a spec is one document: remove this, or a `...` line above it",
    ),
    ("expected the node content", "a key or a value is missing here", "check the colons and commas around it"),
    (
        "found unknown escape character",
        "an unknown escape in double quotes",
        "use single quotes for text that holds a backslash",
    ),
    (
        "unacceptable character",
        "a character that cannot stand in YAML",
        "remove it, or write it as an escape in double quotes",
    ),
)

_VARIABLE = "put text that holds `${` in quotes, where brackets are open"


def bad_escape(text: str) -> tuple[int, int]:
    """Find the escape of a character beyond the last one there is; the start of the text if there is none."""
    for match in re.finditer(r"\\U([0-9a-fA-F]{8})", text):
        if int(match[1], 16) > 0x10FFFF:
            before = text[: match.start()]
            return before.count("\n"), match.start() - (before.rfind("\n") + 1)
    return 0, 0


def explain(error: MarkedYAMLError, text: str) -> Fault:
    """Translate a parser's error, looking at the lines in question for the usual causes first."""
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    start = error.context_mark.line if error.context_mark else line
    # Split as the parser does, or line numbers drift apart.
    lines = re.split("\r\n|[\r\n\x85\u2028\u2029]", text)
    for number in range(max(0, start - 1, line - 20), min(line + 1, len(lines))):
        for look in _LOOKS:
            fault = look(number, lines[number])
            if fault is not None:
                return fault
    said = str(error.problem or error.context or "cannot be read")
    if "unexpected end of stream" in said and error.context_mark:
        start, column = error.context_mark.line, error.context_mark.column
        return Fault(start, column, "this quote is not closed", "close it, or put the text in other quotes")
    opened = f" (the bracket of line {start + 1})" if "expected ',' or" in said and start < line else ""
    for part, message, hint in _WORDS:
        if part in said:
            variable = "expected ',' or" in said and "${" in "".join(lines[line : line + 1])
            return Fault(line, column, message + opened, _VARIABLE if variable else hint)
    return Fault(line, column, f"not valid YAML: {said}", None)
