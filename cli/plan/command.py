"""`dtrain plan`: what a run will do, before it does anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ...planners.elastic import elastic_plan
from ...planners.plan import Plan
from ...specs.codes import Code
from ...specs.load import load_spec
from ...specs.models import Spec
from ..machine import has_gpu, this_machine
from ..terminal.refusal import Refused, guarded


def plan(spec_path: str, overrides: Sequence[str], as_json: bool, profile: bool) -> int:
    """Print the plan of a spec, for people or as one JSON document. Returns the exit code."""
    return guarded(lambda: _plan(spec_path, overrides, as_json, profile), as_json)


def _plan(spec_path: str, overrides: Sequence[str], as_json: bool, profile: bool) -> int:
    spec = load_spec(spec_path, overrides)
    if not profile:
        return show(elastic_plan(spec, this_machine(spec)), as_json)
    return _profiled(spec, Path(spec_path).parent, as_json)


def show(answer: Plan, as_json: bool) -> int:
    """Print a plan on stdout."""
    if as_json:
        sys.stdout.write(json.dumps(answer.to_json(), indent=2, allow_nan=False) + "\n")
        return Code.DONE
    from rich.console import Console

    from .page import render

    sys.stdout.write(render(answer, Console(highlight=False, markup=False, emoji=False)))
    return Code.DONE


def _profiled(spec: Spec, spec_folder: Path, as_json: bool) -> int:
    """Count and time the model here first; this runs the spec's code."""
    if spec.cluster.device == "cuda" and not has_gpu():
        raise Refused(
            Code.MISSING_RESOURCE,
            "cluster.device is cuda, but this machine has no GPU to profile on; leave out --profile "
            "or give cluster.device=cpu",
        )
    from ...engine.entry import UserCodeError, UserCodeFailed
    from ...engine.profile import profile

    import_paths = (str(Path.cwd()), str(spec_folder.resolve()))
    try:
        parameters, cuts, measured = profile(spec.largest, import_paths)
    except UserCodeError as error:
        raise Refused(Code.BAD_SPEC, str(error)) from error
    except UserCodeFailed as error:
        raise Refused(Code.FAILED, str(error)) from error
    return show(elastic_plan(spec, this_machine(spec, look=False), measured, parameters, cuts), as_json)
