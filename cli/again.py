"""`dtrain run --or-resume`: the one command that a scheduler can give again and again."""

from __future__ import annotations

from pathlib import Path

from ..specs.codes import Code
from ..specs.load import load_spec
from ..specs.models import Spec
from ..tiers.jsonfile import read_lines
from ..tiers.layout import RunDir
from ..tiers.lineage import holdings, remembered
from ..tiers.memory import memory_dir
from ..tiers.places import slow_tiers
from .choose import LATEST
from .refusal import Refused, guarded
from .resume import resume
from .run import run
from .scheduler import surroundings
from .train import ranks_of


def run_or_resume(
    spec_path: str, overrides: list[str], as_json: bool, node_rank: int | None, token_file: str | None
) -> int:
    """Go on from the newest checkpoint if there is one, begin if there never was one. Returns the exit code."""
    return guarded(lambda: _run_or_resume(spec_path, overrides, as_json, node_rank, token_file), as_json)


def _run_or_resume(
    spec_path: str, overrides: list[str], as_json: bool, node_rank: int | None, token_file: str | None
) -> int:
    spec = load_spec(spec_path, overrides, surroundings().fallbacks)
    if has_begun(RunDir(Path(spec.output_dir).absolute()), spec):
        return resume([spec_path, *overrides], LATEST, as_json, node_rank, token_file=token_file)
    return run(spec_path, overrides, as_json, node_rank, token_file, again=True)


def has_begun(run_dir: RunDir, spec: Spec) -> bool:
    """Tell whether there is anything to go on from, or was: what is lost is never begun anew without being told to.

    Raises Refused when a tier cannot be asked.
    """
    events = read_lines(run_dir.events)
    if any(line.get("event") in ("committed", "finished") for line in events):
        return True
    if events and any(tier.type not in ("memory", "disk", "object") for tier in spec.tiers):
        return True  # another node's memory may hold what this one cannot see
    if remembered(memory_dir(run_dir, ranks_of(spec, 0))) is not None:
        return True
    try:
        return bool(holdings(slow_tiers(spec, run_dir, None), strict=True)[0])
    except OSError as error:
        raise Refused(Code.MISSING_RESOURCE, f"a tier cannot be asked whether the run has begun: {error}") from error
