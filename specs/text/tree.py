"""The spec as it was written: values with their text and position, before any meaning is given to them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import Problem, shown
from ..secrets import HIDDEN, is_secret, masked

KeyPath = tuple[str | int, ...]

MAX_DEPTH = 50
"""Levels of nesting that are read; the deepest useful spec has about ten."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A position: the file or override, and where in it."""

    source: str
    line: int | None = None
    column: int | None = None


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value; `written` is the source text with its quotes, `text` what stands between them."""

    mark: Mark
    written: str
    text: str
    plain: bool
    value: bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    mark: Mark
    written: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a block: where the key stands, and its value."""

    mark: Mark
    node: Node


@dataclass(frozen=True, slots=True)
class Keys:
    """A block of keys."""

    mark: Mark
    written: str
    entries: dict[str, Entry]


Node = Scalar | Items | Keys


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault at a key, not yet tied to a position; `at_key` points to the key instead of its value."""

    path: KeyPath
    message: str
    hint: str | None = None
    at_key: bool = False


def dotted(path: KeyPath) -> str:
    """Write a key path as people do: `tiers[1].every`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def find(node: Node, path: KeyPath) -> Node | None:
    """Return the node at `path`, or None."""
    for part in path:
        if isinstance(node, Keys) and isinstance(part, str) and part in node.entries:
            node = node.entries[part].node
        elif isinstance(node, Items) and isinstance(part, int) and 0 <= part < len(node.items):
            node = node.items[part]
        else:
            return None
    return node


def with_node(node: Node, path: KeyPath, new: Node) -> Node:
    """Return a copy of the tree with the existing node at `path` replaced.

    A copy, because an alias makes one node stand in several places.
    """
    if not path:
        return new
    head, rest = path[0], path[1:]
    if isinstance(node, Keys) and isinstance(head, str):
        old = node.entries[head]
        entry = replace(old, node=with_node(old.node, rest, new))
        return replace(node, entries={**node.entries, head: entry})
    if isinstance(node, Items) and isinstance(head, int):
        changed = with_node(node.items[head], rest, new)
        return replace(node, items=(*node.items[:head], changed, *node.items[head + 1 :]))
    raise KeyError(f"no node at {dotted(path)!r}")


def plain(node: Node) -> Any:
    """Return the tree as plain Python values."""
    if isinstance(node, Keys):
        return {key: plain(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return node.value


def scalars(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Scalar]]:
    """Walk over all single values below `node` with their key paths."""
    if isinstance(node, Keys):
        for key, entry in node.entries.items():
            yield from scalars(entry.node, (*path, key))
    elif isinstance(node, Items):
        for index, item in enumerate(node.items):
            yield from scalars(item, (*path, index))
    else:
        yield path, node


def display(node: Node) -> str:
    """Show a value as it was written, in one short line and without credentials."""
    if isinstance(node, Scalar) or node.written:
        return shown(masked(" ".join(node.written.split()) if "\n" in node.written else node.written))
    return "a block of keys" if isinstance(node, Keys) else "a list"


def _place(root: Node, finding: Finding) -> Mark:
    """Find the most telling position: the value, its key, or else the key of the block around it."""
    node, mark = root, root.mark
    for depth, part in enumerate(finding.path):
        last = depth == len(finding.path) - 1
        if isinstance(node, Keys) and part in node.entries:
            entry = node.entries[str(part)]
            node, mark = entry.node, entry.mark
        elif isinstance(node, Items) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            mark = node.mark
        else:
            return mark
        if last and not finding.at_key:
            return node.mark
    return mark


def located(root: Node, finding: Finding) -> Problem:
    """Tie a finding to its position and to the value found there."""
    mark = _place(root, finding)
    node = find(root, finding.path)
    value = None if node is None or not finding.path else display(node)
    if value and any(isinstance(part, str) and is_secret(part) for part in finding.path):
        value = HIDDEN
    key = dotted(finding.path)
    return Problem(mark.source, mark.line, mark.column, key, value, finding.message, finding.hint)


def from_values(value: object, source: str, path: KeyPath = ()) -> tuple[Node, list[Problem]]:
    """Turn plain values (parsed JSON, a default of the model) into a tree without positions."""
    mark = Mark(source)
    problems: list[Problem] = []

    def refuse(message: str, at: KeyPath) -> Scalar:
        problems.append(Problem(source, None, None, dotted(at), None, message))
        return Scalar(mark, "", "", False, None)

    def build(item: object, at: KeyPath) -> Node:
        if len(at) > MAX_DEPTH:
            return refuse(f"nested deeper than {MAX_DEPTH} levels", at[:3])
        if isinstance(item, Mapping):
            for key in item:
                if not isinstance(key, str):
                    refuse(f"keys must be text, not {key!r}", at)
            pairs = ((key, held) for key, held in item.items() if isinstance(key, str))
            return Keys(mark, "", {key: Entry(mark, build(held, (*at, key))) for key, held in pairs})
        if isinstance(item, list | tuple):
            return Items(mark, "", tuple(build(held, (*at, index)) for index, held in enumerate(item)))
        if item is None or isinstance(item, bool | int | float | str):
            written = json_text(item)
            return Scalar(mark, written, item if isinstance(item, str) else written, False, item)
        return refuse(f"a value of kind {type(item).__name__} cannot stand in a spec", at)

    return build(value, path), problems


def json_text(value: bool | int | float | str | None) -> str:
    """Write one value as JSON, and what JSON lacks as YAML does."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4096:
        return hex(value)
    return json.dumps(value, ensure_ascii=False)
