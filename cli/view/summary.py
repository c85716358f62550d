"""The end of a run: what happened, predicted against measured, and where the state is now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...tiers.format.layout import RunDir
from ...tiers.memory.slots import memory_dir
from .events import describe_fault, evaluation_words
from .figures import Figure, figures
from .format import for_terminal, human_bytes, human_count, human_loss, human_ratio, human_seconds, near, plural
from .state import WARMUP_STEPS, RunState, number, version_of
from .tables import fitting

STYLES = {"finished": "bold green", "preempted": "bold yellow", "interrupted": "bold yellow", "failed": "bold red"}
LABEL = 13
TABLE_WIDTH = 80
MUCH_KEPT = 1.15
"""A rank's memory over the plan's from which on it is explained."""
KEPT_BLOCKS = (
    "; memory: also what the process itself gains, and free blocks that the C library keeps "
    "(MALLOC_MMAP_THRESHOLD_=131072 gives those back, steps take longer)"
)


def summary(console: Console, state: RunState, plan: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
    """Print the summary of a run.

    `outcome` may hold, all of it optional: `status` (finished, preempted, failed, interrupted), `message`,
    `seconds`, `state_digest`, `trace`, `log`, `code`, and `paths` (folder of the last checkpoint by tier).
    """
    ascii_only = console.options.ascii_only
    console.print()
    rows = [*_what_happened(state, plan, outcome), *_checkpoints(state, outcome)]
    for label, value in rows:
        _print_row(console, label, value, ascii_only)
    if state.count:
        console.print()
        # In a file the numbers are never cut to a width that means nothing there.
        width = console.width if console.is_terminal else max(TABLE_WIDTH, console.width)
        console.print(fitting(_table(state, plan, ascii_only), width), width=width, crop=console.is_terminal)
        console.print(
            Text(for_terminal(_footnote(state, plan), ascii_only), style="dim"), soft_wrap=not console.is_terminal
        )


def to_json(state: RunState, plan: Mapping[str, Any], outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the summary for `--json`; what is not known, or not finite, is null."""
    return {
        "status": status_of(state, outcome),
        "message": outcome.get("message"),
        "exit_code": outcome.get("code"),
        "run_dir": str(state.run_dir),
        "step": state.step,
        "max_steps": state.max_steps,
        "steps_run": state.count,
        "repeated_steps": state.repeated,
        "attempts": state.attempts,
        "restarts": state.restarts,
        "seconds": _finite(_seconds(state, outcome)),
        "lost_s": _finite(state.repeated_s + state.downtime_s),
        "loss": _finite(state.loss),
        "samples": state.samples_seen,
        "tokens_seen": state.tokens_seen,
        "tokens_per_s": _finite(state.series["tokens_per_s"].median),
        "evaluation": _evaluation(state),
        "totals": {key: _finite(value) for key, value in state.totals.items()},
        "figures": {
            figure.key: {
                "predicted": figure.predicted,
                "measured": _finite(figure.measured),
                "ratio": _finite(figure.ratio),
            }
            for figure in figures(state, plan)
        },
        "checkpoints": {
            tier: {
                "step": state.committed.get(tier),
                "newest": tier in _newest(state),
                "path": _path(state, tier, outcome),
                "kept": _is_kept(state, tier),
                "left_out": state.skipped.get(tier, 0),
                "left_out_reason": state.skip_reason.get(tier),
                "bytes_per_s": _rate(state, tier),
            }
            for tier in state.tiers
        },
        "channels": {channel: {"bytes": round(carried)} for channel, carried in state.channels.items()},
        "state_digest": _digest(state, outcome)[0],
        "state_digest_step": _digest(state, outcome)[1],
        "faults": [describe_fault(fault) for fault in state.faults],
        "warnings": state.warnings,
        "logs": str(RunDir(state.run_dir).logs),
    }


def _evaluation(state: RunState) -> dict[str, Any] | None:
    """The last evaluation: step, loss, perplexity, samples, seconds."""
    if state.evaluated is None:
        return None
    return {key: state.evaluated.get(key) for key in ("step", "loss", "perplexity", "samples", "seconds")}


def status_of(state: RunState, outcome: Mapping[str, Any]) -> str:
    """The caller's word for how the run ended, else what the events say; unfinished without either is failed."""
    status = outcome.get("status")
    if isinstance(status, str):
        return status
    if state.finished is not None:
        return "finished"
    return "preempted" if state.preempted is not None else "failed"


def _what_happened(state: RunState, plan: Mapping[str, Any], outcome: Mapping[str, Any]) -> list[tuple[str, Text]]:
    status = status_of(state, outcome)
    seconds = _seconds(state, outcome)
    took = f" in {human_seconds(seconds)}" if seconds is not None else ""
    loss = f", loss {human_loss(state.loss)}" if state.loss is not None else ""
    loss += f", {pace}" if (pace := _pace(state, plan)) else ""
    head = {
        "finished": f"{plural(state.step, 'step')}{_of_them(state)}{took}{loss}",
        "preempted": f"stopped when asked to, after step {state.step} of {state.max_steps}{took}{loss}",
        "interrupted": f"after step {state.step} of {state.max_steps}{took}{loss}",
    }.get(status, f"after step {state.step} of {state.max_steps}{took}{loss}")
    rows = [(status, Text(head))]
    rows += [("", Text(line)) for line in _reason(state, outcome, status)]
    if state.samples_seen is not None:
        tokens = f", {human_count(state.tokens_seen)} tokens" if state.tokens_seen is not None else ""
        rows.append(("seen", Text(f"{plural(state.samples_seen, 'sample')}{tokens}")))
    if state.evaluated is not None:
        rows.append(("evaluated", Text(evaluation_words(state.evaluated))))
    if state.attempts > 1 or state.repeated:
        rows.append(("lost work", Text(_lost_work(state))))
    if state.warnings:
        rows.append(("warnings", Text(f"{state.warnings}, in {near(RunDir(state.run_dir).events)}")))
    if status != "finished":
        log = outcome.get("log") or RunDir(state.run_dir).attempt(state.attempt)
        rows.append(("log", Text(near(Path(str(log))))))
        if state.committed:
            rows.append(("go on with", Text(f"dtrain resume --from latest {near(state.run_dir)}", style="bold")))
    return rows


def _pace(state: RunState, plan: Mapping[str, Any]) -> str:
    """Tokens per second, or samples where there are no tokens: the median over the steps."""
    tokens, step_s = state.series["tokens_per_s"].median, state.series["step_s"].median
    if tokens is not None:
        return f"{human_count(tokens)} tok/s"
    training = plan.get("training")
    batch = number(training, "global_batch_size") if isinstance(training, Mapping) else None
    return f"{batch / step_s:.1f} samples/s" if batch is not None and step_s else ""


def _of_them(state: RunState) -> str:
    """Say how many steps were made now, where an earlier start had made the others."""
    made = state.count - state.repeated
    return f", {made:,} of them now" if 0 < made < state.step else ""


def _reason(state: RunState, outcome: Mapping[str, Any], status: str) -> list[str]:
    """Why a run ended before its last step, and the traceback of the job's own code."""
    message, trace = outcome.get("message"), outcome.get("trace")
    tiers = [describe_fault(fault) for fault in state.faults if fault.get("kind") == "tier"]
    if status == "finished":
        return [str(message)] if message and outcome.get("code") else []
    if not message:
        return [describe_fault(state.faults[-1])] if status == "failed" and state.faults else []
    return [str(message), *tiers[-1:], *(str(trace).rstrip().splitlines() if trace else [])]


def _lost_work(state: RunState) -> str:
    lost = f"{plural(state.repeated, 'step')} repeated ({human_seconds(state.repeated_s)})"
    down = f", {human_seconds(state.downtime_s)} between fault and next step" if state.downtime_s else ""
    return f"{plural(state.restarts, 'restart')}, {lost}{down}"


def _checkpoints(state: RunState, outcome: Mapping[str, Any]) -> list[tuple[str, Text]]:
    rows: list[tuple[str, Text]] = []
    width = max((len(tier) for tier in state.tiers), default=0)
    for tier in state.tiers:
        line = Text(f"{tier:<{width}}  ").append_text(_checkpoint(state, tier, outcome))
        rows.append(("checkpoints" if not rows else "", line))
        if tier in state.skip_reason:
            rows.append(("", Text(f"{'':<{width}}  last left out: {state.skip_reason[tier]}", style="yellow")))
    if not rows and state.count:
        rows.append(("checkpoints", Text("none committed")))
    for channel, carried in state.channels.items():
        rows.append(("channels", Text(f"{channel}: {human_bytes(carried)} of checkpoints between nodes")))
    digest, of_step = _digest(state, outcome)
    if digest is not None:
        which = f"  (step {of_step})" if of_step is not None else ""
        rows.append(("state digest", Text(digest).append(which, style="dim")))
    return rows


def _checkpoint(state: RunState, tier: str, outcome: Mapping[str, Any]) -> Text:
    """What a tier holds: its newest step, what is missing, where, and how fast it was written."""
    left_out = state.skipped.get(tier, 0)
    missing = [f"{plural(left_out, 'checkpoint')} left out"] if left_out else []
    if tier not in state.committed:
        return Text("none committed", style="red").append(f" ({', '.join(missing)})", style="yellow")
    step, newest = state.committed[tier], max(state.commit_of.values(), key=version_of)
    behind = version_of(newest)[1] - step
    missing = [f"{plural(behind, 'step')} behind", *missing] if behind > 0 else missing
    value = Text(f"step {step}")
    value.append(f" ({', '.join(missing)})" if missing else "", style="yellow")
    value.append("" if _is_kept(state, tier) else " (given back)", style="dim")
    rate = _rate(state, tier)
    value.append(f"  {human_bytes(rate)}/s" if rate is not None else "")
    path = _path(state, tier, outcome)
    return value.append(f"  {path if '://' in path else near(Path(path))}" if path else "", style="dim")


def _newest(state: RunState) -> list[str]:
    """The tiers that hold the newest committed state."""
    kept = {tier: version_of(event) for tier, event in state.commit_of.items() if _is_kept(state, tier)}
    return [tier for tier, version in kept.items() if version == max(kept.values())]


def _rate(state: RunState, tier: str) -> float | None:
    """Bytes per second that the writes into a tier reached: the median of those that tell."""
    series = state.rates.get(tier)
    return series.median if series is not None else None


def _print_row(console: Console, label: str, value: Text, ascii_only: bool) -> None:
    if not console.is_terminal:
        # One line each in a file: it is searched, not looked at.
        line = for_terminal(f"{label:<{LABEL}} {value.plain}", ascii_only)
        console.print(line, soft_wrap=True, markup=False, highlight=False)
        return
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=LABEL, no_wrap=True)
    grid.add_column(overflow="fold")
    if ascii_only:
        value = Text(for_terminal(value.plain, ascii_only))
    grid.add_row(Text(label, style=STYLES.get(label, "dim")), value)
    console.print(grid)


def _table(state: RunState, plan: Mapping[str, Any], ascii_only: bool) -> Table:
    table = Table(box=box.ASCII2 if ascii_only else box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("predicted", "measured", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for figure in figures(state, plan):
        table.add_row(*_cells(figure, ascii_only))
    return table


def _cells(figure: Figure, ascii_only: bool) -> list[str]:
    cells = [figure.label, figure.write(figure.predicted), figure.write(figure.measured), human_ratio(figure.ratio)]
    return [for_terminal(cell, ascii_only) for cell in cells]


def _footnote(state: RunState, plan: Mapping[str, Any]) -> str:
    count = state.series["step_s"].count
    kept = any(one.key == "device_bytes" and (one.ratio or 0) > MUCH_KEPT for one in figures(state, plan))
    return (
        f"measured: medians over {plural(count, 'step')} (the first {WARMUP_STEPS} of each attempt are left out); "
        f"overhead: stall and slower passes{KEPT_BLOCKS if kept and _on_cpu(plan) else ''}"
    )


def _on_cpu(plan: Mapping[str, Any]) -> bool:
    memory = plan.get("memory")
    return isinstance(memory, Mapping) and memory.get("device_limit_bytes") is None


def _seconds(state: RunState, outcome: Mapping[str, Any]) -> float | None:
    own = number(outcome, "seconds")
    return own if own is not None or state.finished is None else number(state.finished, "seconds")


def _digest(state: RunState, outcome: Mapping[str, Any]) -> tuple[str | None, int | None]:
    own = outcome.get("state_digest")
    if isinstance(own, str) and own != state.state_digest:
        return own, state.step
    return state.state_digest, state.state_digest_step


def _path(state: RunState, tier: str, outcome: Mapping[str, Any]) -> str | None:
    """Folder of a tier's last checkpoint, told by the caller or the event."""
    paths, event = outcome.get("paths"), state.commit_of.get(tier, {})
    told = paths.get(tier) if isinstance(paths, Mapping) else None
    told = told or event.get("path")
    return str(told) if told else None


def _is_kept(state: RunState, tier: str) -> bool:
    """Tell whether a tier still has what it committed: snapshots are given back once the disk has them."""
    return tier not in ("memory", "peer") or memory_dir(RunDir(state.run_dir)).path.is_dir()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
