"""`key.path=value` from the command line: replaces values in the tree before it is checked."""

from __future__ import annotations

import re
from dataclasses import replace

from .checks.outline import default_of
from .errors import Problem, shown
from .models import Spec
from .secrets import masked
from .text.tree import Entry, Items, KeyPath, Keys, Mark, Node, Scalar, dotted, from_values
from .text.yaml12 import parse

_KEY = re.compile(r"[^.\[\]=\s]+(?:\.[^.\[\]=\s]+|\[[0-9]{1,6}\])*")
_PART = re.compile(r"\[([0-9]+)\]|([^.\[\]]+)")


class _RefusedError(Exception):
    """An override that fits nowhere."""

    def __init__(self, path: KeyPath, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.path, self.message, self.hint = path, message, hint


def label(override: str) -> str:
    """Name an override in a report, where a file has its path."""
    return f"override {shown(masked(override))}"


def split(override: str) -> tuple[KeyPath, str]:
    """Split `tiers[0].every=5` (or `tiers.0.every=5`) into a key path and the text of the value."""
    key, sign, value = override.partition("=")
    if not sign:
        raise ValueError("an override is written `key.path=value`, with an `=`")
    if not _KEY.fullmatch(key):
        found = "the key is empty" if not key.strip() else f"`{shown(key)}` is not a key path"
        raise ValueError(f"{found}; write it like `training.optimizer.lr` or `tiers[0].every`")
    parts = (index or name for index, name in _PART.findall(key))
    return tuple(int(part) if re.fullmatch("[0-9]{1,6}", part) else part for part in parts), value


def _set(node: Node | None, path: KeyPath, done: KeyPath, new: Node) -> Node:
    """Return `node` with `new` at `path`, making the blocks on the way that are not there."""
    if not path:
        return new
    head, rest, here = path[0], path[1:], (*done, path[0])
    if isinstance(head, int):
        if not isinstance(node, Items):
            raise _RefusedError(here, f"`{dotted(done)}` is not a list", f"give the whole value: `{dotted(done)}=…`")
        if head >= len(node.items):
            count = len(node.items)
            known = f"items 0 to {count - 1}" if count else "no items"
            raise _RefusedError(here, f"`{dotted(done)}` has {known}", "give the whole list")
        changed = _set(node.items[head], rest, here, new)
        return replace(node, written="", items=(*node.items[:head], changed, *node.items[head + 1 :]))
    if node is None or (isinstance(node, Scalar) and node.value is None):
        node = Keys(new.mark, "", {})
    if isinstance(node, Items):
        raise _RefusedError(here, f"`{dotted(done)}` is a list", f"name an item: `{dotted((*done, 0))}.{head}=…`")
    if not isinstance(node, Keys):
        raise _RefusedError(here, f"`{dotted(done)}` is a single value, it has no keys")
    old = node.entries.get(head)
    below = old.node if old is not None else None
    if below is None and not done and rest:
        below = _default(head, new.mark.source)
    changed = _set(below, rest, here, new)
    entry = replace(old, node=changed) if old is not None and rest else Entry(new.mark, changed)
    return replace(node, written="", entries={**node.entries, head: entry})


def _default(key: str, source: str) -> Node | None:
    """Return the default of a top-level list, so that one of its items can be changed."""
    default = default_of(Spec, key)
    if not isinstance(default, list):
        return None
    return from_values([item.model_dump(mode="json") for item in default], source)[0]


def applied(root: Node | None, overrides: list[str]) -> tuple[Node | None, list[Problem]]:
    """Return the tree with all overrides applied in order, and the problems they have."""
    problems: list[Problem] = []
    for override in overrides:
        source = label(override)
        try:
            path, text = split(override)
            node, found = parse(text, source, base=path, positions=False)
            problems += found
            # An empty value means null, as it does in the file.
            node = node or (None if found else Scalar(Mark(source), "", "", True, None))
            if node is not None:
                root = _set(root, path, (), node)
        except _RefusedError as error:
            problems.append(Problem(source, None, None, dotted(error.path), None, error.message, error.hint))
        except ValueError as error:
            problems.append(Problem(source, None, None, "", None, str(error)))
    return root, problems
