"""Runs the model over the values and says what does not fit: one finding per key, in a person's words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..models import Spec
from ..text.syntax import UNSPACED
from ..text.tree import Finding, Items, KeyPath, Keys, Node, Scalar, find
from ..text.yaml12 import resolve
from . import hints, urls
from .outline import Names, fields_at, key_path, names_of, places, title, wanted_at

EXAMPLES: dict[Names, str] = {
    ("output_dir",): "output_dir: runs/my-run",
    ("max_steps",): "max_steps: 200",
    ("model",): "model: {type: gpt, n_layers: 4, d_model: 256, n_heads: 4}",
    ("model", "type"): "type: gpt",
    ("model", "n_layers"): "n_layers: 4",
    ("model", "d_model"): "d_model: 256",
    ("model", "n_heads"): "n_heads: 4",
    ("model", "entry"): "entry: my_model:build",
    ("model", "like", "family"): "family: encoder",
    ("model", "like", "n_layers"): "n_layers: 12",
    ("model", "like", "d_model"): "d_model: 768",
    ("model", "like", "n_heads"): "n_heads: 12",
    ("model", "like", "vocab_size"): "vocab_size: 30522",
    ("dataset",): 'dataset: {type: text, path: "python:stdlib", seq_len: 128}',
    ("dataset", "type"): "type: text",
    ("dataset", "path"): 'path: "python:stdlib"',
    ("dataset", "seq_len"): "seq_len: 128",
    ("dataset", "entry"): "entry: my_data:build",
    ("evaluation", "every"): "every: 100",
    ("evaluation", "dataset", "type"): "type: text",
    ("evaluation", "dataset", "path"): "path: held_out.txt",
    ("evaluation", "dataset", "seq_len"): "seq_len: 128",
    ("evaluation", "dataset", "entry"): "entry: my_data:build_held_out",
    ("training",): "training: {global_batch_size: 32, micro_batch_size: 4, optimizer: {name: adamw, lr: 3e-4}}",
    ("training", "global_batch_size"): "global_batch_size: 32",
    ("training", "micro_batch_size"): "micro_batch_size: 4",
    ("training", "optimizer"): "optimizer: {name: adamw, lr: 3e-4}",
    ("training", "optimizer", "name"): "name: adamw",
    ("training", "optimizer", "lr"): "lr: 3e-4",
    ("tiers", "type"): "type: memory",
    ("tiers", "url"): 'url: "s3://bucket/my-run"',
}
"""A line that puts each required key right."""

_ADDRESSES: dict[Names, Callable[[str], str]] = {
    ("tiers", "url"): urls.for_url,
    ("tiers", "endpoint"): urls.for_endpoint,
}
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:[_,]\d{3})+")
_CLOCK = re.compile(r"\d+:\d\d(?::\d\d)?")
_SWITCHES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_MAX_WHOLE = 2**63
MAX_FINDINGS = 200
"""What nobody reads need not be worded: looking for the nearest key takes a millisecond."""


def check(root: Node, values: Any) -> tuple[Spec | None, list[Finding]]:
    """Validate `values`, the plain form of the tree `root`.

    Where a key takes text and the file has an unquoted value, its text is put into `values`: `name: no`
    means "no" and `name: 3.10` means "3.10".
    """
    try:
        return Spec.model_validate(values), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    if _take_as_text(root, values, errors):
        try:
            return Spec.model_validate(values), []
        except ValidationError as error:
            errors = error.errors(include_url=False)
    findings: dict[KeyPath, Finding] = {}
    for detail in errors[:MAX_FINDINGS]:
        finding = _finding(root, detail)
        earlier = findings.get(finding.path)
        if earlier is None or (earlier.hint is None and finding.hint is not None):
            findings[finding.path] = finding
    return None, list(findings.values())


def _take_as_text(root: Node, values: Any, errors: list[ErrorDetails]) -> bool:
    changed = False
    for detail in errors:
        path = key_path(detail["loc"])
        node = find(root, path)
        plain = isinstance(node, Scalar) and node.plain and node.value is not None
        if detail["type"] != "string_type" or not plain or not isinstance(node, Scalar):
            continue
        holder = values
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = node.text
        changed = True
    return changed


def _finding(root: Node, detail: ErrorDetails) -> Finding:
    path, kind = key_path(detail["loc"]), detail["type"]
    if kind == "missing":
        return _missing(root, path)
    if kind == "extra_forbidden":
        return _unknown(root, path)
    place = places().get(names_of(path))
    if kind.startswith("union_tag") and place is not None and place.tag is not None:
        path = (*path, place.tag)
        if kind == "union_tag_not_found" and find(root, path) is None:
            return _missing(root, path)
    return _misfit(root, path, detail)


def _missing(root: Node, path: KeyPath) -> Finding:
    block = "at the top level" if len(path) == 1 else f"in `{title(names_of(path[:-1]))}`"
    example = EXAMPLES.get(names_of(path))
    hint = f"add it there, like `{example}`" if example else None
    return Finding(path, f"missing: this key is required {block}", hint)


def _unknown(root: Node, path: KeyPath) -> Finding:
    place = places().get(names_of(path[:-1]))
    tag = find(root, (*path[:-1], place.tag)) if place is not None and place.tag is not None else None
    chosen = tag.value if isinstance(tag, Scalar) and isinstance(tag.value, str) else None
    return Finding(path, "unknown key", hints.for_key(path, chosen), at_key=True)


def _choices(path: KeyPath) -> tuple[str, ...]:
    kinds = [info.annotation for info in fields_at(path)]
    return tuple(str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))


def _misfit(root: Node, path: KeyPath, detail: ErrorDetails) -> Finding:
    wanted, node = wanted_at(path), find(root, path)
    message = f"must be {wanted}"
    if not path:
        message = "the spec must be a block of keys"
    elif isinstance(node, Scalar) and node.value is None:
        message = f"has no value: it must be {wanted}"
    elif detail["type"] == "less_than" and isinstance(detail["input"], int) and detail["input"] >= _MAX_WHOLE:
        message = f"must be {wanted}, below 2^63"
    choices = _choices(path)
    hint = hints.for_value(path, node.text, choices) if isinstance(node, Scalar) and choices else None
    if detail["type"] == "string_pattern_mismatch" and isinstance(node, Scalar) and names_of(path) in _ADDRESSES:
        hint = _ADDRESSES[names_of(path)](node.text)
    return Finding(path, message, hint or _unit_hint(detail) or _spelling_hint(node, wanted))


def _unit_hint(detail: ErrorDetails) -> str | None:
    """Return what the parser of a unit had to say, where it is more than the message."""
    error = detail.get("ctx", {}).get("error")
    text = str(error) if isinstance(error, ValueError) else ""
    return text if text.startswith("unknown unit") or " must be from " in text else None


def _spelling_hint(node: Node | None, wanted: str) -> str | None:
    """Advise on a value whose meaning is plain and whose spelling is not right."""
    if isinstance(node, Items):
        return None if "list" in wanted else "remove the brackets or dashes: one value, not a list"
    if isinstance(node, Keys):
        return "start each item of a list with `- `" if wanted.startswith("a list") else None
    if node is None or node.value is None:
        return None
    hint: str | None = None
    if wanted.endswith("a block of keys"):
        hint = _block_hint(node.text)
    elif "number" in wanted:
        hint = _number_hint(node, "whole number" in wanted)
    elif wanted == "true or false":
        meant = _SWITCHES.get(node.text.lower(), node.text.lower())
        hint = f"write `{meant}`" if meant in ("true", "false") else None
    elif "a time" in wanted and _CLOCK.fullmatch(node.text):
        hint = "write it with a unit, like 90s, 5min or 2h"
    return hint


def _block_hint(text: str) -> str | None:
    match = UNSPACED.match(text)
    if match:
        return f"a space belongs after the colon: `{match[0]} {text[match.end() :][:40]}`"
    return "give its keys on the lines below, indented"


def _number_hint(node: Scalar, whole: bool) -> str | None:
    if isinstance(node.value, str):
        number = resolve(node.text.strip()) if len(node.text) < 40 else None
        if isinstance(number, int | float) and not isinstance(number, bool):
            return "remove the quotes: quoted, it is text"
        if _GROUPED.fullmatch(node.text):
            return f"write `{node.text.replace('_', '').replace(',', '')}`"
    if whole and isinstance(node.value, float) and node.value.is_integer() and abs(node.value) < 2**53:
        return f"write `{int(node.value)}`"
    return None
