"""The live panel: what a person looks at while a run goes on, drawn anew from the state each time."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ...tiers.format.layout import RunDir
from .format import (
    human_clock,
    human_count,
    human_loss,
    human_percent,
    near,
    plural,
    shorten_left,
    sparkline,
)
from .state import RunState, integer, number

TWO_COLUMNS_FROM = 64
FRAME = 4  # border and padding, both sides
LABEL = 7
SPARK_CELLS = 32
QUIET_FACTOR = 3.0
QUIET_SECONDS = 5.0
PHASE_STYLES = {
    "starting": "cyan",
    "training": "green",
    "restarting": "red",
    "stopping": "yellow",
    "finished": "green",
}


def draw(
    console: Console, state: RunState, elapsed_s: float, silent_s: float, planned_step_s: float | None = None
) -> RenderableType:
    """Build the panel for the console's width; `silent_s`: time since the last news of a step."""
    inner = max(20, console.width - FRAME)
    body = Group(
        _progress(state, inner),
        "",
        _figures(state, inner, planned_step_s),
        _row("stored", _stored(state), inner),
        _row("logs", Text(shorten_left(_logs(state), max(1, inner - LABEL - 1)), style="dim"), inner),
    )
    panel = Panel(
        body,
        title=_title(state, silent_s),
        title_align="left",
        subtitle=_subtitle(state, elapsed_s),
        subtitle_align="right",
        border_style="dim",
        padding=(0, 1),
    )
    # The cursor rests on an empty line: what the terminal echoes there (^C) cannot wrap and shift the panel.
    return Group(panel, "")


def step_line(state: RunState) -> str:
    """One line of plain text about the last step, for logs."""
    digits = len(str(state.max_steps))
    latest = state.recent[-1] if state.recent else {}
    parts = [
        f"step {state.step:>{max(4, digits)}}/{state.max_steps}",
        f"loss {human_loss(state.loss)}",
        *_optional("lr {:.1e}", state.lr),
        *_optional("grad {:.2f}", state.grad_norm),
    ]
    rate, step_s, stall_s = (latest.get(key) for key in ("tokens_per_s", "step_s", "stall_s"))
    rate, unit = (rate, "tok/s") if isinstance(rate, int | float) else (_samples_per_s(state), "samples/s")
    parts += [f"{human_count(rate)} {unit}"] if rate is not None else []
    parts += [*_optional("{:.3f} s/step", step_s)]
    parts += [f"stall {1e3 * stall_s:.2f} ms"] if isinstance(stall_s, int | float) else []
    eta = eta_seconds(state)
    parts += [f"ETA {human_clock(eta)}"] if eta else []
    parts += [f"{tier} {step}" for tier, step in state.committed.items()]
    parts += [f"held out {human_loss(loss)} at {step}" for loss, step in _held_out(state)]
    return "  ".join(parts)


def _held_out(state: RunState) -> list[tuple[float | None, int | None]]:
    """Loss and step of the last evaluation, if there was one."""
    told = state.evaluated
    return [] if told is None else [(number(told, "loss"), integer(told, "step"))]


def eta_seconds(state: RunState) -> float | None:
    """Time the remaining steps take at the present pace, or None before there is one."""
    pace = state.recent_mean("step_s")
    return None if pace is None else pace * max(0, state.max_steps - state.step)


def _optional(form: str, value: object) -> list[str]:
    return [form.format(value)] if isinstance(value, int | float) else []


def _title(state: RunState, silent_s: float) -> Text:
    phase = Text(state.phase, style=PHASE_STYLES[state.phase])
    typical = state.recent_mean("step_s") or 0.0
    if state.phase == "training" and silent_s > max(QUIET_SECONDS, QUIET_FACTOR * typical):
        phase = Text(f"no step for {human_clock(silent_s)}", style="yellow")
    return Text.assemble((state.run_dir.name, "bold"), " · ", phase)


def _subtitle(state: RunState, elapsed_s: float) -> Text:
    parts = [f"attempt {state.attempt}"] if state.attempt else []
    parts += [plural(state.restarts, "restart")] if state.restarts else []
    parts += [f"{state.repeated} repeated"] if state.repeated else []
    return Text(" · ".join([*parts, human_clock(elapsed_s)]), style="dim")


def _progress(state: RunState, inner: int) -> Table:
    left = f"step {state.step}/{state.max_steps}"
    share = state.step / state.max_steps if state.max_steps > 0 else 0.0
    eta = eta_seconds(state) if state.phase == "training" else None
    right = f"{100 * min(1.0, share):3.0f} %  ETA {human_clock(eta) if eta is not None else '-:--'}"
    width = max(4, inner - len(left) - len(right) - 4)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text(left, style="bold"),
        ProgressBar(
            total=max(1, state.max_steps),
            completed=state.step,
            width=width,
            complete_style="cyan",
            finished_style="green",
        ),
        Text(right),
    )
    return grid


def _figures(state: RunState, inner: int, planned_step_s: float | None) -> Table:
    two = inner >= TWO_COLUMNS_FROM
    half = (inner - 2) // 2 if two else inner
    left = [
        ("loss", _loss(state, half)),
        ("lr", _plain("{:.2e}", state.lr)),
        ("grad", _plain("{:.3f}", state.grad_norm)),
    ]
    right = [("step", _step_time(state, planned_step_s)), ("speed", _speed(state)), ("stall", _stall(state))]
    grid = Table.grid(padding=(0, 2))
    for _ in range(2 if two else 1):
        grid.add_column(width=half, no_wrap=True, overflow="ellipsis")
    if two:
        for one, other in zip(left, right, strict=True):
            grid.add_row(_row(*one, half), _row(*other, half))
    else:
        for label, value in (*left, *right):
            grid.add_row(_row(label, value, half))
    return grid


def _row(label: str, value: Text, width: int) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=LABEL)
    grid.add_column(width=max(1, width - LABEL - 1), no_wrap=True, overflow="ellipsis")
    grid.add_row(Text(label, style="dim"), value)
    return grid


def _plain(form: str, value: float | None) -> Text:
    return Text("-", style="dim") if value is None else Text(form.format(value))


def _loss(state: RunState, width: int) -> Text:
    if state.loss is None:
        return Text("-", style="dim")
    value = Text(human_loss(state.loss), style="bold" if state.loss - state.loss == 0 else "bold red")
    for loss, step in _held_out(state):
        value.append(f" · held out {human_loss(loss)} at {step}", style="dim")
    cells = min(SPARK_CELLS, width - LABEL - 1 - len(value) - 2)
    value.append("  ")
    value.append(sparkline(state.losses, cells), style="cyan")
    return value


def _step_time(state: RunState, planned_step_s: float | None) -> Text:
    value = _plain("{:.3f} s", state.recent_mean("step_s"))
    if planned_step_s is not None:
        value.append(f" · planned {planned_step_s:.3f} s", style="dim")
    return value


def _speed(state: RunState) -> Text:
    rate = state.recent_mean("tokens_per_s")
    if rate is None:
        return _plain("{:.1f} samples/s", _samples_per_s(state))
    seen = f" · {human_count(state.tokens_seen)} seen" if state.tokens_seen else ""
    return Text.assemble(f"{human_count(rate)} tok/s", (seen, "dim"))


def _samples_per_s(state: RunState) -> float | None:
    """Pace of data that has no tokens: the growth of the samples' count over the last few steps."""
    counts = [number(record, "samples") for record in state.recent]
    seconds = sum(number(record, "step_s") or 0.0 for record in list(state.recent)[1:])
    if len(counts) < 2 or counts[0] is None or counts[-1] is None or seconds <= 0:
        return None
    return (counts[-1] - counts[0]) / seconds


def _stall(state: RunState) -> Text:
    stall_s, step_s = state.recent_mean("stall_s"), state.recent_mean("step_s")
    if stall_s is None or not step_s:
        return Text("-", style="dim")
    share = stall_s / step_s
    style = "green" if share < 0.01 else "yellow" if share < 0.05 else "red"
    return Text.assemble((f"{1e3 * stall_s:.2f} ms", style), (f" · {human_percent(share)} of the step", "dim"))


def _stored(state: RunState) -> Text:
    value = Text()
    for tier in state.tiers:
        step = state.committed.get(tier)
        value.append(" · " if value else "", style="dim")
        value.append(f"{tier} ").append("-" if step is None else str(step), style="bold")
        if state.outages.get(tier, 0) > 1:
            value.append(f" (failing, {state.skipped[tier]} left out)", style="red")
        elif state.skipped.get(tier):
            value.append(f" ({state.skipped[tier]} left out)", style="yellow")
    return value or Text("nothing yet", style="dim")


def _logs(state: RunState) -> str:
    run = RunDir(state.run_dir)
    return near(run.attempt(state.attempt) if state.attempt else run.logs)
