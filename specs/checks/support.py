"""What a later version will do and this one refuses by name: planned words of the spec.

They are told apart from typing errors: each message says "not yet supported" and what works today.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..text.tree import Finding, KeyPath, Keys, Node, Scalar, find

_DEGREES = {"cp": "context parallel", "ep": "expert parallel"}

_DATASETS = (
    "a dataset of type",
    "`text`, `jsonl`, `tokens` and `python` work today",
    ("hf", "parquet"),
)
_VALUES: dict[KeyPath, tuple[str, str, tuple[str, ...]]] = {
    ("model", "type"): ("a model of type", "`gpt` and `python` work today", ("hf",)),
    ("dataset", "type"): _DATASETS,
    ("evaluation", "dataset", "type"): _DATASETS,
    ("training", "precision"): (
        "the precision",
        "`fp32`, `bf16-mixed`, `fp16-mixed` and `bf16` work today",
        ("fp16", "fp16-true", "float16", "16", "16-true", "fp8"),
    ),
}


def _text(root: Node, path: KeyPath) -> str | None:
    node = find(root, path)
    return node.text.strip() if isinstance(node, Scalar) and node.value is not None else None


def _refusal(path: KeyPath, what: str, works: str, at_key: bool = False) -> Finding:
    return Finding(path, f"{what} is not yet supported; {works}", at_key=at_key)


def _choices(root: Node) -> Iterator[Finding]:
    for path, (what, works, planned) in _VALUES.items():
        text = _text(root, path)
        if text is not None and text.lower() in planned:
            yield _refusal(path, f"{what} `{text}`", works)


def _strategy(root: Node) -> Iterator[Finding]:
    block = find(root, ("strategy",))
    if not isinstance(block, Keys):
        return
    works = "`dp_replicate`, `dp_shard`, `tp` and `pp` work today: remove the key"
    for key, name in _DEGREES.items():
        if isinstance(find(block, (key,)), Scalar):
            yield _refusal(("strategy", key), f"{name} (`{key}`)", works, at_key=True)


def planned(root: Node) -> list[Finding]:
    """Find everything in a spec that is planned but not built."""
    return [finding for look in (_choices, _strategy) for finding in look(root)]
