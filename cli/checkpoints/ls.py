"""`dtrain ls`: the checkpoints of a run in all tiers."""

from __future__ import annotations

from typing import Any

from ...specs.codes import Code
from ...tiers.tier import Rejected
from ..terminal.refusal import Refused, guarded
from ..view.format import human_bytes
from .output import columns, document, say, talk
from .stored import IN_PART, Stored, look

UNFINISHED = "unfinished: being written or deleted"


def ls(run_dir: str, as_json: bool) -> int:
    """Print every checkpoint of a run, newest first. Returns the exit code."""
    return guarded(lambda: _ls(look(run_dir), as_json), as_json)


def _ls(stored: Stored, as_json: bool) -> Code:
    for words in stored.unreachable:
        talk(f"warning: {words}")
    rows = _rows(stored)
    if stored.unreachable and not rows:
        raise Refused(Code.MISSING_RESOURCE, f"{stored.root}: no tier with a checkpoint in it could be read")
    if as_json:
        document({"run_dir": str(stored.root), "checkpoints": rows, "unreachable": stored.unreachable})
    elif not rows:
        say(f"{stored.root}: no checkpoints")
    else:
        columns([("step", "tier", "attempt", "size", "state"), *map(_cells, rows)])
    return Code.DONE


def _rows(stored: Stored) -> list[dict[str, Any]]:
    rows = [
        {
            **held.candidate.to_json(),
            "path": held.candidate.folder,
            "bytes": held.nbytes,
            "usable": True,
            "reason": None,
        }
        for held in stored.held
    ]
    rows += [_bad(one, UNFINISHED) for one in stored.unfinished]
    rows += [_bad(one, one.reason) for one in [*stored.partial, *stored.rejected]]
    return sorted(rows, key=lambda row: (row["attempt"], row["step"]), reverse=True)


def _bad(one: Rejected, reason: str) -> dict[str, Any]:
    where = {"tier": one.tier, "step": one.version.step, "attempt": one.version.attempt}
    return {**where, "folder": one.where, "path": one.where, "bytes": None, "usable": False, "reason": reason}


def _cells(row: dict[str, Any]) -> tuple[str, str, str, str, str]:
    size = human_bytes(row["bytes"]) if row["bytes"] is not None else "-"
    told = not row["usable"] and row["reason"].startswith((UNFINISHED, IN_PART))
    state = "whole" if row["usable"] else row["reason"] if told else f"DAMAGED: {row['reason']}"
    return str(row["step"]), row["tier"], str(row["attempt"]), size, state
