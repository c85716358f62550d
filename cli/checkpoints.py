"""`dtrain ls`, `inspect`, `verify`: look at what a run has stored; none of them needs torch."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..specs.codes import Code
from ..specs.load import spec_from_json
from ..tiers.jsonfile import Unreadable, read
from ..tiers.layout import RunDir
from ..tiers.memory import memory_dir, owner_of
from ..tiers.places import slow_tiers
from ..tiers.recovery import Candidate, Opened, digest_of, entries_of, find, open_candidate
from ..tiers.recovery import verify as verify_bytes
from ..tiers.tier import Rejected
from .refusal import Refused, guarded
from .view_format import human_bytes


class NotARun(Refused):
    """The command's words do not name a run or a checkpoint of it."""

    def __init__(self, message: str) -> None:
        """It is a mistake in the command line."""
        super().__init__(Code.USAGE, message)


@dataclass(frozen=True)
class Stored:
    """What a run has in all tiers."""

    run: RunDir
    found: list[Candidate]
    rejected: list[Rejected]
    unreachable: list[str]


def list_checkpoints(run_dir: str, as_json: bool) -> int:
    """Print every checkpoint of a run, newest first. Returns the exit code."""
    return guarded(lambda: _list(_stored(run_dir), as_json), as_json)


def inspect(target: str, as_json: bool) -> int:
    """Print what one checkpoint holds (the newest, or the step after `@`). Returns the exit code."""
    return guarded(lambda: _inspect(target, as_json), as_json)


def verify(target: str, as_json: bool) -> int:
    """Check every byte of every checkpoint, or of one step. Returns the exit code, 65 when something is damaged."""
    return guarded(lambda: _verify(target, as_json), as_json)


def _stored(run_dir: str) -> Stored:
    run = RunDir(Path(run_dir).absolute())
    try:
        spec = spec_from_json(read(run.spec))
    except (Unreadable, ValueError) as error:
        raise NotARun(f"{run_dir} is not the folder of a run ({error})") from error
    run_id = str(read(run.run).get("run_id")) if run.run.exists() else None
    memory = memory_dir(run)
    mine = memory if run_id is not None and owner_of(memory) == run_id else None
    found = find(mine, slow_tiers(spec, run, run_id))
    return Stored(run, found.candidates, found.rejected, found.unreachable)


def _list(stored: Stored, as_json: bool) -> Code:
    rows: list[dict[str, Any]] = []
    for candidate in stored.found:
        nbytes = open_candidate(candidate).nbytes
        rows.append({**candidate.to_json(), "path": candidate.folder, "bytes": nbytes, "usable": True, "reason": None})
    for bad in stored.rejected:
        where = {"tier": bad.tier, "step": bad.version.step, "attempt": bad.version.attempt, "path": bad.where}
        rows.append({**where, "bytes": None, "usable": False, "reason": bad.reason})
    if as_json:
        return _print_json({"run_dir": str(stored.run.root), "checkpoints": rows})
    if not rows:
        sys.stdout.write(f"{stored.run.root}: no checkpoints\n")
        return Code.DONE
    table = Table("step", "tier", "attempt", "size", "state", box=None, pad_edge=False)
    for row in rows:
        size = human_bytes(row["bytes"]) if row["bytes"] is not None else "-"
        state = "whole" if row["usable"] else f"not usable: {row['reason']}"
        table.add_row(str(row["step"]), row["tier"], str(row["attempt"]), size, state)
    Console(markup=False).print(table)
    return Code.DONE


def _pick(target: str) -> tuple[Stored, list[Candidate], int | None]:
    run_dir, _, step = target.partition("@")
    if step and not (step.isascii() and step.isdigit()):
        raise NotARun(f"{target}: after @ comes a step number")
    stored = _stored(run_dir)
    wanted = int(step) if step else None
    chosen = [c for c in stored.found if wanted is None or c.version.step == wanted]
    return stored, chosen, wanted


def _inspect(target: str, as_json: bool) -> Code:
    stored, chosen, _ = _pick(target)
    if not chosen:
        steps = ", ".join(str(candidate.version.step) for candidate in stored.found) or "none"
        raise NotARun(f"{target}: no such checkpoint; there is {'step ' if steps != 'none' else ''}{steps}")
    opened = open_candidate(chosen[0])
    described = _describe(opened)
    if as_json:
        return _print_json(described)
    console = Console(markup=False)
    for key in ("path", "tier", "step", "attempt", "world", "bytes", "parameters", "state_digest", "spec_digest"):
        value = human_bytes(described[key]) if key == "bytes" else described[key]
        console.print(f"{key:13} {value}", highlight=False, soft_wrap=True)
    table = Table("tensor", "dtype", "shape", box=None, pad_edge=False)
    for name, info in described["tensors"].items():
        table.add_row(name, info["dtype"], "x".join(map(str, info["shape"])) or "()")
    console.print(table)
    return Code.DONE


def _describe(opened: Opened) -> dict[str, Any]:
    entries = [entry for entry in entries_of(opened) if entry.is_state]
    shapes = {entry.name: entry.global_shape for entry in entries}
    parameters = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("model."))
    tensors = {entry.name: {"dtype": entry.dtype, "shape": list(entry.global_shape)} for entry in entries}
    return {
        **opened.candidate.to_json(),
        "path": opened.candidate.folder,
        "world": opened.world,
        "bytes": opened.nbytes,
        "parameters": parameters,
        "state_digest": digest_of(opened),
        "spec_digest": opened.meta.get("spec_digest"),
        "data": opened.meta.get("data"),
        "scheduler": opened.meta.get("scheduler"),
        "mesh": opened.meta.get("mesh"),
        "ties": opened.meta.get("ties"),
        "tensors": tensors,
    }


def _verify(target: str, as_json: bool) -> Code:
    stored, chosen, wanted = _pick(target)
    rows: list[dict[str, Any]] = []
    for candidate in chosen:
        try:
            verify_bytes(open_candidate(candidate))
            reason = None
        except (Unreadable, OSError) as error:
            reason = str(error)
        rows.append({**candidate.to_json(), "good": reason is None, "reason": reason})
    for bad in stored.rejected:
        if wanted is None or bad.version.step == wanted:
            where = {"tier": bad.tier, "step": bad.version.step, "attempt": bad.version.attempt}
            rows.append({**where, "folder": bad.where, "good": False, "reason": bad.reason})
    if not rows:
        raise NotARun(f"{target}: no checkpoint to verify")
    damaged = [row for row in rows if not row["good"]]
    if as_json:
        _print_json({"run_dir": str(stored.run.root), "checkpoints": rows})
    else:
        for row in rows:
            state = "good" if row["good"] else f"DAMAGED: {row['reason']}"
            sys.stdout.write(f"step {row['step']} (attempt {row['attempt']}, {row['tier']}): {state}\n")
    return Code.DAMAGED if damaged else Code.DONE


def _print_json(value: dict[str, Any]) -> Code:
    sys.stdout.write(json.dumps(value) + "\n")
    return Code.DONE
