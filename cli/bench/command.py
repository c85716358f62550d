"""`dtrain bench`: this spec on this machine, step by step beside other ways to store every step."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ...planners.methods import METHODS, UnknownMethod, choose
from ...planners.plan import Plan
from ...specs.codes import Code
from ...specs.load import load_spec, spec_to_json
from ...specs.models import Spec
from ...tiers.format.jsonfile import replace
from ...tiers.format.layout import RunDir
from ..checkpoints.output import document
from ..identity import fresh_identity
from ..run import check_supported
from ..terminal.refusal import Refused, guarded
from ..train import absolute, import_paths_of, own_places, plan_of, talk
from ..view.format import human_bytes, plural
from .folder import every_step, folder_of_its_own, refuse_full
from .follow import BenchView
from .page import say, to_document
from .plot import checked, draw

if TYPE_CHECKING:
    from ...engine.attempt.agent import StopSignals
    from ...engine.bench.launch import Failure

BUDGET_S = 80.0
"""For the blocks; with building and trying that makes some two minutes."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for; None: chosen by the spec, or by the time a step takes."""

    methods: str | None = None
    blocks: int | None = None
    steps_per_block: int | None = None
    plot: str | None = None


def bench(spec_path: str, overrides: list[str], options: Options, as_json: bool) -> int:
    """Measure and print. Returns the exit code."""
    return guarded(lambda: _bench(spec_path, overrides, options, as_json), as_json)


def _bench(spec_path: str, overrides: list[str], options: Options, as_json: bool) -> int:
    spec = absolute(load_spec(spec_path, overrides))
    check_supported(spec)
    try:
        methods = choose(options.methods, [tier.type for tier in spec.used_tiers])
    except UnknownMethod as error:
        raise Refused(Code.USAGE, str(error)) from error
    picture = checked(options.plot)
    from ...engine.attempt.agent import Interrupted, StopSignals

    console = talk(as_json)
    try:
        with StopSignals() as signals, folder_of_its_own(spec) as run:
            found = _measure(run, spec, Path(spec_path).parent, methods, options, signals, console)
    except Interrupted as stop:
        raise Refused(Code.INTERRUPTED, f"stopped by {stop}; no figures, nothing left behind") from stop
    say(console, found)
    if picture is not None:
        draw(found, picture)
        console.print(f"drawn into {picture}", soft_wrap=True)
    if as_json:
        document(found)
    return Code.DONE


def _measure(
    run: RunDir,
    spec: Spec,
    spec_folder: Path,
    methods: tuple[str, ...],
    options: Options,
    signals: StopSignals,
    console: Console,
) -> dict[str, Any]:
    """Run all blocks in the folder `run`; raises Refused when there are no figures."""
    from ...engine.bench.launch import BenchLauncher
    from ...engine.bench.worker import Wanted, lines_of

    started = time.monotonic()
    measured = every_step(spec, run)
    check_supported(measured)
    info = fresh_identity(run, measured, spec_folder)
    run_id, paths = str(info["run_id"]), import_paths_of(measured, info)
    plan = plan_of(measured, paths)
    refuse_full(measured, plan, run, methods)
    with own_places(run, measured, plan, info, console, fresh=True) as memory:
        replace(run.spec, json.dumps(spec_to_json(measured)).encode())
        replace(run.plan, json.dumps(plan.to_json()).encode())
        _announce(console, spec, plan, run, methods, options)
        launcher = BenchLauncher(run, measured, plan, memory, run_id, paths)
        wanted = Wanted(methods, options.blocks, options.steps_per_block, BUDGET_S)
        with BenchView(console, lines_of(run)) as view:
            failure = launcher.measure(wanted, signals, view.poll)
    if failure is not None:
        _refuse(failure)
    return to_document(spec, plan, view.lines, time.monotonic() - started)


def _announce(console: Console, spec: Spec, plan: Plan, run: RunDir, methods: Sequence[str], options: Options) -> None:
    """What is about to be compared, and for about how long."""
    labels = ", ".join(METHODS[name].label for name in methods)
    far = [tier.type for tier in spec.used_tiers if tier.type not in ("memory", "disk")]
    left_out = f" (the {' and '.join(far)} tier is left out)" if far else ""
    left_out += "" if spec.memory_tier or spec.disk_tier else " (not by dtrain: the spec has no memory or disk tier)"
    chosen = options.blocks is not None or options.steps_per_block is not None
    usual = "" if chosen else "some two minutes, more where a step takes over a second; "
    for line in (
        f"{spec.name}: {plural(spec.world_size, 'rank')}, {human_bytes(plan.model.state_bytes)} of state",
        f"every step stored by: nothing, {labels}{left_out}",
        f"in {run.root}, which is removed at the end",
        f"{usual}each method is tried first, then the time is told",
    ):
        console.print(line, soft_wrap=True)


def _refuse(failure: Failure) -> None:
    trace = f"\n{failure.trace.rstrip()}" if failure.trace else ""
    raise Refused(failure.code, f"{failure.message}; no figures{trace}")
