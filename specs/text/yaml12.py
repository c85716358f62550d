"""Reads YAML 1.2 into a tree with positions, strictly, and never runs or builds anything it names.

PyYAML splits the text into events; what they mean is decided here: core scalars of YAML 1.2 only, text keys,
no key twice, no tags beyond the core ones, no merge keys, one document, and limits on size, depth and aliases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from yaml.reader import ReaderError

from ..errors import Problem, shown
from .syntax import UNSPACED, bad_escape, explain, odd_character
from .tree import MAX_DEPTH, Entry, Items, KeyPath, Keys, Mark, Node, Scalar, dotted

MAX_BYTES = 2**20
"""Largest file that is read."""
MAX_VALUES = 20_000
"""Most values of one file, those repeated by aliases counted again: what stops an alias bomb."""
MAX_DIGITS = 1000
"""Longest number that is read as one."""

_CORE = "tag:yaml.org,2002:"
_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"(?P<inf>[-+]?\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)")
_BASES = {"0o": 8, "0x": 16}


def resolve(text: str) -> bool | int | float | str | None:
    """Return what a plain scalar means in the core schema of YAML 1.2."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        base = _BASES.get(text[:2], 10)
        return int(text if base == 10 else text[2:], base)
    if _FLOAT.fullmatch(text):
        return float(text)
    special = _SPECIAL.fullmatch(text)
    if special:
        return float(text.replace(".", "")) if special["inf"] else float("nan")
    return text


class _StopError(Exception):
    """The text cannot be read any further."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass
class _Anchor:
    node: Node
    values: int
    height: int


@dataclass
class _Composer:
    """Builds the tree from events; faults that leave a usable tree are collected, others stop it."""

    text: str
    source: str
    positions: bool
    problems: list[Problem] = field(default_factory=list)
    anchors: dict[str, _Anchor | None] = field(default_factory=dict)
    values: int = 0

    def compose(self, base: KeyPath) -> Node | None:
        """Read one document; None when there is none."""
        self.events: Iterator[Any] = iter(yaml.parse(self.text, Loader=yaml.SafeLoader))
        next(self.events)  # the start of the stream
        if isinstance(next(self.events), StreamEndEvent):
            return None
        node, _ = self._node(next(self.events), base, 0)
        next(self.events)  # the end of the document
        after = next(self.events)
        if isinstance(after, DocumentStartEvent):
            self._note(after, (), "a second document starts here", "a spec is one document: remove this `---`")
        return node

    def _mark(self, event: Event) -> Mark:
        start = event.start_mark
        if start is None or not self.positions:
            return Mark(self.source)
        return Mark(self.source, start.line + 1, start.column + 1)

    def _problem(
        self, event: Event, path: KeyPath, message: str, hint: str | None, value: str | None = None
    ) -> Problem:
        mark = self._mark(event)
        return Problem(mark.source, mark.line, mark.column, dotted(path), value, message, hint)

    def _note(self, event: Event, path: KeyPath, message: str, hint: str | None, value: str | None = None) -> None:
        self.problems.append(self._problem(event, path, message, hint, value))

    def _stop(self, event: Event, path: KeyPath, message: str, hint: str | None) -> NoReturn:
        raise _StopError(self._problem(event, path[:6], message, hint))

    def _written(self, start: Event, end: Event) -> str:
        if start.start_mark is None or end.end_mark is None:
            return ""
        return self.text[start.start_mark.index : end.end_mark.index]

    def _spend(self, event: Event, path: KeyPath, values: int, depth: int) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            message = f"more than {MAX_VALUES} values (what aliases repeat counts again)"
            self._stop(event, path, message, "use fewer aliases, or a smaller spec")
        if depth > MAX_DEPTH:
            message = f"nested deeper than {MAX_DEPTH} levels"
            self._stop(event, path, message, "check that every bracket is closed")

    def _node(self, event: Any, path: KeyPath, depth: int) -> tuple[Node, int]:
        """Build the node that starts with `event`; the second result is its height."""
        if isinstance(event, AliasEvent):
            return self._alias(event, path, depth)
        before = self.values
        self._spend(event, path, 1, depth)
        if event.anchor is not None:
            if event.anchor in self.anchors:
                self._stop(event, path, f"anchor `&{shown(event.anchor)}` is given twice", "rename one of them")
            self.anchors[event.anchor] = None
        node: Node
        if isinstance(event, ScalarEvent):
            node, height = self._scalar(event, path), 0
        elif isinstance(event, SequenceStartEvent):
            node, height = self._items(event, path, depth)
        else:
            node, height = self._keys(event, path, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = _Anchor(node, self.values - before, height)
        return node, height

    def _alias(self, event: AliasEvent, path: KeyPath, depth: int) -> tuple[Node, int]:
        name = shown(str(event.anchor))
        if event.anchor not in self.anchors:
            hint = f"define it above with `&{name}`, or quote text that starts with `*`"
            self._stop(event, path, f"alias `*{name}` has no anchor", hint)
        anchor = self.anchors[event.anchor]
        if anchor is None:
            self._stop(event, path, f"alias `*{name}` stands inside its own anchor", "remove the alias")
        self._spend(event, path, anchor.values, depth + anchor.height)
        return anchor.node, anchor.height

    def _scalar(self, event: ScalarEvent, path: KeyPath) -> Scalar:
        text = event.value
        is_plain = event.style is None and event.tag is None
        odd = odd_character(text) if event.style is None else None
        if odd:
            self._note(event, path, f"{odd} inside unquoted text", "use a normal space, or quotes", shown(text))
        if any("\ud800" <= char <= "\udfff" for char in text):
            text = self._paired(event, path)
        value: bool | int | float | str | None = text
        if is_plain and len(text) > MAX_DIGITS and (_INT.fullmatch(text) or _FLOAT.fullmatch(text)):
            self._note(event, path, f"a number of more than {MAX_DIGITS} digits", "quote it if it is text")
        elif is_plain:
            value = resolve(text)
        elif event.tag is not None:
            value = self._tagged(event, path)
        return Scalar(self._mark(event), self._written(event, event), text, is_plain, value)

    def _paired(self, event: ScalarEvent, path: KeyPath) -> str:
        """Join surrogate pairs: JSON writes characters beyond U+FFFF as two escapes."""
        text: str = event.value
        try:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            self._note(event, path, "half of a surrogate pair is not a character", "remove this escape")
            return "?"

    def _tagged(self, event: ScalarEvent, path: KeyPath) -> bool | int | float | str | None:
        kind = str(event.tag).removeprefix(_CORE)
        if kind in ("!", "str"):
            return event.value
        value = resolve(event.value) if len(event.value) <= MAX_DIGITS else event.value
        found = "null" if value is None else type(value).__name__
        if kind == "float" and found == "int":
            return float(value or 0)
        if kind != found:
            self._refuse_tag(event, path)
        return value

    def _refuse_tag(self, event: Any, path: KeyPath) -> None:
        tag = shown(str(event.tag))
        tag = f"!!{tag.removeprefix(_CORE)}" if tag.startswith(_CORE) else tag
        self._note(event, path, f"the tag `{tag}` is refused", "remove the tag: kinds follow from the keys")

    def _items(self, start: SequenceStartEvent, path: KeyPath, depth: int) -> tuple[Items, int]:
        if start.tag not in (None, "!", _CORE + "seq"):
            self._refuse_tag(start, path)
        items: list[Node] = []
        height = 0
        while not isinstance(event := next(self.events), SequenceEndEvent):
            item, below = self._node(event, (*path, len(items)), depth + 1)
            items.append(item)
            height = max(height, below + 1)
        written = self._written(start, event) if start.flow_style else ""
        return Items(self._mark(start), written, tuple(items)), height

    def _keys(self, start: MappingStartEvent, path: KeyPath, depth: int) -> tuple[Keys, int]:
        if start.tag not in (None, "!", _CORE + "map"):
            self._refuse_tag(start, path)
        entries: dict[str, Entry] = {}
        height = 0
        while not isinstance(event := next(self.events), MappingEndEvent):
            key, _ = self._node(event, path, depth + 1)
            name = key.value if isinstance(key, Scalar) and isinstance(key.value, str) else None
            inner = (*path, name) if name is not None else path
            node, below = self._node(next(self.events), inner, depth + 1)
            height = max(height, below + 1)
            if name is None:
                self._refuse_key(event, path, key)
            elif self._usable(event, inner, key, node, entries):
                entries[name] = Entry(self._mark(event), node)
        written = self._written(start, event) if start.flow_style else ""
        return Keys(self._mark(start), written, entries), height

    def _refuse_key(self, event: Event, path: KeyPath, key: Node) -> None:
        if isinstance(key, Scalar):
            message = f"a key must be text, not {shown(key.written) or 'nothing'}"
            hint = f'quote it: "{shown(key.text)}"' if key.text else "write a key before the colon"
        else:
            message, hint = "a key must be text, not a block or a list", "check the brackets around it"
        self._note(event, path, message, hint)

    def _usable(self, event: Event, path: KeyPath, key: Node, node: Node, entries: dict[str, Entry]) -> bool:
        """Say whether an entry goes into the block; note why not."""
        name = str(path[-1])
        is_plain = isinstance(key, Scalar) and key.plain
        if name in entries:
            self._note(event, path, f"the key is given twice{_both(entries[name].mark, self._mark(event))}",
                       "keep one of them")  # fmt: skip
        elif is_plain and name == "<<":
            source = f" the block of line {node.mark.line}" if node.mark.line is not None else " a block"
            message = f"a merge key would mix in{source}; YAML 1.2 has none"
            self._note(event, path, message, "write the keys out, or give the whole block as an alias")
        elif is_plain and UNSPACED.match(name) and isinstance(node, Scalar) and node.written == "":
            before, _, after = name.partition(":")
            self._note(event, path[:-1], f"no space after the colon of `{shown(name)}`",
                       f"write `{shown(before)}: {shown(after)}`")  # fmt: skip
        else:
            # A key with an odd space was noted when it was read.
            return not (is_plain and odd_character(name))
        return False


def _both(first: Mark, second: Mark) -> str:
    if first.line is None:
        return ""
    if first.line == second.line:
        return f" on line {first.line}, in columns {first.column} and {second.column}"
    return f", on line {first.line} and on line {second.line}"


def parse(text: str, source: str, base: KeyPath = (), positions: bool = True) -> tuple[Node | None, list[Problem]]:
    """Read one YAML document; the node is None when it is empty or (with a problem) cannot be read.

    `base` is the key path of the value, for the problems; without `positions` they name only the source.
    """
    composer = _Composer(text, source, positions)

    def fault(line: int, column: int, message: str, hint: str | None) -> Problem:
        mark = Mark(source, line + 1, column + 1) if positions else Mark(source)
        return Problem(mark.source, mark.line, mark.column, dotted(base), None, message, hint)

    try:
        return composer.compose(base), composer.problems
    except _StopError as stop:
        problem = stop.problem
    except yaml.MarkedYAMLError as error:
        found = explain(error, text)
        problem = fault(found.line, found.column, found.message, found.hint)
    except ReaderError as error:
        before = text[: error.position]
        message = f"the character U+{ord(text[error.position]):04X} cannot stand in YAML"
        column = error.position - (before.rfind("\n") + 1)
        problem = fault(before.count("\n"), column, message, "remove it")
    except (ValueError, OverflowError) as error:
        # PyYAML converts escapes like "\UFFFFFFFF" and directives without checking them.
        message = "no such character" if "\\U" in text else f"not valid YAML: {error}"
        problem = fault(*bad_escape(text), message, "check the escapes in double quotes")
    return None, [*(found for found in composer.problems if found.line != problem.line), problem]


def decode(data: bytes, source: str) -> str | Problem:
    """Turn the bytes of a file into text; a UTF-8 byte order mark is skipped."""
    if len(data) > MAX_BYTES:
        message = f"larger than {MAX_BYTES // 2**20} MiB, which no spec is"
        return Problem(source, None, None, "", None, message, "check the path")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        message = "the file is UTF-16" if wide else f"byte 0x{data[error.start]:02x} is not UTF-8"
        return Problem(source, line, column, "", None, message, "save the file as UTF-8")
