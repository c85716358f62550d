"""What `run` and `resume` share: plan, preflight, launch, the view while it runs, the summary after it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..planners.words import seers
from ..specs.codes import Code
from ..specs.datasets import Dataset, PythonDataset, TokenDataset
from ..specs.load import spec_to_json
from ..specs.models import PythonModel, Spec
from ..tiers.fence import Taken
from ..tiers.format.jsonfile import Unreadable, append_event, read, replace
from ..tiers.format.layout import RunDir
from ..tiers.lock import FileLock, FolderLock, Locked
from ..tiers.memory.leftovers import sweep
from ..tiers.memory.slots import MemoryDir, MemoryTierError, memory_dir, open_memory_dir
from ..tiers.peers.seal import Seal
from ..tiers.reading.lineage import highest_attempt, holdings, remembered
from ..tiers.reading.places import keep_former, slow_tiers
from ..tiers.reading.recovery import Candidate
from ..tiers.tier import Tier, disk_tier
from .identity import keep_identity
from .scheduler import endpoint_of
from .terminal.refusal import Refused, tidied
from .token import own_seal
from .view.format import human_percent, human_seconds

if TYPE_CHECKING:
    from ..engine.attempt.forks import NurseryProcess
    from ..engine.network.line import Host
    from ..engine.nodes.team import Team
    from ..engine.outcome import Outcome
    from ..planners.plan import Plan


@dataclass(frozen=True)
class Start:
    """Where to begin: candidates (none: step 0), what was passed over, and the line that says so."""

    candidates: list[Candidate]
    skipped: list[dict[str, Any]]
    words: str
    former: Sequence[Tier] = ()
    """Tiers that the run had before and has no more."""
    goes_on: bool = False
    """With the newest that the nodes have between them, also where this one has nothing to go on from."""

    @property
    def fresh(self) -> bool:
        """Tell whether the run begins."""
        return not self.candidates and not self.goes_on


RESUME_SPEC = "dtrain resume --from latest SPEC"


def absolute(spec: Spec) -> Spec:
    """The spec with its data paths made absolute, so that a resume from another folder finds the same data."""
    found: dict[str, Any] = {"dataset": _absolute_data(spec.dataset)}
    if spec.evaluation is not None and spec.evaluation.dataset is not None:
        own = _absolute_data(spec.evaluation.dataset)
        found["evaluation"] = spec.evaluation.model_copy(update={"dataset": own})
    return spec.model_copy(update=found)


def _absolute_data(dataset: Dataset) -> Dataset:
    if not isinstance(dataset, TokenDataset) or dataset.path.startswith("python:"):
        return dataset
    return dataset.model_copy(update={"path": str(Path(dataset.path).resolve())})


def locked(run: RunDir) -> AbstractContextManager[FileLock]:
    """The lock that only one driver of a run can hold."""
    return FileLock(run.lock, timeout_s=0.5)


def talk(as_json: bool) -> Console:
    """Where people's output goes: stdout, or stderr when stdout holds a document."""
    return Console(stderr=as_json, markup=False, highlight=False, emoji=False)


def train(
    run: RunDir, spec: Spec, info: dict[str, Any], start: Start, console: Console, as_json: bool, seal: Seal | None
) -> Code:
    """Train until the end and tell how it went; the caller holds the lock. `seal` is as for `join`."""
    import_paths = import_paths_of(spec, info)
    with ExitStack() as stack:
        host = stack.enter_context(_rendezvous(run, spec, seal))
        nursery = stack.enter_context(nursery_of(spec))
        plan = plan_of(spec.largest, import_paths)
        plan = plan if start.fresh else _going_on(run, spec, plan)
        memory = stack.enter_context(own_places(run, spec, plan, info, console, fresh=start.fresh))
        from ..engine.launch import Launcher

        used = highest_attempt(run, memory, [*slow_tiers(spec, run, None), *start.former])
        keep_former(run, start.former)
        write_down(run, spec, plan)
        append_event(run.events, "planned", None, used + 1, source=plan.source)
        _announce(console, run, spec.largest, plan, start)
        run_id = str(info["run_id"])
        team = _team(host, run, spec, plan, memory, run_id, used, start) if host else None
        launcher = Launcher(
            run, spec, plan, memory, run_id, import_paths, used, nursery, team,
            lambda resized: plan_of(resized, import_paths),
        )  # fmt: skip
        return _watch(run, spec, plan, lambda: launcher.drive(start.candidates, start.skipped), console, as_json)


def conclude(
    run: RunDir, spec: Spec, info: dict[str, Any], newest: Candidate, digest: str, console: Console, as_json: bool
) -> Code:
    """All steps are done, but the run was cut off before it could say so: carry the last state to where it belongs."""
    from ..engine.ending import Ending
    from ..engine.nodes.alone import Alone

    plan = plan_of(spec, import_paths_of(spec, info))
    with own_places(run, spec, plan, info, console, fresh=False) as memory:
        write_down(run, spec, plan)
        step = newest.version.step
        console.print(f"all {step} steps are done, the newest is in {newest.tier}: bringing the run to its end")
        ending = Ending(run, spec, plan, memory, str(info["run_id"]), newest.version.attempt, Alone(memory))
        return _watch(run, spec, plan, lambda: ending.conclude(step, digest), console, as_json)


@contextmanager
def _rendezvous(run: RunDir, spec: Spec, seal: Seal | None) -> Iterator[Host | None]:
    """Where the other nodes come to; None for a run on one node. Raises Refused."""
    if spec.cluster.nodes == 1:
        yield None
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what matters of the store's failures we say ourselves
    from ..engine.network.addresses import NetworkError, check_interfaces
    from ..engine.network.line import Host

    try:
        check_interfaces(spec)
        host = Host(endpoint_of(spec), spec.cluster.nodes, seal or own_seal(run))
    except NetworkError as error:
        raise Refused(Code.MISSING_RESOURCE, str(error)) from error
    with host:
        yield host


def _team(
    host: Host, run: RunDir, spec: Spec, plan: Plan, memory: MemoryDir, run_id: str, used: int, start: Start
) -> Team:
    """The other nodes of the run."""
    from ..engine.network.hello import hello
    from ..engine.nodes.team import Team
    from ..engine.storage.peers import peers_of

    welcome = {"run_id": run_id, "fresh": start.fresh, "plan": plan.to_json()}

    def tell(event: str, **details: object) -> None:
        append_event(run.events, event, None, max(run.last_attempt(), used + 1), **details)

    peers = peers_of(run, spec, plan, memory, run_id, host.seal)
    mine = hello(spec, 0, "")
    return Team(host, spec, memory, slow_tiers(spec, run, run_id), mine, welcome, tell, peers, start.goes_on)


def ranks_of(spec: Spec, node: int) -> tuple[int, ...] | None:
    """The ranks of a node; None for all of a run on one node."""
    workers = spec.cluster.workers_per_node
    if spec.cluster.nodes.elastic:
        return ()  # known with each attempt; until then every snapshot counts of which it has any part
    return tuple(range(node * workers, (node + 1) * workers)) if spec.cluster.nodes > 1 else None


def nursery_of(spec: Spec) -> AbstractContextManager[NurseryProcess | None]:
    """The process that forks the workers; it imports torch while we do.

    None where there is a GPU: a fork after CUDA's own libraries were loaded has never been tried.
    """
    from ..engine.attempt.forks import NurseryProcess
    from .machine import has_gpu

    return NurseryProcess(spec) if spec.cluster.device == "cpu" or not has_gpu() else nullcontext()


def write_down(run: RunDir, spec: Spec, plan: Plan) -> None:
    """Spec and plan as they are used."""
    replace(run.spec, json.dumps(spec_to_json(spec), indent=2).encode())
    replace(run.plan, json.dumps(plan.to_json(), indent=2).encode())


def import_paths_of(spec: Spec, info: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the code that the spec names is looked for; nowhere when it names none."""
    return tuple(dict.fromkeys([str(Path.cwd()), *info["import_paths"]])) if names_code(spec) else ()


@contextmanager
def own_places(
    run: RunDir, spec: Spec, plan: Plan, info: dict[str, Any], console: Console, *, fresh: bool
) -> Iterator[MemoryDir]:
    """What the run needs is there, and nobody else uses its memory or its disk; raises Refused."""
    from ..engine.preflight import MissingResource, preflight

    run_id = str(info["run_id"])
    _refuse_strangers(run, spec, run_id, console, fresh=fresh)
    with _own_disk(run, spec, run_id):
        if fresh:
            _forget_memory(run, console)
        try:
            ranks = ranks_of(spec, run.node)
            for line in preflight(spec, plan, run, memory_dir(run)):
                console.print(f"warning: {line}", highlight=False)
            keep_identity(run, info)
            memory = open_memory_dir(run, run_id, ranks)
        except (MissingResource, MemoryTierError) as error:
            raise Refused(Code.MISSING_RESOURCE, str(error)) from error
        with tidied(memory.remove_unneeded), FolderLock(memory.path, shared=True):
            yield memory


def _forget_memory(run: RunDir, console: Console) -> None:
    """A fresh run never reads what an earlier one of the same folder left in memory; what others left is told of."""
    memory = memory_dir(run)
    before = remembered(memory)
    memory.remove()
    if before is not None:
        console.print(f"removed {before.version} of the run that was in this folder before from {memory.path}")
    swept = sweep()
    for line in (*swept.removed, *(f"note: in memory: {words}" for words in swept.left)):
        console.print(line, soft_wrap=True)


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
        except OSError as error:
            words = f"the disk tier {run.disk(spec.disk_tier.path)} cannot be used: {error.strerror or error}"
            raise Refused(Code.MISSING_RESOURCE, words) from error
        yield


def _refuse_strangers(run: RunDir, spec: Spec, run_id: str, console: Console, *, fresh: bool) -> None:
    """Another run's checkpoints in a tier are a refusal.

    A tier that cannot be reached is one for a fresh run, whose spec may be wrong; one that goes on does without it.
    """
    hint = f"; to go on with that run: {RESUME_SPEC}" if fresh else ""
    for tier in slow_tiers(spec, run, run_id):
        try:
            tier.refuse_others()
            held, _ = holdings([tier], strict=True)
        except Taken as error:
            raise Refused(Code.BAD_SPEC, f"{error}{hint}") from error
        except OSError as error:
            words = f"the {tier.name} tier cannot be used: {error}"
            if fresh:
                raise Refused(Code.MISSING_RESOURCE, words) from error
            console.print(f"warning: {words}; it is tried again while the run goes on", highlight=False)
            continue
        stranger = next((one for one in held if one.run_id != run_id), None)
        if stranger is not None:
            raise Refused(
                Code.BAD_SPEC,
                f"{stranger.where} holds checkpoints of another run (the newest is {stranger.version.dirname}, "
                f"run id {stranger.run_id}); give each run its own place{hint}",
            )


def _watch(run: RunDir, spec: Spec, plan: Plan, work: Callable[[], Outcome], console: Console, as_json: bool) -> Code:
    """Do the work while the view follows the run's files; then the summary."""
    from .view.follow import RunView
    from .view.summary import summary, to_json

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
    own = spec.evaluation.dataset if spec.evaluation is not None else None
    return isinstance(spec.model, PythonModel) or PythonDataset in (type(spec.dataset), type(own))


def plan_of(spec: Spec, import_paths: tuple[str, ...]) -> Plan:
    """The plan for this machine; a python model is built once for it, apart. Raises Refused."""
    from ..engine.entry import UserCodeError, UserCodeFailed
    from ..planners.plan import make_plan
    from .machine import this_machine

    if not isinstance(spec.model, PythonModel):
        return make_plan(spec, this_machine(spec))
    from ..engine.profile import count_apart

    try:
        parameters, cuts = count_apart(spec, import_paths)
    except UserCodeError as error:
        raise Refused(Code.BAD_SPEC, str(error)) from error
    except UserCodeFailed as error:
        raise Refused(Code.FAILED, str(error)) from error
    return make_plan(spec, this_machine(spec), None, parameters, cuts)


def _going_on(run: RunDir, spec: Spec, plan: Plan) -> Plan:
    """The plan with what the run has measured so far; a plan that cannot be read is made anew, as on a first start."""
    from ..planners.plan import plan_from_json
    from ..planners.running.resized import taking_along

    try:
        before = plan_from_json(read(run.plan))
        same = plan.going_on(before)
        if same.measured is not None or not spec.cluster.nodes.elastic:
            return same
        return taking_along(plan, spec.largest, before, spec.at(before.training.nodes))
    except (Unreadable, ValueError):
        return plan


def _announce(console: Console, run: RunDir, spec: Spec, plan: Plan, start: Start) -> None:
    """The decisions, before the first step."""
    training = spec.training
    who = seers(spec.world_size, spec.data_parallel)
    if spec.data_parallel != spec.world_size:
        who += f" ({plan.training.strategy})"
    console.print(
        f"{spec.name}: global batch {training.global_batch_size} = {who} x "
        f"{training.micro_batch_size} samples x {spec.micro_batches} passes",
    )
    tiers = ", ".join(f"{tier.type} every {_steps(tier.every)}" for tier in plan.tiers)
    console.print(f"checkpoints: {tiers or 'none (tiers is empty): a fault loses the whole run'}")
    if spec.unused is not None:
        console.print(f"warning: {spec.unused}", soft_wrap=True)
    if spec.used_tiers and not spec.slow_tiers:
        console.print(
            "note: no disk or object tier: nothing of the trained state is kept once the run has ended", highlight=False
        )
    console.print(f"expected: {_expected(plan)}", soft_wrap=True)
    console.print(f"{start.words}; logs in {_short(run.logs)}")


def _expected(plan: Plan) -> str:
    """What a step takes and what of it checkpoints do; `dtrain plan` says where the figures come from."""
    step_s, expected = plan.iteration.step_s, plan.expected
    if step_s is None:
        return "nothing is known of the model before it has run (model.like says it, dtrain plan --profile measures it)"
    step = f"{human_seconds(step_s)} a step"
    if not plan.tiers:
        return step
    allowed = f"allowed {human_percent(expected.budget)}"
    return f"{step}, overhead of checkpoints {human_percent(expected.overhead)} ({allowed})"


def _steps(every: int) -> str:
    return "step" if every == 1 else f"{every} steps"


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
