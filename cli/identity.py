"""Who a run is: what its `run.json` says, and when that is lost, what the tiers say."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..specs.codes import Code
from ..specs.models import Spec
from ..tiers.format.jsonfile import dumps, read, replace
from ..tiers.format.layout import RunDir
from ..tiers.memory.slots import memory_dir
from ..tiers.reading.lineage import Holding, holdings, remembered
from ..tiers.tier import Tier
from .terminal.refusal import Refused


def fresh_identity(run: RunDir, spec: Spec, spec_folder: Path) -> dict[str, Any]:
    """Of a run that begins: a new one, if an earlier try has left none. Raises Unreadable when that is damaged."""
    return read(run.run) if run.run.exists() else _described(uuid.uuid4().hex, spec, spec_folder)


def stored_identity(run: RunDir, spec: Spec, spec_folder: Path, tiers: Sequence[Tier]) -> dict[str, Any]:
    """Of a run that goes on: `run.json`, else the one run whose checkpoints are in `tiers` or in this node's memory.

    Raises Unreadable when run.json is damaged, Refused when nothing, or more than one thing, tells who it is.
    """
    if run.run.exists():
        return read(run.run)
    found, unreachable = holdings(tiers)
    if (snapshot := remembered(memory_dir(run))) is not None:
        found.append(snapshot)
    known = {holding.run_id for holding in found}
    if len(known) == 1:
        return _described(known.pop(), spec, spec_folder)
    if known:
        raise Refused(Code.BAD_SPEC, _several(run, found))
    raise _nothing(run, tiers, unreachable)


def keep_identity(run: RunDir, info: dict[str, Any]) -> None:
    """Write run.json, once it is clear that this run may have its places; it stays the same over all resumes."""
    if not run.run.exists():
        replace(run.run, dumps(info))


def _described(run_id: str, spec: Spec, spec_folder: Path) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "name": spec.name,
        "created": time.time(),
        "dtrain": __version__,
        "import_paths": [str(Path.cwd()), str(spec_folder.resolve())],
    }


def _several(run: RunDir, found: Sequence[Holding]) -> str:
    lines = [f"{run.run} is missing, and the tiers hold checkpoints of more than one run:"]
    lines += [f"  run id {one.run_id}: {one.version} in {one.where}" for one in found]
    lines.append("give only the tiers of the run that is meant, or go on from one of its checkpoints with --from PATH")
    return "\n".join(lines)


def _nothing(run: RunDir, tiers: Sequence[Tier], unreachable: Sequence[str]) -> Refused:
    missing = run.run if run.root.is_dir() else f"output_dir {run.root}"
    if unreachable:
        reasons = "\n".join(f"  {words}" for words in unreachable)
        return Refused(
            Code.MISSING_RESOURCE,
            f"nothing to resume from: {missing} is missing, and the tiers that could tell cannot be asked:\n{reasons}",
        )
    asked = ", ".join(f"the {tier.name} tier {tier.store.where}" for tier in tiers)
    none = f", and there is no checkpoint in {asked}" if asked else ""
    return Refused(
        Code.DAMAGED, f"nothing to resume from: {missing} does not exist{none}; a run begins with dtrain run SPEC"
    )
