"""What `run` and `resume` share: plan, preflight, launch, the view while it runs, the summary after it."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .. import __version__
from ..specs.codes import Code
from ..specs.load import spec_to_json
from ..specs.models import PythonModel, Spec, TextDataset
from ..tiers.jsonfile import append_event, dumps, read, replace
from ..tiers.layout import RunDir
from ..tiers.lock import FileLock
from ..tiers.recovery import Candidate

if TYPE_CHECKING:
    from ..engine.launch import Outcome
    from ..planners.plan import Plan


class Refused(Exception):
    """The command cannot be done as asked; the message says why and what to do, the code how it ends."""

    def __init__(self, code: Code, message: str) -> None:
        """Remember the exit code."""
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Start:
    """Where to begin: candidates (none: step 0), what was passed over, and the line that says so."""

    candidates: list[Candidate]
    skipped: list[dict[str, Any]]
    words: str


def absolute(spec: Spec) -> Spec:
    """The spec with its data path made absolute, so that a resume from another folder finds the same data."""
    dataset = spec.dataset
    if not isinstance(dataset, TextDataset) or dataset.path.startswith("python:"):
        return spec
    path = str(Path(dataset.path).resolve())
    return spec.model_copy(update={"dataset": dataset.model_copy(update={"path": path})})


def locked(run: RunDir) -> AbstractContextManager[FileLock]:
    """The lock that only one driver of a run can hold."""
    return FileLock(run.lock, timeout_s=0.5)


def identity(run: RunDir, spec: Spec, spec_folder: Path) -> dict[str, Any]:
    """Who this run is; written once, kept over all resumes."""
    if run.run.exists():
        return read(run.run)
    info = {
        "run_id": uuid.uuid4().hex,
        "name": spec.name,
        "created": time.time(),
        "dtrain": __version__,
        "import_paths": [str(Path.cwd()), str(spec_folder.resolve())],
    }
    replace(run.run, dumps(info))
    return info


def train(run: RunDir, spec: Spec, info: Mapping[str, Any], start: Start, console: Console, as_json: bool) -> Code:
    """Train until the end and tell how it went; the caller holds the lock."""
    from ..engine.entry import UserCodeError, UserCodeFailed
    from ..engine.launch import Launcher
    from ..engine.preflight import MissingResource, preflight
    from ..tiers.memory import MemoryTierError, open_memory_dir

    import_paths = tuple(dict.fromkeys([str(Path.cwd()), *info["import_paths"]]))
    try:
        plan = _plan(spec, import_paths)
        memory = open_memory_dir(run, str(info["run_id"]))
        preflight(spec, plan, run, memory)
    except UserCodeError as error:
        raise Refused(Code.BAD_SPEC, str(error)) from error
    except UserCodeFailed as error:
        raise Refused(Code.FAILED, str(error)) from error
    except (MissingResource, MemoryTierError) as error:
        raise Refused(Code.MISSING_RESOURCE, str(error)) from error
    replace(run.spec, json.dumps(spec_to_json(spec), indent=2).encode())
    replace(run.plan, json.dumps(plan.to_json(), indent=2).encode())
    append_event(run.events, "planned", None, run.last_attempt() + 1, source=plan.source)
    _announce(console, run, spec, plan, start)
    launcher = Launcher(run, spec, plan, memory, str(info["run_id"]), import_paths)
    return _watch(run, spec, plan, launcher, start, console, as_json)


def _watch(run: RunDir, spec: Spec, plan: Plan, launcher: Any, start: Start, console: Console, as_json: bool) -> Code:
    from .summary import summary, to_json
    from .view import RunView

    described = plan.to_json()
    view = RunView(console, run.root, spec.max_steps, described)
    view.start()
    try:
        outcome: Outcome = launcher.drive(start.candidates, start.skipped)
    finally:
        view.stop()
    told = {**vars(outcome), "code": int(outcome.code), "run_dir": str(run.root)}
    summary(console, view.state, described, told)
    if as_json:
        sys.stdout.write(json.dumps(to_json(view.state, described, told)) + "\n")
    return outcome.code


def _plan(spec: Spec, import_paths: tuple[str, ...]) -> Plan:
    from ..planners.plan import make_plan
    from .machine import this_machine

    parameters = None
    if isinstance(spec.model, PythonModel):
        from ..engine.profile import count_apart

        parameters = count_apart(spec, import_paths)
    return make_plan(spec, this_machine(spec), None, parameters)


def _announce(console: Console, run: RunDir, spec: Spec, plan: Plan, start: Start) -> None:
    """The decisions, before the first step."""
    training = spec.training
    console.print(
        f"{spec.name}: global batch {training.global_batch_size} = {spec.world_size} ranks x "
        f"{training.micro_batch_size} samples x {spec.micro_batches} passes",
        highlight=False,
    )
    tiers = ", ".join(f"{tier.type} every {_steps(tier.every)}" for tier in plan.tiers)
    console.print(f"checkpoints: {tiers or 'none (tiers is empty): a fault loses the whole run'}", highlight=False)
    if spec.tiers and spec.disk_tier is None:
        console.print(
            "note: no disk tier: nothing of the trained state is kept once the run has ended", highlight=False
        )
    console.print(f"{start.words}; logs in {_short(run.logs)}", highlight=False)


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
