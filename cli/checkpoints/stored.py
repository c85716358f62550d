"""What a run has stored: finding it in all tiers, and the checkpoint that a command's words mean. Needs no torch."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...specs.codes import Code
from ...specs.errors import SpecError
from ...specs.load import load_spec, spec_from_json, spec_to_json
from ...specs.models import Spec
from ...tiers.format.jsonfile import Unreadable, read
from ...tiers.format.layout import RunDir, Version, parse_version, staging_name, trash_name
from ...tiers.memory.slots import MemoryDir, memory_dir, owner_of
from ...tiers.reading.glance import glance
from ...tiers.reading.places import place_of
from ...tiers.reading.recovery import (
    MEMORY,
    PEER,
    Candidate,
    Opened,
    candidate_of,
    in_memory,
    is_complete,
    open_candidate,
    open_checkpoint,
    parts_in_memory,
)
from ...tiers.stores.store import Place
from ...tiers.tier import Rejected, Tier, disk_tier, open_tier
from ..terminal.refusal import Refused
from .output import talk

Result = TypeVar("Result")
SPOOL = "spool-read"
"""Folder in a run for copies of remote files; the run's own spool is cleared whenever it starts."""
IN_PART = "in part"
_NAMED = 12
"""Most steps that a message lists."""
_DAMAGE = (errno.ENOENT, errno.EIO, errno.EBADMSG, errno.EUCLEAN)
"""What a system says of files that are gone or broken."""


class NotThere(Refused):
    """The command's words do not name a run or a checkpoint of it."""

    def __init__(self, message: str) -> None:
        """It is a mistake in the command line."""
        super().__init__(Code.USAGE, message)


@dataclass(frozen=True)
class Held:
    """One checkpoint in one tier; `place` is None for the memory."""

    candidate: Candidate
    nbytes: int
    place: Tier | None = None

    @property
    def version(self) -> Version:
        """The version of the state."""
        return self.candidate.version

    @property
    def tier(self) -> str:
        """Type of the tier."""
        return self.candidate.tier

    def __str__(self) -> str:
        return f"{self.version} in {self.tier}"

    def open(self) -> Opened:
        """Its description; raises Unreadable."""
        if self.place is None:
            return open_candidate(self.candidate)
        return open_checkpoint(self.candidate, self.place.read(self.version))

    def is_gone(self) -> bool:
        """Tell whether it has left its tier, as the old ones of a live run do; what fails then is no damage."""
        if self.place is None:
            memory = MemoryDir(Path(self.candidate.place.url))
            return self.version not in (memory.whole() if self.tier == MEMORY else parts_in_memory(memory))
        try:
            return self.version.dirname not in self.place.store.folders()
        except OSError:
            return False


@dataclass(frozen=True)
class Stored:
    """What is there, newest first and the faster tier first."""

    root: Path
    held: list[Held]
    rejected: list[Rejected]
    """Folders named like a checkpoint that are not usable."""
    unfinished: list[Rejected] = field(default_factory=list)
    """Those that are being written or deleted, or that a crash has left so."""
    partial: list[Rejected] = field(default_factory=list)
    """Versions of which this node's memory has some shards; the others are in that of other nodes."""
    unreachable: list[str] = field(default_factory=list)
    """Tiers that could not be looked into, and why."""
    spec: dict[str, Any] | None = None
    """The run's spec of now."""
    run_id: str | None = None


@dataclass(frozen=True)
class Picked:
    """The checkpoints that a command's words mean; without a step all of them."""

    words: str
    stored: Stored
    chosen: list[Held]
    rejected: list[Rejected]
    step: int | None


@dataclass(frozen=True)
class Owner:
    """Who a run is."""

    run: RunDir
    spec: Spec
    run_id: str | None
    """None when run.json is not there."""


def owner(run_dir: str) -> Owner:
    """Read who the run in a folder, or of a spec, is; raises Refused with one line, SpecError for a wrong spec."""
    if not run_dir:
        raise NotThere("the path of the run is empty; is a variable of the shell not set?")
    if Path(run_dir).suffix in (".yaml", ".yml") and Path(run_dir).is_file():
        spec = load_spec(Path(run_dir), [])
        run = RunDir(Path(spec.output_dir).absolute())
        return Owner(run, spec, _run_id(run))  # the folder may be lost: the tiers are not
    run = RunDir(Path(run_dir).absolute())
    if not run.root.is_dir():
        raise NotThere(f"{run_dir}: {'not a folder' if run.root.exists() else 'no such folder'}")
    if not run.spec.exists():
        raise NotThere(
            f"{run_dir} is not the folder of a run: it has no {run.spec.name}; if that was lost, name the spec instead"
        )
    try:
        spec = spec_from_json(read(run.spec), str(run.spec))
    except Unreadable as error:
        raise Refused(Code.BAD_SPEC, f"the run's own spec cannot be used: {error}") from error
    except SpecError as error:
        raise Refused(Code.BAD_SPEC, f"the run's own spec cannot be used: {_in_short(error)}") from error
    return Owner(run, spec, _run_id(run))


def _in_short(error: SpecError) -> str:
    first, more = error.problems[0], len(error.problems) - 1
    return f"{first.file}: {first.key or 'the file'}: {first.message}" + (f" (and {more} more)" if more else "")


def _run_id(run: RunDir) -> str | None:
    if not run.run.exists():
        return None
    try:
        run_id = read(run.run)["run_id"]
        if not isinstance(run_id, str):
            raise Unreadable(f"{run.run}: run_id is {run_id!r}, not text")
    except (Unreadable, KeyError) as error:
        reason = str(error) if isinstance(error, Unreadable) else f"{run.run}: it has no run_id"
        raise Refused(
            Code.DAMAGED, f"{reason}; put it right, or delete it (then all checkpoints in the tiers' folders count)"
        ) from error
    return run_id


def slow_tiers(who: Owner) -> tuple[list[Tier], list[str]]:
    """The tiers beside memory, fastest first, and those that could not be opened with the reason."""
    tiers, unreachable = [], []
    spool = who.run.root / SPOOL
    for described in who.spec.slow_tiers:
        place = place_of(described, who.run)
        try:
            tiers.append(open_tier(place, who.run_id, spool, who.run.root))
        except OSError as error:
            unreachable.append(f"the {place.type} tier {place.url} cannot be opened: {error.strerror or error}")
    return tiers, unreachable


def look(run_dir: str, only: str | None = None) -> Stored:
    """Find everything that a run has stored, in all tiers or in those of one type. Raises Refused."""
    who = owner(run_dir)
    tiers, unreachable = slow_tiers(who)
    types = [MEMORY, *([PEER] if who.spec.peer_tier is not None else []), *(tier.type for tier in who.spec.slow_tiers)]
    if only is not None and only not in types:
        raise NotThere(f"{run_dir}: the run has no {only} tier; it has {', '.join(types)}")
    found = _in_memory(who) if only in (None, MEMORY) else []
    rejected: list[Rejected] = []
    unfinished: list[Rejected] = []
    partial: list[Rejected] = []
    if who.spec.peer_tier is not None and only in (None, PEER):
        of_peers, partial = _between_nodes(who)
        found += of_peers
    for tier in tiers if only is None else [tier for tier in tiers if tier.name == only]:
        try:
            good, bad = glance(tier)
            folders = set(tier.store.folders()) if bad else set()
        except OSError as error:
            unreachable.append(f"the {tier.name} tier {tier.store.where} cannot be read: {error.strerror or error}")
            continue
        found += [Held(Candidate(one.version, tier.place), one.nbytes, tier) for one in good]
        for one in bad:
            notes = {staging_name(one.version.dirname), trash_name(one.version.dirname)}
            (unfinished if notes & folders else rejected).append(one)
    found.sort(key=lambda held: held.version, reverse=True)  # a stable sort: the faster tier stays first
    if only is not None:
        unreachable = [words for words in unreachable if words.startswith(f"the {only} tier ")]
    spec = spec_to_json(who.spec)
    return Stored(who.run.root, found, rejected, unfinished, partial, unreachable, spec, who.run_id)


def _in_memory(who: Owner) -> list[Held]:
    memory = memory_dir(who.run)
    if who.run_id is None or owner_of(memory) != who.run_id:
        return []
    whole = memory.whole()
    found = []
    for candidate in in_memory(memory):
        try:
            nbytes = sum(memory.file_of(record).stat().st_size for record in whole[candidate.version])
        except (KeyError, OSError):
            continue  # a live run has used the slot again meanwhile
        found.append(Held(candidate, nbytes))
    return found


def _between_nodes(who: Owner) -> tuple[list[Held], list[Rejected]]:
    """What this node's memory has of versions that several nodes have between them: all shards, or some."""
    memory = memory_dir(who.run)
    whole: list[Held] = []
    partial: list[Rejected] = []
    if who.run_id is None or owner_of(memory) != who.run_id:
        return whole, partial
    for version, parts in sorted(parts_in_memory(memory).items(), reverse=True):
        candidate = Candidate(version, Place(PEER, str(memory.path)))
        try:
            nbytes = sum(path.stat().st_size for path, _ in parts.values())
        except OSError:
            continue  # a live run has used a slot again meanwhile
        if is_complete(parts):
            whole.append(Held(candidate, nbytes))
        else:
            world = next(iter(parts.values()))[1].world
            words = f"{IN_PART}: this node has the shards of {_ranks(sorted(parts))} of {world}"
            partial.append(Rejected(PEER, candidate.folder, version, words))
    return whole, partial


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_NAMED])) + (", …" if len(numbers) > _NAMED else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def pick(target: str, only: str | None = None) -> Picked:
    """What `RUN_DIR`, `RUN_DIR@STEP`, `RUN_DIR@latest` or the folder of one checkpoint means. Raises Refused."""
    version = parse_version(Path(target).name)
    if version is not None and Path(target).is_dir():
        return _one_folder(target, version)
    run_dir, step = _split(target)
    stored = look(run_dir, only)
    if step is None:
        return Picked(target, stored, stored.held, stored.rejected, None)
    chosen = [held for held in stored.held if held.version.step == step]
    return Picked(target, stored, chosen, [bad for bad in stored.rejected if bad.version.step == step], step)


def _split(target: str) -> tuple[str, int | None]:
    if "@" not in target or Path(target).is_dir():
        return target, None
    run_dir, _, word = target.rpartition("@")
    if word == "latest":
        return run_dir, None
    if not (word.isascii() and word.isdigit() and len(word) < 20):
        raise NotThere(f"{target}: after @ comes a step number or latest, not {word!r}")
    return run_dir, int(word)


def _one_folder(target: str, version: Version) -> Picked:
    """A checkpoint without its run: whatever folder it has been copied to."""
    folder = Path(target).absolute()
    tier = disk_tier(folder.parent, None)
    held, rejected = [], []
    try:
        checkpoint = tier.read(version)
        checkpoint.check_sizes()
        held.append(Held(candidate_of(checkpoint), checkpoint.manifest.nbytes, tier))
    except Unreadable as error:
        rejected.append(Rejected(tier.name, str(folder), version, str(error)))
    try:
        spec = read(RunDir(folder.parent.parent).spec)
    except Unreadable:
        spec = None
    return Picked(target, Stored(folder, held, rejected, spec=spec), held, rejected, version.step)


def nothing(picked: Picked) -> Refused:
    """Why there is no checkpoint to work on."""
    stored, words = picked.stored, picked.words
    if picked.rejected:
        reasons = "; ".join(f"{bad.version} in {bad.tier}: {bad.reason}" for bad in picked.rejected[:3])
        return Refused(Code.DAMAGED, f"{words}: no usable checkpoint ({reasons})")
    if stored.unreachable:
        return Refused(Code.MISSING_RESOURCE, f"{words}: no such checkpoint found; {'; '.join(stored.unreachable)}")
    if picked.step is None:
        return Refused(Code.DAMAGED, f"{words}: no checkpoints")
    steps = list(dict.fromkeys(held.version.step for held in stored.held))
    listed = ", ".join(map(str, steps[:_NAMED])) + (f" and {len(steps) - _NAMED} more" if len(steps) > _NAMED else "")
    return NotThere(f"{words}: no such checkpoint; there is {f'step {listed}' if steps else 'none'}")


def is_unreachable(error: Unreadable) -> bool:
    """Tell whether the place or this machine failed (no answer, no permission, no room), as against the bytes."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in _DAMAGE


def first_readable(picked: Picked, work: Callable[[Held, Opened], Result]) -> tuple[Result, list[dict[str, Any]]]:
    """Do `work` with the newest checkpoint in the fastest tier where it can be read; also what was passed over.

    `work` raises Unreadable to have the next one tried. Raises Refused when none is left.
    """
    if not picked.chosen:
        raise nothing(picked)
    newest = picked.chosen[0].version
    passed = [_passed(bad.tier, bad.version, bad.reason) for bad in picked.rejected if bad.version > newest]
    code = Code.MISSING_RESOURCE
    for held in picked.chosen:
        try:
            return work(held, held.open()), passed
        except Unreadable as error:
            passed.append(_passed(held.tier, held.version, str(error)))
            if not is_unreachable(error) and not held.is_gone():
                code = Code.DAMAGED
    raise Refused(code, f"{picked.words}: no checkpoint can be read whole")


def _passed(tier: str, version: Version, reason: str) -> dict[str, Any]:
    talk(f"passed over: {version} in {tier}: {reason}")
    return {"tier": tier, "step": version.step, "attempt": version.attempt, "reason": reason}
