"""Whose checkpoints lie in the tiers, and how far a run's attempts have gone, whatever is left of the run's folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..format.jsonfile import newest_lines
from ..format.layout import RunDir, Version, parse_version, unfinished
from ..memory.slots import MemoryDir, owner_of
from ..tier import Tier
from .glance import glance

LEAP = 1000
"""Attempt numbers left free when a tier that may hold higher ones cannot be asked."""


@dataclass(frozen=True)
class Holding:
    """The newest checkpoint of one run in one place."""

    run_id: str
    version: Version
    where: str


def holdings(tiers: Iterable[Tier], *, strict: bool = False) -> tuple[list[Holding], list[str]]:
    """The newest checkpoint of every run in every tier, and the tiers that could not be asked with the reason.

    If `strict`, one that cannot be asked raises its OSError.
    """
    found: list[Holding] = []
    unreachable: list[str] = []
    for tier in tiers:
        try:
            good, _ = glance(Tier(tier.place, tier.store, None))
        except OSError as error:
            if strict:
                raise
            unreachable.append(f"the {tier.name} tier {tier.store.where} cannot be read: {error.strerror or error}")
            continue
        newest: dict[str, Version] = {}
        for one in good:  # newest first
            newest.setdefault(one.run_id, one.version)
        found += [
            Holding(run_id, version, f"the {tier.name} tier {tier.store.where}") for run_id, version in newest.items()
        ]
    return found, unreachable


def remembered(memory: MemoryDir) -> Holding | None:
    """Whose snapshots lie in a node's memory; None without a whole one."""
    run_id, newest = owner_of(memory), max(memory.whole(), default=None)
    return (
        Holding(run_id, newest, f"the memory tier {memory.path}") if run_id is not None and newest is not None else None
    )


def highest_attempt(run: RunDir, memory: MemoryDir, tiers: Iterable[Tier]) -> int:
    """The highest attempt number that a run has ever used, as far as anything tells; 0 for none.

    Logs, events, snapshots and every folder of the tiers are asked, finished or not: a number that is used again
    makes new checkpoints sort below old ones, or share their names. When a tier cannot be asked and the run's own
    files have lost the count, `LEAP` is added.
    """
    own = max([run.last_attempt(), *(_number(line.get("attempt")) for line in newest_lines(run.events))])
    highest = max([own, *(record.attempt for slot in memory.every_slot() if (record := slot.record()) is not None)])
    unknown = False
    for tier in tiers:
        try:
            names = tier.store.folders()
        except OSError:
            unknown = True
            continue
        highest = max([highest, *(version.attempt for version in map(_version_of, names) if version is not None)])
    return highest + LEAP if unknown and own < max(highest, 1) else highest


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _version_of(folder: str) -> Version | None:
    return parse_version(unfinished(folder) or folder)
