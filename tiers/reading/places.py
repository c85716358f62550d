"""Where the slower tiers of a spec lie."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from ...specs.models import Spec
from ...specs.places import DiskTier, ObjectTier
from ..format.jsonfile import Unreadable, dumps, read, replace
from ..format.layout import RunDir
from ..stores.store import Place, place_from_json
from ..tier import Tier, open_tier


def place_of(tier: DiskTier | ObjectTier, run: RunDir) -> Place:
    """The place of one tier; relative paths lie in the run."""
    if isinstance(tier, DiskTier):
        return Place("disk", str(run.disk(tier.path)), {"commit": tier.commit})
    options = {"endpoint": tier.endpoint, "region": tier.region}
    return Place("object", tier.url, {key: value for key, value in options.items() if value is not None})


def slow_tiers(spec: Spec, run: RunDir, run_id: str | None) -> list[Tier]:
    """The tiers beside memory, fastest first. Raises StoreError when one cannot be opened."""
    return [open_tier(place_of(tier, run), run_id, run.spool, run.root) for tier in spec.slow_tiers]


def former_tiers(before: Spec | None, spec: Spec, run: RunDir, run_id: str | None) -> tuple[list[Tier], list[str]]:
    """The tiers beside memory that a run had and has no more, and those that cannot be opened with the reason.

    `before` is its spec until now; what was gone before that is remembered by `keep_former`.
    """
    had = {_key(place): place for place in [*_former(run), *(_places(before, run) if before is not None else [])]}
    for place in _places(spec, run):
        had.pop(_key(place), None)
    tiers, unreachable = [], []
    for place in had.values():
        try:
            tiers.append(open_tier(place, run_id, run.spool))
        except OSError as error:
            unreachable.append(f"the {place.type} tier {place.url} cannot be opened: {error.strerror or error}")
    return tiers, unreachable


def keep_former(run: RunDir, tiers: Sequence[Tier]) -> None:
    """Remember where else a run has checkpoints: its newest may be there until new tiers have one. Raises OSError."""
    if tiers or run.former.exists():
        replace(run.former, dumps({"places": [tier.place.to_json() for tier in tiers]}))


def _former(run: RunDir) -> list[Place]:
    with contextlib.suppress(Unreadable, KeyError, TypeError, ValueError):
        return [place_from_json(place) for place in read(run.former)["places"]]
    return []


def _places(spec: Spec, run: RunDir) -> list[Place]:
    return [place_of(tier, run) for tier in spec.slow_tiers]


def _key(place: Place) -> tuple[str, str]:
    return place.type, place.url.rstrip("/")
