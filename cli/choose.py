"""Which checkpoint `resume --from` means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..specs.codes import Code
from ..specs.models import Spec
from ..tiers.format.layout import RunDir, parse_version
from ..tiers.reading.places import place_of
from ..tiers.reading.recovery import Candidate, candidate_of
from ..tiers.stores.store import Place
from ..tiers.tier import Rejected, Tier, disk_tier, open_tier
from .terminal.refusal import Refused

LATEST = "latest"


def named_place(start: str, spec: Spec, run: RunDir) -> Tier | None:
    """The place of a checkpoint that `--from` names by path or URL; None for `latest`, a step, or what is not there.

    Raises Refused for a URL that is not a checkpoint's, StoreError when its store cannot be opened.
    """
    if start == LATEST or _is_step(start):
        return None
    if "://" not in start:
        path = Path(start).resolve()
        return disk_tier(path.parent, None) if path.is_dir() and parse_version(path.name) is not None else None
    url, _, folder = start.rstrip("/").rpartition("/")
    if parse_version(folder) is None:
        raise Refused(
            Code.USAGE, f"--from {start}: the URL of a checkpoint ends with its folder, like step-0000000120.a0001"
        )
    own = next((place_of(tier, run) for tier in spec.slow_tiers if tier.type == "object"), None)
    return open_tier(Place("object", url, own.options if own is not None else {}), None, run.spool)


def choose(
    found: Sequence[Candidate],
    rejected: list[Rejected],
    start: str,
    place: Tier | None,
    run: RunDir,
    unreachable: Sequence[str] = (),
) -> tuple[list[Candidate], list[Rejected]]:
    """The candidates that `--from` allows, newest first, and what was passed over. `place` is its `named_place`.

    Raises Refused when there is none, OSError when the place cannot be read. What an `unreachable` tier holds is not
    known: trying again may help then, and the code says so.
    """
    if start == LATEST:
        chosen = list(found)
    elif _is_step(start):
        chosen = [candidate for candidate in found if candidate.version.step == int(start)]
    else:
        chosen, rejected = _named(found, rejected, start, place)
    if not chosen:
        code = Code.MISSING_RESOURCE if unreachable else Code.DAMAGED
        raise Refused(code, _nothing(found, rejected, unreachable, start, run))
    return chosen, rejected


def _is_step(start: str) -> bool:
    return start.isascii() and start.isdigit()


def _named(
    found: Sequence[Candidate], rejected: list[Rejected], start: str, place: Tier | None
) -> tuple[list[Candidate], list[Rejected]]:
    name = start.rstrip("/") if "://" in start else str(Path(start).resolve())
    chosen = [candidate for candidate in found if _resolved(candidate.folder) == name]
    if chosen or place is None:
        return chosen, rejected
    folder = name.rpartition("/")[2]
    good, bad = place.scan()
    chosen = [candidate_of(checkpoint) for checkpoint in good if checkpoint.folder == folder]
    return chosen, [one for one in bad if one.version.dirname == folder] or rejected


def _resolved(folder: str) -> str:
    return folder if "://" in folder else str(Path(folder).resolve())


def _nothing(
    found: Sequence[Candidate], rejected: Sequence[Rejected], unreachable: Sequence[str], start: str, run: RunDir
) -> str:
    wanted = "" if start == LATEST else f" {start}"
    lines = [f"nothing to resume from{wanted} in {run.root}; resume never starts from scratch: that is dtrain run SPEC"]
    lines += [f"  there is: step {c.version.step} ({c.tier})" for c in found]
    lines += [f"  not usable: step {r.version.step}: {r.reason}" for r in rejected]
    lines += [f"  not known: {words}" for words in unreachable]
    return "\n".join(lines)
