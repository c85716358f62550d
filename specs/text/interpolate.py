"""Expands `~`, `${VAR}` and `${VAR:-default}` in the values that are paths or URLs, after parsing, once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from .tree import Finding, Items, KeyPath, Node, Scalar, find, with_node

_DOLLAR = re.compile(
    r"\$(?:(?P<escaped>\$)|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^${}]*))?\}|(?P<other>.?))",
    re.DOTALL,
)
_HINT = "`${VAR}` and `${VAR:-default}` are expanded; write `$$` for a dollar sign"


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Expand one path; ValueError says which part cannot be."""

    def value(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if match["escaped"]:
            return "$"
        if not name:
            raise ValueError(f"`${match['other']}` means nothing here")
        held = environment.get(name)
        if held:
            return held
        if default is not None:
            return default
        state = "not set" if held is None else "empty"
        raise ValueError(f"the environment variable {name} is {state}")

    result = _DOLLAR.sub(value, text)
    if result.startswith("~"):
        home = os.path.expanduser(result)  # noqa: PTH111  (Path would fold `//` and drop a trailing slash)
        if home.startswith("~"):
            raise ValueError(f"`{result.split('/')[0]}` names no home directory")
        result = home
    if any(ord(char) < 32 or char == "\x7f" for char in result):
        raise ValueError("a path cannot hold control characters")
    return result


def _path_keys(root: Node) -> list[KeyPath]:
    tiers = find(root, ("tiers",))
    count = len(tiers.items) if isinstance(tiers, Items) else 0
    places = [("tiers", index, key) for index in range(count) for key in ("path", "url", "endpoint")]
    return [("output_dir",), ("dataset", "path"), ("evaluation", "dataset", "path"), *places]


def expanded(root: Node, environment: Mapping[str, str], done: str | None = None) -> tuple[Node, list[Finding]]:
    """Return the tree with its paths expanded, and what could not be.

    Values from the source `done` (a stored spec) were expanded before they were written, and stay.
    """
    findings: list[Finding] = []
    for path in _path_keys(root):
        node = find(root, path)
        # Text only, or what an unquoted value looks like: a folder may be called 2024.
        if not isinstance(node, Scalar) or node.value is None or not (node.plain or isinstance(node.value, str)):
            continue
        if node.mark.source == done:
            continue
        try:
            text = expand(node.text, environment)
        except ValueError as error:
            hint = _HINT if "means nothing" in str(error) else None
            hint = "set it, or give a default: `${VAR:-default}`" if "variable" in str(error) else hint
            findings.append(Finding(path, str(error), hint))
        else:
            root = with_node(root, path, replace(node, text=text, value=text, plain=False))
    return root, findings
