"""`dtrain resume`: continue a run from a checkpoint, never from scratch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..specs.codes import Code
from ..specs.load import load_spec, spec_to_json
from ..specs.models import Spec
from ..tiers.heartbeat import end_group, read_heartbeats
from ..tiers.jsonfile import Unreadable, read, read_lines
from ..tiers.layout import RunDir
from ..tiers.lock import FileLock, Locked
from ..tiers.memory import memory_dir, owner_of
from ..tiers.places import slow_tiers
from ..tiers.recovery import Candidate, candidate_of, find, open_candidate
from ..tiers.tier import Rejected, disk_tier
from ..tiers.whole import facts_of, read_whole
from .difference import changes
from .refusal import Refused, guarded
from .run import check_supported
from .train import Start, absolute, conclude, identity, locked, talk, train

RUNS = Path("runs")
DRAINER_TIMEOUT_S = 120.0


def resume(arguments: list[str], start: str, as_json: bool) -> int:
    """Find the run and the checkpoint, then train on. Returns the exit code."""
    return guarded(lambda: _resume(arguments, start, as_json), as_json)


def _resume(arguments: list[str], start: str, as_json: bool) -> int:
    console = talk(as_json)
    run, spec, spec_folder = _find_run(arguments)
    check_supported(spec)
    with locked(run):
        info = identity(run, spec, spec_folder)
        _tell_changes(console, run, spec)
        found, rejected = _what_is_there(run, spec, info, console)
        finished = _finished_at(run)
        chosen = _choose(found, rejected, start, run, finished if (finished or 0) >= spec.max_steps else None)
        if chosen is None:
            return _complete(finished, run, console, as_json)
        if start == "latest" and chosen[0].version.step == spec.max_steps:
            if chosen[0].tier != "memory" and finished == spec.max_steps:
                return _complete(finished, run, console, as_json)
            digest, chosen, damaged = _last_state(run, chosen, spec.max_steps)
            if digest is not None:
                return conclude(run, spec, info, chosen[0], digest, console, as_json)
            rejected = [*rejected, *damaged]
        if chosen[0].version.step >= spec.max_steps:
            raise Refused(
                Code.BAD_SPEC,
                f"max_steps is {spec.max_steps}, but the checkpoint is of step {chosen[0].version.step}; "
                "give a larger max_steps or an earlier checkpoint (--from STEP)",
            )
        return train(run, spec, info, _start(chosen, rejected), console, as_json)


def _last_state(
    run: RunDir, chosen: list[Candidate], last_step: int
) -> tuple[str | None, list[Candidate], list[Rejected]]:
    """The digest of the last step's state, if one of the candidates for it is whole; else what is older than it."""
    damaged: list[Rejected] = []
    while chosen and chosen[0].version.step == last_step:
        try:
            opened = open_candidate(chosen[0], run.spool)
            return read_whole(opened, facts_of(opened)), chosen, damaged
        except Unreadable as error:
            damaged.append(Rejected(chosen[0].tier, chosen[0].folder, chosen[0].version, str(error)))
            chosen = chosen[1:]
    if not chosen:
        raise Refused(Code.DAMAGED, "\n".join(["no checkpoint can be read whole", *(f"  {r.reason}" for r in damaged)]))
    return None, chosen, damaged


def _complete(step: int | None, run: RunDir, console: Console, as_json: bool) -> Code:
    message = f"already complete at step {step}: nothing to do"
    console.print(message)
    if as_json:
        document = {"status": "complete", "code": 0, "message": message, "step": step, "run_dir": str(run.root)}
        sys.stdout.write(json.dumps(document) + "\n")
    return Code.DONE


def _is_there(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:
        return False  # longer than a path can be


def _find_run(arguments: list[str]) -> tuple[RunDir, Spec, Path]:
    """From the command's words: the run's folder and the spec to go on with."""
    overrides = [word for word in arguments if "=" in word and not _is_there(word)]
    targets = [word for word in arguments if word not in overrides]
    if len(targets) > 1:
        raise Refused(Code.USAGE, f"one run at a time, not {' and '.join(targets)}; changes are written key=value")
    target = Path(targets[0]) if targets else _last_active()
    if target.is_dir():
        run = RunDir(target.absolute())
        if not run.spec.is_file():
            raise Refused(
                Code.DAMAGED,
                f"{target} is not the folder of a run: it has no {run.spec.name}; a run begins with dtrain run SPEC",
            )
        _refuse_other_place(run, overrides)
        return run, absolute(load_spec(run.spec, overrides)), target
    spec = absolute(load_spec(target, overrides))
    run = RunDir(Path(spec.output_dir).absolute())
    if not run.root.is_dir():
        raise Refused(
            Code.DAMAGED, f"nothing to resume from: output_dir {run.root} does not exist; start it with dtrain run"
        )
    return run, spec, target.parent


def _refuse_other_place(run: RunDir, overrides: list[str]) -> None:
    """A run goes on where it is."""
    for word in overrides:
        key, _, place = word.partition("=")
        if key.strip() == "output_dir" and Path(place).absolute() != run.root:
            raise Refused(
                Code.USAGE,
                f"{word}: a run goes on in its own folder, {run.root}; leave output_dir out, or move that folder and "
                "resume it where it is then",
            )


def _last_active() -> Path:
    found = [path for path in RUNS.glob("*/events.jsonl") if path.is_file()]
    events = sorted(found, key=lambda path: path.stat().st_mtime)
    if not events:
        raise Refused(Code.DAMAGED, f"nothing to resume from: no run under ./{RUNS}; name its folder")
    return events[-1].parent


def _tell_changes(console: Console, run: RunDir, spec: Spec) -> None:
    """A spec that is not the one of before is shown as a difference."""
    try:
        before = read(run.spec)
    except Unreadable:
        return
    for change in changes(before, spec_to_json(spec)):
        console.print(f"changed: {change}")


def _what_is_there(
    run: RunDir, spec: Spec, info: Mapping[str, Any], console: Console
) -> tuple[list[Candidate], list[Rejected]]:
    """End what an earlier driver left behind, then look into all tiers."""
    memory = memory_dir(run)
    if memory.path.is_dir():
        for beat in read_heartbeats(memory):
            end_group(beat)
        try:
            with FileLock(memory.drainer_lock, timeout_s=0):
                pass
        except Locked:
            console.print("waiting for the drainer of the run before to finish its checkpoint")
            with FileLock(memory.drainer_lock, timeout_s=DRAINER_TIMEOUT_S):
                pass
        except FileNotFoundError:
            pass  # it has just given the memory back
        memory.settle()
    run_id = str(info["run_id"])
    found = find(memory if owner_of(memory) == run_id else None, slow_tiers(spec, run, run_id))
    for words in found.unreachable:
        console.print(f"warning: {words}")
    return found.candidates, found.rejected


def _finished_at(run: RunDir) -> int | None:
    steps = [line.get("steps") for line in read_lines(run.events) if line.get("event") == "finished"]
    return steps[-1] if steps else None


def _choose(
    found: list[Candidate], rejected: list[Rejected], start: str, run: RunDir, finished: int | None
) -> list[Candidate] | None:
    """The candidates that `--from` allows, newest first; None: the run is finished and kept nothing."""
    if start == "latest":
        chosen = found
        if not found and not rejected and finished is not None:
            return None
    elif start.isascii() and start.isdigit():
        chosen = [candidate for candidate in found if candidate.version.step == int(start)]
    else:
        path = Path(start).resolve()
        chosen = [c for c in found if c.folder in (start, str(path)) or Path(c.folder).resolve() == path]
        if not chosen and path.is_dir():
            good, bad = disk_tier(path.parent, None).scan()
            chosen = [candidate_of(checkpoint) for checkpoint in good if checkpoint.folder == path.name]
            rejected = [r for r in bad if Path(r.where).name == path.name] or rejected
    if not chosen:
        raise Refused(Code.DAMAGED, _nothing(found, rejected, start, run))
    return chosen


def _nothing(found: list[Candidate], rejected: list[Rejected], start: str, run: RunDir) -> str:
    wanted = "" if start == "latest" else f" {start}"
    lines = [f"nothing to resume from{wanted} in {run.root}; resume never starts from scratch: that is dtrain run SPEC"]
    lines += [f"  there is: step {c.version.step} ({c.tier})" for c in found]
    lines += [f"  not usable: step {r.version.step}: {r.reason}" for r in rejected]
    return "\n".join(lines)


def _start(chosen: list[Candidate], rejected: list[Rejected]) -> Start:
    first = chosen[0]
    passed = [
        {"tier": r.tier, "step": r.version.step, "attempt": r.version.attempt, "reason": r.reason}
        for r in rejected
        if r.version > first.version
    ]
    words = f"resuming step {first.version.step} from {first.tier}"
    return Start(chosen, passed, words)
