"""Ways to store every step that `dtrain bench` compares: names, and what a step stored that way survives."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

PLAIN = "plain"
"""No checkpoint at all; all others are compared with it."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to store a step."""

    name: str
    label: str
    survives: str
    default: bool = True
    tier: str | None = None
    """Tier that the spec must have for it."""


METHODS = {
    method.name: method
    for method in (
        Method("null", "nothing, again", "nothing", default=False),
        Method("dtrain", "dtrain memory", "a worker's death", tier="memory"),
        Method("dtrain-disk", "dtrain mem+disk", "a power cut", tier="disk"),
        Method("torch-save", "torch.save", "a worker's death; never fsynced"),
        Method("torch-save-fsync", "torch.save+fsync", "a power cut", default=False),
        Method("dcp", "DCP save", "a power cut; its folder is not fsynced"),
        Method("dcp-async-thread", "DCP async thread", "as DCP save, once written"),
        Method("dcp-async-process", "DCP async process", "as DCP save, once written"),
    )
}


class UnknownMethod(Exception):
    """A name that is none of ours, or one that the spec has no tier for; the message lists those that go."""


def choose(wanted: str | None, tiers: Collection[str]) -> tuple[str, ...]:
    """Names in a comma-separated text, in its order; None: all that this spec's tiers allow, but for the extra ones.

    Raises UnknownMethod.
    """
    if wanted is None:
        return tuple(m.name for m in METHODS.values() if m.default and (m.tier is None or m.tier in tiers))
    names = tuple(dict.fromkeys(name.strip() for name in wanted.split(",") if name.strip() not in ("", PLAIN)))
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        said = ", ".join(repr(name) for name in unknown) or "nothing"
        raise UnknownMethod(f"--methods names {said}; known are {', '.join(METHODS)} (plain is always measured)")
    for name in names:
        tier = METHODS[name].tier
        if tier is not None and tier not in tiers:
            raise UnknownMethod(f"--methods names {name}, but the spec has no {tier} tier; add one under tiers")
    return names
