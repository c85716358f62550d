"""What `run` and `resume` share: plan, preflight, launch, the view while it runs, the summary after it."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .. import __version__
from ..specs.codes import Code
from ..specs.load import spec_to_json
from ..specs.models import PythonDataset, PythonModel, Spec, TextDataset
from ..tiers.fence import Taken
from ..tiers.jsonfile import Unreadable, append_event, dumps, read, replace
from ..tiers.layout import RunDir
from ..tiers.lock import FileLock, FolderLock, Locked
from ..tiers.memory import MemoryDir, MemoryTierError, memory_dir, open_memory_dir
from ..tiers.places import slow_tiers
from ..tiers.recovery import Candidate
from ..tiers.tier import disk_tier
from .refusal import Refused

if TYPE_CHECKING:
    from ..engine.launch import Outcome
    from ..planners.plan import Plan


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


def talk(as_json: bool) -> Console:
    """Where people's output goes: stdout, or stderr when stdout holds a document."""
    return Console(stderr=as_json, markup=False, highlight=False, emoji=False)


def identity(run: RunDir, spec: Spec, spec_folder: Path) -> dict[str, Any]:
    """Who this run is; written once, kept over all resumes. Raises Unreadable when the file is damaged."""
    if run.run.exists():
        return read(run.run)
    info = {
        "run_id": _stored_id(run, spec) or uuid.uuid4().hex,
        "name": spec.name,
        "created": time.time(),
        "dtrain": __version__,
        "import_paths": [str(Path.cwd()), str(spec_folder.resolve())],
    }
    replace(run.run, dumps(info))
    return info


def _stored_id(run: RunDir, spec: Spec) -> str | None:
    """The id that the newest checkpoint inside the run's own folder speaks of: run.json itself was lost."""
    if spec.disk_tier is None or Path(spec.disk_tier.path).is_absolute():
        return None
    good, _ = disk_tier(run.disk(spec.disk_tier.path), None).scan()
    return good[-1].manifest.run_id if good else None


def train(run: RunDir, spec: Spec, info: Mapping[str, Any], start: Start, console: Console, as_json: bool) -> Code:
    """Train until the end and tell how it went; the caller holds the lock."""
    from ..engine.launch import Launcher

    import_paths = _import_paths(spec, info)
    plan = _going_on(run, _plan(spec, import_paths)) if start.candidates else _plan(spec, import_paths)
    with _own_places(run, spec, plan, str(info["run_id"]), console, fresh=not start.candidates) as memory:
        replace(run.spec, json.dumps(spec_to_json(spec), indent=2).encode())
        replace(run.plan, json.dumps(plan.to_json(), indent=2).encode())
        append_event(run.events, "planned", None, run.last_attempt() + 1, source=plan.source)
        _announce(console, run, spec, plan, start)
        launcher = Launcher(run, spec, plan, memory, str(info["run_id"]), import_paths)
        return _watch(run, spec, plan, lambda: launcher.drive(start.candidates, start.skipped), console, as_json)


def conclude(
    run: RunDir, spec: Spec, info: Mapping[str, Any], newest: Candidate, digest: str, console: Console, as_json: bool
) -> Code:
    """All steps are done, but the run was cut off before it could say so: carry the last state to where it belongs."""
    from ..engine.launch import Launcher

    plan = _plan(spec, _import_paths(spec, info))
    with _own_places(run, spec, plan, str(info["run_id"]), console, fresh=False) as memory:
        step = newest.version.step
        console.print(f"all {step} steps are done, the newest is in {newest.tier}: bringing the run to its end")
        launcher = Launcher(run, spec, plan, memory, str(info["run_id"]), ())
        return _watch(run, spec, plan, lambda: launcher.conclude(step, digest), console, as_json)


def _import_paths(spec: Spec, info: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([str(Path.cwd()), *info["import_paths"]])) if names_code(spec) else ()


@contextmanager
def _own_places(
    run: RunDir, spec: Spec, plan: Plan, run_id: str, console: Console, *, fresh: bool
) -> Iterator[MemoryDir]:
    """What the run needs is there, and nobody else uses its memory or its disk; raises Refused."""
    from ..engine.preflight import MissingResource, preflight

    _refuse_strangers(run, spec, run_id, console, fresh=fresh)
    with _own_disk(run, spec, run_id):
        try:
            for line in preflight(spec, plan, run, memory_dir(run)):
                console.print(f"warning: {line}", highlight=False)
            memory = open_memory_dir(run, run_id)
        except (MissingResource, MemoryTierError) as error:
            raise Refused(Code.MISSING_RESOURCE, str(error)) from error
        with FolderLock(memory.path, shared=True):
            yield memory


@contextmanager
def _own_disk(run: RunDir, spec: Spec, run_id: str) -> Iterator[None]:
    """Hold the disk tier's folder for this run alone."""
    if spec.disk_tier is None:
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(disk_tier(run.disk(spec.disk_tier.path), run_id).lock())
        except Locked as error:
            raise Refused(Code.MISSING_RESOURCE, f"the disk tier's folder {error}; give each run its own") from error
        yield


def _refuse_strangers(run: RunDir, spec: Spec, run_id: str, console: Console, *, fresh: bool) -> None:
    """Another run's checkpoints in a tier are a refusal.

    A tier that cannot be reached is one for a fresh run, whose spec may be wrong; one that goes on does without it.
    """
    for tier in slow_tiers(spec, run, run_id):
        try:
            strangers = tier.strangers()
        except Taken as error:
            raise Refused(Code.BAD_SPEC, str(error)) from error
        except OSError as error:
            words = f"the {tier.name} tier cannot be used: {error}"
            if fresh:
                raise Refused(Code.MISSING_RESOURCE, words) from error
            console.print(f"warning: {words}; it is tried again while the run goes on", highlight=False)
            continue
        if strangers:
            raise Refused(
                Code.BAD_SPEC,
                f"the {tier.name} tier {tier.store.where} holds checkpoints of another run (the newest is "
                f"{strangers[-1].folder}, run id {strangers[-1].manifest.run_id}); give each run its own place",
            )


def _watch(run: RunDir, spec: Spec, plan: Plan, work: Callable[[], Outcome], console: Console, as_json: bool) -> Code:
    """Do the work while the view follows the run's files; then the summary."""
    from .summary import summary, to_json
    from .view import RunView

    described = plan.to_json()
    view = RunView(console, run.root, spec.max_steps, described)
    view.start()
    try:
        outcome = work()
    finally:
        view.stop()
    with suppress(Unreadable):
        described["measured"] = read(run.plan).get("measured")
    told = {**vars(outcome), "code": int(outcome.code), "run_dir": str(run.root)}
    summary(console, view.state, described, told)
    if as_json:
        sys.stdout.write(json.dumps(to_json(view.state, described, told)) + "\n")
    return outcome.code


def names_code(spec: Spec) -> bool:
    """Tell whether the spec names people's own code."""
    return isinstance(spec.model, PythonModel) or isinstance(spec.dataset, PythonDataset)


def _plan(spec: Spec, import_paths: tuple[str, ...]) -> Plan:
    from ..engine.entry import UserCodeError, UserCodeFailed
    from ..planners.plan import make_plan
    from .machine import this_machine

    if not isinstance(spec.model, PythonModel):
        return make_plan(spec, this_machine(spec))
    from ..engine.profile import count_apart

    try:
        parameters = count_apart(spec, import_paths)
    except UserCodeError as error:
        raise Refused(Code.BAD_SPEC, str(error)) from error
    except UserCodeFailed as error:
        raise Refused(Code.FAILED, str(error)) from error
    return make_plan(spec, this_machine(spec), None, parameters)


def _going_on(run: RunDir, plan: Plan) -> Plan:
    """The plan with what the run has measured so far; a plan that cannot be read is made anew, as on a first start."""
    from ..planners.plan import plan_from_json

    try:
        return plan.going_on(plan_from_json(read(run.plan)))
    except (Unreadable, ValueError):
        return plan


def _announce(console: Console, run: RunDir, spec: Spec, plan: Plan, start: Start) -> None:
    """The decisions, before the first step."""
    training = spec.training
    console.print(
        f"{spec.name}: global batch {training.global_batch_size} = {spec.world_size} ranks x "
        f"{training.micro_batch_size} samples x {spec.micro_batches} passes",
    )
    tiers = ", ".join(f"{tier.type} every {_steps(tier.every)}" for tier in plan.tiers)
    console.print(f"checkpoints: {tiers or 'none (tiers is empty): a fault loses the whole run'}")
    if spec.tiers and not spec.slow_tiers:
        console.print(
            "note: no disk or object tier: nothing of the trained state is kept once the run has ended", highlight=False
        )
    console.print(f"{start.words}; logs in {_short(run.logs)}")


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
