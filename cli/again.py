"""`dtrain run --or-resume`: the one command that a scheduler can give again and again."""

from __future__ import annotations

from pathlib import Path

from ..specs.codes import Code
from ..specs.load import load_spec
from ..specs.models import Spec
from ..tiers.format.jsonfile import newest_lines
from ..tiers.format.layout import RunDir
from ..tiers.memory.slots import memory_dir
from ..tiers.reading.lineage import holdings, remembered
from ..tiers.reading.places import slow_tiers
from .choose import LATEST
from .folder import check_folder
from .resume import Wanted, go_on, meant_by
from .run import begin
from .scheduler import surroundings
from .terminal.refusal import Refused, guarded
from .token import given_seal
from .train import absolute, ranks_of


def run_or_resume(
    spec_path: str, overrides: list[str], as_json: bool, node_rank: int | None, token_file: str | None
) -> int:
    """Go on from the newest checkpoint if there is one, begin if there never was one. Returns the exit code."""
    return guarded(lambda: _run_or_resume(spec_path, overrides, as_json, node_rank, token_file), as_json)


def _run_or_resume(
    spec_path: str, overrides: list[str], as_json: bool, node_rank: int | None, token_file: str | None
) -> int:
    seal = given_seal(token_file)
    around = surroundings()
    spec = absolute(load_spec(spec_path, overrides, around.fallbacks))  # once: it may come from a pipe
    run = RunDir(Path(spec.output_dir).absolute())
    check_folder(run)
    folder = Path(spec_path).parent
    if has_begun(run, spec):
        wanted = Wanted(LATEST, as_json, node_rank, meant_by(overrides))
        return go_on(run, spec, folder, wanted, around, seal)
    return begin(spec, folder, as_json, node_rank, around, seal, again=True)


def has_begun(run_dir: RunDir, spec: Spec) -> bool:
    """Tell whether there is anything to go on from, or was: what is lost is never begun anew without being told to.

    Raises Refused when a tier cannot be asked.
    """
    if any(line.get("event") in ("committed", "finished") for line in newest_lines(run_dir.events)):
        return True
    if next(newest_lines(run_dir.events), None) is not None and any(
        tier.type not in ("memory", "disk", "object") for tier in spec.used_tiers
    ):
        return True  # another node's memory may hold what this one cannot see
    if remembered(memory_dir(run_dir, ranks_of(spec, 0))) is not None:
        return True
    try:
        return bool(holdings(slow_tiers(spec, run_dir, None), strict=True)[0])
    except OSError as error:
        raise Refused(Code.MISSING_RESOURCE, f"a tier cannot be asked whether the run has begun: {error}") from error
