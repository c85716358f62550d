"""`dtrain inspect`: what one checkpoint holds, and what has changed in the spec since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...specs.codes import Code
from ...specs.difference import Change, changes
from ...specs.models import Strategy
from ...tiers.format.layout import shard_name
from ...tiers.reading.recovery import Opened
from ...tiers.reading.whole import Facts, facts_of, read_whole
from ..terminal.refusal import guarded
from ..view.format import human_bytes
from .output import columns, document, progress, say
from .stored import Held, first_readable, pick

_LINES = (
    "path",
    "tier",
    "step",
    "attempt",
    "world",
    "mesh",
    "bytes",
    "parameters",
    "data",
    "scheduler",
    "state_digest",
)


def inspect(target: str, as_json: bool, tier: str | None = None) -> int:
    """Print what one checkpoint holds: the newest, or that of the step after `@`. Returns the exit code."""
    return guarded(lambda: _inspect(target, as_json, tier), as_json)


def _inspect(target: str, as_json: bool, tier: str | None) -> Code:
    picked = pick(target, tier)
    described, passed = first_readable(picked, lambda held, opened: _describe(held, opened, picked.stored.spec))
    if as_json:
        document({**described, "passed_over": passed})
    else:
        _print(described)
    return Code.DONE


def _describe(held: Held, opened: Opened, spec: Mapping[str, Any] | None) -> dict[str, Any]:
    facts = facts_of(opened)
    meta = opened.meta
    changed = spec_changes(meta.get("spec"), spec)
    weights = [info for name, info in facts.items() if name.startswith("model.")]
    return {
        **opened.candidate.to_json(),
        "path": opened.candidate.folder,
        "world": opened.world,
        "mesh": _mesh(meta.get("mesh")),
        "bytes": opened.nbytes,
        "parameters": sum(math.prod(info.shape) for info in weights),
        "state_digest": _state_digest(held, opened, facts),
        "spec_digest": meta.get("spec_digest"),
        "data": meta.get("data"),
        "scheduler": meta.get("scheduler"),
        "ties": meta.get("ties"),
        "files": _files(opened),
        "tensors": {name: _tensor(info) for name, info in facts.items()},
        "spec_changes": None if changed is None else [change.to_json() for change in changed],
    }


def _mesh(mesh: Any) -> Any:
    """Degrees in the order of the spec: a manifest sorts its keys. None in checkpoints that say nothing of it."""
    if not isinstance(mesh, dict):
        return mesh
    known = list(Strategy.model_fields)
    return dict(sorted(mesh.items(), key=lambda item: known.index(item[0]) if item[0] in known else len(known)))


def _tensor(info: Facts) -> dict[str, Any]:
    return {"dtype": info.dtype, "shape": list(info.shape), "bytes": info.nbytes, "pieces": info.pieces}


def spec_changes(then: Any, now: Mapping[str, Any] | None) -> list[Change] | None:
    """What has changed since the checkpoint; None when one of the two specs is not known."""
    return changes(then, now) if isinstance(then, dict) and now is not None else None


def _state_digest(held: Held, opened: Opened, facts: Mapping[str, Facts]) -> str:
    """The hash over all tensors; it takes reading them all, so that damage is found too."""
    with progress(f"reading {held}", opened.nbytes) as told:
        return read_whole(opened, facts, told)


def _files(opened: Opened) -> dict[str, Any]:
    """In memory a file has no digest as a whole, its entries have."""
    if "files" in opened.meta:
        return dict(opened.meta["files"])
    return {
        shard_name(rank): {"bytes": source.nbytes, "digest": None, "header_digest": source.header_digest}
        for rank, source in enumerate(opened.sources)
    }


def _print(described: Mapping[str, Any]) -> None:
    for key in _LINES:
        value = human_bytes(described[key]) if key == "bytes" else _words(described[key])
        say(f"{key:13} {value}")
    for alias, kept in (described["ties"] or {}).items():
        say(f"{'tied':13} {alias} is {kept}")
    _print_changes(described["spec_changes"])
    say("")
    columns(
        [
            ("file", "size", "digest"),
            *((name, human_bytes(info["bytes"]), info["digest"] or "-") for name, info in described["files"].items()),
        ]
    )
    say("")
    columns([("tensor", "dtype", "shape", "size", "pieces"), *map(_row, described["tensors"].items())])


def _print_changes(changed: list[dict[str, Any]] | None) -> None:
    for change in changed or []:
        say(f"changed since: {Change(**change)}")
    if changed is not None and not changed:
        say(f"{'spec':13} as it is now")


def _row(tensor: tuple[str, dict[str, Any]]) -> tuple[str, str, str, str, str]:
    name, info = tensor
    shape = "x".join(map(str, info["shape"])) or "()"
    return name, info["dtype"], shape, human_bytes(info["bytes"]), str(info["pieces"])


def _words(value: Any) -> str:
    """A small mapping as its pairs, everything else as it is."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "-" if value is None else str(value)
