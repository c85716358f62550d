"""`dtrain prune`: delete checkpoints by the spec's rule or a given one, never the last good one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...specs.codes import Code
from ...tiers.fence import Fenced, Taken
from ...tiers.format.layout import Version, unfinished
from ...tiers.lock import FileLock, Locked
from ...tiers.memory.slots import memory_dir
from ...tiers.retention import Rule
from ...tiers.tier import Pruned, Rejected, Tier
from ..terminal.refusal import Refused, guarded
from ..train import locked
from ..view.format import human_bytes, plural
from .output import document, progress, say, talk
from .stored import NotThere, Owner, owner, slow_tiers


@dataclass(frozen=True)
class Wanted:
    """What the command line says of the rule; None: as the spec says. `keep_every` 0: none for that reason."""

    keep: int | None
    keep_every: int | None
    tier: str | None
    dry_run: bool


@dataclass(frozen=True)
class Done:
    """What happened in one tier, or would."""

    tier: Tier
    rule: Rule
    pruned: Pruned
    damaged: list[Rejected]
    leftovers: list[str]
    staying: list[str]
    """Unfinished ones that could not be removed: somebody has put something into them."""
    nbytes: dict[Version, int]

    @property
    def freed(self) -> int:
        """Bytes of the checkpoints that go."""
        return sum(self.nbytes.get(version, 0) for version in self.pruned.removed)

    def to_json(self) -> dict[str, Any]:
        """Form for the document."""
        return {
            "tier": self.tier.name,
            "where": self.tier.store.where,
            "keep": self.rule.keep,
            "keep_every": self.rule.keep_every,
            "removed": [self._version(version) for version in self.pruned.removed],
            "kept": [self._version(version) for version in self.pruned.kept],
            "damaged": [
                {"step": bad.version.step, "attempt": bad.version.attempt, "path": bad.where, "reason": bad.reason}
                for bad in self.damaged
            ],
            "leftovers": self.leftovers,
            "leftovers_kept": self.staying,
            "freed_bytes": self.freed,
        }

    def _version(self, version: Version) -> dict[str, Any]:
        about = {"step": version.step, "attempt": version.attempt, "bytes": self.nbytes.get(version)}
        return {**about, "not_ours": self.pruned.strangers.get(version, [])}


def prune(run_dir: str, wanted: Wanted, as_json: bool) -> int:
    """Delete what the rule does not keep. Returns the exit code, 65 when nothing good is left to keep."""
    return guarded(lambda: _prune(run_dir, wanted, as_json), as_json)


def _prune(run_dir: str, wanted: Wanted, as_json: bool) -> Code:
    who = owner(run_dir)
    tiers, unreachable = slow_tiers(who)
    rules: dict[str, Rule] = {tier.type: _rule(tier.keep, tier.keep_every, wanted) for tier in who.spec.slow_tiers}
    if wanted.tier is not None and wanted.tier not in rules:
        raise NotThere(f"{run_dir}: no {wanted.tier} tier to prune; there is {', '.join(rules) or 'none'}")
    if wanted.tier is not None:
        tiers = [tier for tier in tiers if tier.name == wanted.tier]
        unreachable = [words for words in unreachable if words.startswith(f"the {wanted.tier} tier ")]
    done = []
    with _alone(who, wanted.dry_run):
        for tier in tiers:
            try:
                done.append(_one(tier, rules[tier.name], wanted.dry_run))
            except OSError as error:
                unreachable.append(f"the {tier.name} tier {tier.store.where}: {error.strerror or error}")
            except (Fenced, Taken) as error:
                unreachable.append(f"the {tier.name} tier: {error}")
    return _tell(who, done, unreachable, wanted.dry_run, as_json)


def _rule(keep: int, keep_every: int | None, wanted: Wanted) -> Rule:
    every = keep_every if wanted.keep_every is None else wanted.keep_every or None
    return Rule(keep if wanted.keep is None else wanted.keep, every)


@contextmanager
def _alone(who: Owner, dry_run: bool) -> Iterator[None]:
    """Nobody trains, and nobody still carries a dead run's snapshots on; a dry run may look on meanwhile."""
    if dry_run:
        yield
        return
    if who.run_id is None:
        raise Refused(
            Code.DAMAGED, f"{who.run.run} is missing, so whose checkpoints these are is not known; "
            "dtrain resume makes it again from the newest one"
        )  # fmt: skip
    with locked(who.run):
        lock = memory_dir(who.run).drainer_lock
        if lock.exists():
            try:
                with FileLock(lock):
                    pass
            except Locked as error:
                raise Refused(
                    Code.MISSING_RESOURCE, f"the run's drainer still carries a checkpoint on ({error}); try again later"
                ) from error
            except FileNotFoundError:
                pass  # it has just given the memory back
        yield


@contextmanager
def _claimed(tier: Tier) -> Iterator[Tier]:
    """The tier, with everybody shut out who wrote into it before."""
    claimed = tier.fenced()
    try:
        yield claimed
    finally:
        with contextlib.suppress(OSError):
            if claimed.fence is not None:
                claimed.fence.release()


def _one(tier: Tier, rule: Rule, dry_run: bool) -> Done:
    leftovers = [folder for folder in tier.store.folders() if unfinished(folder) is not None]
    staying: list[str] = []
    good, rejected = tier.scan()
    nbytes = {checkpoint.version: checkpoint.manifest.nbytes for checkpoint in good}
    writes = not dry_run and (good or leftovers)  # a claim makes the folder, and an empty place needs none
    with _claimed(tier) if writes else contextlib.nullcontext(tier) as held:
        if not dry_run:
            found, leftovers = leftovers, held.remove_leftovers()
            staying = [name for name in found if name not in leftovers]
        with progress(f"reading the newest in {tier.name}", max(nbytes.values(), default=0)) as told:
            pruned = held.prune(rule, dry_run=dry_run, told=told)
    halves = {unfinished(folder) for folder in (*leftovers, *staying)}
    rejected = [bad for bad in rejected if bad.version.dirname not in halves]
    return Done(tier, rule, pruned, [*rejected, *pruned.damaged], leftovers, staying, nbytes)


def _tell(who: Owner, done: list[Done], unreachable: list[str], dry_run: bool, as_json: bool) -> Code:
    freed = sum(one.freed for one in done)
    for words in unreachable:
        talk(f"warning: {words}")
    if as_json:
        document({
            "run_dir": str(who.run.root), "dry_run": dry_run, "tiers": [one.to_json() for one in done],
            "freed_bytes": freed, "unreachable": unreachable,
        })  # fmt: skip
    else:
        for one in done:
            _print(one, dry_run)
        say(f"{human_bytes(freed)} {'would be freed' if dry_run else 'freed'}")
    if any(one.damaged and not one.pruned.kept for one in done):
        talk("nothing good is left in a tier; nothing was deleted there")
        return Code.DAMAGED
    return Code.MISSING_RESOURCE if unreachable else Code.DONE


def _print(one: Done, dry_run: bool) -> None:
    every = f" and every {one.rule.keep_every} steps" if one.rule.keep_every is not None else ""
    say(f"{one.tier.name} {one.tier.store.where}: keeps {plural(one.rule.keep, 'checkpoint')}{every}")
    for version in reversed(one.pruned.removed):
        words = f"  {'would go' if dry_run else 'gone':12} {version}, {human_bytes(one.nbytes.get(version))}"
        others = one.pruned.strangers.get(version)
        say(f"{words}; its folder stays for what is not dtrain's: {', '.join(others)}" if others else words)
    for version in reversed(one.pruned.kept):
        say(f"  {'stays':12} {version}, {human_bytes(one.nbytes.get(version))}")
    for bad in one.damaged:
        say(f"  {'left alone':12} {bad.version}, DAMAGED: {bad.reason}")
    for name in one.leftovers:
        say(f"  {'would go' if dry_run else 'gone':12} {name}, unfinished")
    for name in one.staying:
        say(f"  {'stays':12} {name}, unfinished, but with something in it that is not dtrain's")
