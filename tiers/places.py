"""Where the slower tiers of a spec lie."""

from __future__ import annotations

from ..specs.models import DiskTier, ObjectTier, Spec
from .layout import RunDir
from .store import Place
from .tier import Tier, open_tier


def place_of(tier: DiskTier | ObjectTier, run: RunDir) -> Place:
    """The place of one tier; relative paths lie in the run."""
    if isinstance(tier, DiskTier):
        return Place("disk", str(run.disk(tier.path)), {"commit": tier.commit})
    options = {"endpoint": tier.endpoint, "region": tier.region}
    return Place("object", tier.url, {key: value for key, value in options.items() if value is not None})


def slow_tiers(spec: Spec, run: RunDir, run_id: str | None) -> list[Tier]:
    """The tiers beside memory, fastest first. Raises StoreError when one cannot be opened."""
    return [open_tier(place_of(tier, run), run_id, run.spool, run.root) for tier in spec.slow_tiers]
