"""`dtrain resume`: continue a run from a checkpoint, never from scratch."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..specs.codes import Code
from ..specs.difference import Change, changes, is_meant, other_training
from ..specs.errors import SpecError
from ..specs.load import load_spec, spec_from_json, spec_to_json
from ..specs.models import Spec
from ..tiers.format.jsonfile import Unreadable, finished_at, read
from ..tiers.format.layout import RunDir
from ..tiers.lock import FileLock, Locked
from ..tiers.memory.heartbeat import end_workers
from ..tiers.memory.slots import memory_dir, owner_of
from ..tiers.peers.seal import Seal
from ..tiers.reading.places import former_tiers, place_of, slow_tiers
from ..tiers.reading.recovery import Candidate, Found, find, open_candidate
from ..tiers.reading.whole import facts_of, read_whole
from ..tiers.tier import Rejected, Tier
from .choose import LATEST, choose, named_place
from .folder import check_folder, make_folder
from .identity import stored_identity
from .node import join, place_of_this
from .run import check_supported
from .scheduler import Surroundings, surroundings, tell_place
from .terminal.refusal import Refused, guarded
from .token import given_seal
from .train import Start, absolute, conclude, locked, ranks_of, talk, train

RUNS = Path("runs")
DRAINER_TIMEOUT_S = 120.0
IN_ITS_PLACE = "a run goes on where it is, so that must be usable for you"


@dataclass(frozen=True)
class Wanted:
    """What a person wants of a resume."""

    start: str
    """Which checkpoint to go on from."""
    as_json: bool
    node_rank: int | None
    meant: tuple[str, ...] = ()
    """Keys that may be others than before."""


def resume(
    arguments: list[str],
    start: str,
    as_json: bool,
    node_rank: int | None = None,
    allowed: Sequence[str] = (),
    token_file: str | None = None,
) -> int:
    """Find the run and the checkpoint, then train on; `allowed` keys may have changed. Returns the exit code."""
    return guarded(lambda: _resume(arguments, start, as_json, node_rank, allowed, token_file), as_json)


def _resume(
    arguments: list[str],
    start: str,
    as_json: bool,
    node_rank: int | None,
    allowed: Sequence[str],
    token_file: str | None,
) -> int:
    seal = given_seal(token_file)
    around = surroundings()
    run, spec, spec_folder = _find_run(arguments, (around.rank if node_rank is None else node_rank) or 0, around)
    wanted = Wanted(start, as_json, node_rank, (*meant_by(arguments), *allowed))
    return go_on(run, spec, spec_folder, wanted, around, seal)


def meant_by(arguments: Sequence[str]) -> tuple[str, ...]:
    """The keys that are written on the command line."""
    return tuple(word.partition("=")[0].strip() for word in arguments if "=" in word)


def go_on(run: RunDir, spec: Spec, spec_folder: Path, wanted: Wanted, around: Surroundings, seal: Seal | None) -> int:
    """Continue a run by a spec that was read, with its data paths made absolute. Returns the exit code, raises Refused.

    A complete run is told to be so; one that is asked to have been trained otherwise is refused.
    """
    start, as_json, meant = wanted.start, wanted.as_json, wanted.meant
    console = talk(as_json)
    check_supported(spec)
    check_folder(run, IN_ITS_PLACE)
    node = place_of_this(spec, wanted.node_rank, around)
    tell_place(spec, node, around, console)
    if node > 0:
        return join(spec.model_copy(update={"output_dir": str(run.root)}), spec_folder, node, as_json, seal)
    before = _spec_before(run)
    different = _refuse_other_training(before, spec, meant)
    former, warnings = former_tiers(before, spec, run, None)
    place = named_place(start, spec, run)
    info = stored_identity(run, spec, spec_folder, [place] if place else [*slow_tiers(spec, run, None), *former])
    make_folder(run, IN_ITS_PLACE)
    with locked(run):
        for change in different:  # a spec that is not the one of before is shown as a difference
            console.print(f"changed: {change}")
        for words in [*warnings, *_left_behind(before, former, run)]:
            console.print(f"warning: {words}", soft_wrap=True)
        there = _what_is_there(run, spec, str(info["run_id"]), former, console)
        found, rejected = there.candidates, there.rejected
        finished = finished_at(run.events)
        if start == LATEST and not found and not rejected and (finished or 0) >= spec.max_steps:
            _refuse_another_past(before, spec, finished)
            return _complete(finished, run, console, as_json)
        if start == LATEST and spec.peer_tier is not None and not found:
            words = "resuming from what the other nodes have in memory: nothing is left on this one"
            begin = Start([], _passed(rejected), words, former, goes_on=True)
            return train(run, spec, info, begin, console, as_json, seal)
        chosen, rejected = choose(found, rejected, start, place, run, there.unreachable)
        if before is None:  # the folder is lost: the checkpoint tells what the run was
            for change in _refuse_other_training(_spec_of(chosen, run), spec, meant):
                console.print(f"changed: {change}")
        several = spec.cluster.nodes > 1  # no node alone can read the state, so the workers bring such a run to its end
        if start == LATEST and chosen[0].version.step == spec.max_steps and not several:
            _refuse_another_past(before or _spec_of(chosen, run), spec, spec.max_steps)
            if chosen[0].tier != "memory" and finished == spec.max_steps:
                return _complete(finished, run, console, as_json)
            digest, chosen, damaged = _last_state(run, chosen, spec.max_steps)
            if digest is not None:
                return conclude(run, spec, info, chosen[0], digest, console, as_json)
            rejected = [*rejected, *damaged]
        if chosen[0].version.step >= spec.max_steps + several:
            raise Refused(
                Code.BAD_SPEC,
                f"max_steps is {spec.max_steps}, but the checkpoint is of step {chosen[0].version.step}; "
                "give a larger max_steps or an earlier checkpoint (--from STEP)",
            )
        begin = _start(chosen, rejected, former, goes_on=start == LATEST and several)
        return train(run, spec, info, begin, console, as_json, seal)


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


def _find_run(arguments: list[str], node: int, around: Surroundings) -> tuple[RunDir, Spec, Path]:
    """From the command's words: the run's folder and the spec to go on with, which may be this node's own copy."""
    overrides = [word for word in arguments if "=" in word and not _is_there(word)]
    targets = [word for word in arguments if word not in overrides]
    if len(targets) > 1:
        raise Refused(Code.USAGE, f"one run at a time, not {' and '.join(targets)}; changes are written key=value")
    target = Path(targets[0]) if targets else _last_active()
    if target.is_dir():
        run = RunDir(target.absolute())
        if node and RunDir(run.root, node).spec.is_file() and not run.spec.is_file():
            run = RunDir(run.root, node)
        if not run.spec.is_file():
            raise Refused(
                Code.DAMAGED,
                f"{target} is not the folder of a run: it has no {run.spec.name}; a run begins with dtrain run SPEC, "
                "and one whose folder was lost goes on with dtrain resume SPEC",
            )
        _refuse_other_place(run, overrides)
        return run, absolute(load_spec(run.spec, overrides)), target
    spec = absolute(load_spec(target, overrides, around.fallbacks))
    run = RunDir(Path(spec.output_dir).absolute())
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


def _spec_before(run: RunDir) -> Spec | None:
    """The spec that the run had until now; None when that cannot be told."""
    with contextlib.suppress(Unreadable, SpecError):
        return spec_from_json(read(run.spec), str(run.spec))
    return None


def _spec_of(chosen: Sequence[Candidate], run: RunDir) -> Spec | None:
    """The spec that the first readable checkpoint was made by; None when none says it."""
    for candidate in chosen:
        with contextlib.suppress(Unreadable, SpecError, KeyError):
            return spec_from_json(open_candidate(candidate, run.spool).meta["spec"])
    return None


def _refuse_other_training(before: Spec | None, now: Spec, meant: Sequence[str]) -> list[Change]:
    """What has changed in the spec; raises Refused where its file asks for another training than the run began.

    What is written on the command line is `meant`, and is told only.
    """
    if before is None:
        return []
    other = [change for change in other_training(before, now) if not is_meant(change, meant)]
    if other:
        options = " ".join(f"--allow-changed {change.key}" for change in other)
        listed = "\n".join(f"  {change}" for change in other)
        raise Refused(
            Code.BAD_SPEC,
            f"the spec is not the one that this run was trained by so far:\n{listed}\n"
            f"put it back, or say that it is meant: {options}",
        )
    return changes(spec_to_json(before), spec_to_json(now))


def _refuse_another_past(before: Spec | None, now: Spec, step: int | None) -> None:
    """Raise Refused where all steps are done and it is meant that they be others: a yes would say that they are.

    Another end is no other step: who gives a smaller max_steps wants this one to be the last.
    """
    other = [one for one in other_training(before, now) if one.key != "max_steps"] if before is not None else []
    if other:
        listed = "\n".join(f"  {change}" for change in other)
        raise Refused(
            Code.BAD_SPEC,
            f"the run is complete at step {step}, so this would change nothing that it trained:\n{listed}\n"
            "leave it out, or train on with a larger max_steps, or begin another run (output_dir=…)",
        )


def _left_behind(before: Spec | None, former: Sequence[Tier], run: RunDir) -> Iterator[str]:
    """What a change of tiers means for those that the spec had until now."""
    until_now = [place_of(tier, run) for tier in before.slow_tiers] if before is not None else []
    for tier in former:
        if tier.place in until_now:
            yield (
                f"the {tier.name} tier {tier.store.where} is no longer in the spec: what it holds can be resumed from, "
                "but nothing goes there any more and nothing is pruned there"
            )


def _what_is_there(run: RunDir, spec: Spec, run_id: str, former: Sequence[Tier], console: Console) -> Found:
    """End what an earlier driver left behind, then look into all tiers."""
    memory = memory_dir(run, ranks_of(spec, 0))
    if memory.path.is_dir():
        end_workers(memory)
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
    mine = [Tier(tier.place, tier.store, run_id) for tier in former]
    found = find(memory if owner_of(memory) == run_id else None, [*slow_tiers(spec, run, run_id), *mine])
    for words in found.unreachable:
        console.print(f"warning: {words}", soft_wrap=True)
    return found


def _passed(rejected: list[Rejected]) -> list[dict[str, Any]]:
    return [
        {"tier": r.tier, "step": r.version.step, "attempt": r.version.attempt, "reason": r.reason} for r in rejected
    ]


def _start(chosen: list[Candidate], rejected: list[Rejected], former: Sequence[Tier], *, goes_on: bool) -> Start:
    first = chosen[0]
    passed = _passed([r for r in rejected if r.version > first.version])
    words = f"resuming step {first.version.step} from {first.tier}"
    return Start(chosen, passed, words, former, goes_on)
