"""The plan as a page for people: header, one step drawn to scale, storage parameters, tiers, losses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...planners.document import Expected, Plan, TierPlan
from ...planners.words import count, duration, plural, seers, share, shares, size, three_digits
from ..view.tables import fitting
from .step import (
    ASCII,
    DRAWN_ENDS,
    DRAWN_MICRO_BATCHES,
    LABEL_COLUMNS,
    LETTERS,
    UNICODE,
    Glyphs,
    copy_lane,
    drain_lane,
    passes_lane,
    segments_of,
)

UNKNOWN = "?"
INDENT = 2
WRITES = {"peer": "copy to peers", "disk": "write to disk", "object": "upload to the object store"}
KINDS = {"process": "a worker ends", "node": "a node is lost", "cluster": "all nodes are lost"}
GLUE = "\ue000"
"""Stands for the space between a figure and its unit while lines are broken: they stay on one."""
_FIGURE = re.compile(r"(?<=\d) (?=(?:[KMGTP]iB(?:/s)?|B(?:/s)?|[KMGTP]?FLOP/s|ms|µs|s|min|h|d|%)(?![\w/]))")
_TO_ASCII = str.maketrans({"µ": "u", "·": "|", "…": "~"})


def render(plan: Plan, console: Console) -> str:
    """Return the page as this console would print it, without spaces at the ends of lines."""
    ascii_only = console.options.ascii_only
    with console.capture() as captured:
        console.print(plan_page(plan, console.width, ASCII if ascii_only else UNICODE))
    text = "\n".join(line.rstrip() for line in captured.get().replace(GLUE, " ").splitlines()) + "\n"
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode() if ascii_only else text


def plan_page(plan: Plan, width: int, glyphs: Glyphs = UNICODE) -> RenderableType:
    """Return the page, `width` columns wide at most."""
    parts: list[RenderableType] = [*_header(plan)]
    parts += [_title(_step_title(plan)), *_step(plan, width - 1, glyphs)]
    parts += [_title("Storage parameters"), *_storage(plan, width)]
    parts += [_title("Tiers"), *_tiers(plan, width)]
    if plan.changes:
        parts += [_title("To store more often"), *_bullets(plan.changes, "")]
    parts += [_title("Memory"), *_memory(plan)]
    parts += [_title("Expected"), *_expected(plan, width)]
    parts += [_title("Rests on"), *_bullets(plan.assumptions, "")]
    if plan.warnings:
        parts += [_title("Warnings", "bold yellow"), *_bullets(plan.warnings, "yellow")]
    return Group(*parts)


def _text(words: str, style: str = "") -> Text:
    return Text(_FIGURE.sub(GLUE, words), style=style)


def _title(text: str, style: str = "bold") -> Text:
    return Text(f"\n{text}", style=style)


def _line(text: str, style: str = "") -> Padding:
    return Padding(_text(text, style), (0, 0, 0, INDENT))


def _bullets(lines: Sequence[str], style: str) -> Iterator[RenderableType]:
    table = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row(Text("-", style=style), _text(line, style))
    yield Padding(table, (0, 0, 0, INDENT))


def _table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for header in headers:
        table.add_column(header, no_wrap=header != headers[-1])
    return table


def _header(plan: Plan) -> Iterator[RenderableType]:
    """Say what is trained where, and how the batch comes about."""
    model, training = plan.model, plan.training
    parameters = UNKNOWN if model.parameters is None else count(model.parameters)
    layers = "" if model.layers is None else f"{plural(model.layers, 'layer')}, "
    state = UNKNOWN if model.state_bytes is None else size(model.state_bytes)
    yield Text.assemble((plan.name, "bold"), _text(f" · {layers}{parameters} parameters, state {state}"))
    yield _text(
        f"{plural(training.world, 'rank')} on {plural(training.nodes, 'node')} ({training.accelerator}) · "
        f"{training.strategy} · {training.precision} · {training.optimizer} · "
        f"{plural(training.max_steps, 'step')}"
    )
    batch = (
        f"batch {training.global_batch_size:,} = {seers(training.world, training.data_parallel)} x "
        f"{plural(training.micro_batch_size, 'sample')} x {plural(plan.iteration.micro_batches, 'pass')}"
    )
    if training.tokens_per_step is not None:
        batch += f"; {count(training.tokens_per_step)} tokens per step"
    yield _text(batch)


def _step_title(plan: Plan) -> str:
    if plan.iteration.step_s is None:
        return "One step"
    hidden = plan.iteration.micro_batches - sum(DRAWN_ENDS)
    if plan.iteration.micro_batches <= DRAWN_MICRO_BATCHES:
        return "One step, to scale"
    return f"One step, to scale, {plural(hidden, 'micro-batch')} left out"


def _step(plan: Plan, width: int, glyphs: Glyphs) -> Iterator[RenderableType]:
    """Draw one step to scale and give its times."""
    times = plan.iteration
    if times.step_s is None or times.forward_s is None or times.backward_s is None:
        yield _line(f"{plural(times.micro_batches, 'micro-batch')}; times are not known: use --profile")
        return
    segments = segments_of(plan, width - INDENT - LABEL_COLUMNS)
    yield _lane("passes", passes_lane(segments, glyphs))
    if plan.tiers and plan.model.state_bytes_per_rank is not None:
        yield _lane("copy", copy_lane(plan, segments, glyphs))
        drained = _drained(plan)
        if drained and drained[0].write_s is not None:
            yield _lane(f"to {drained[0].type}", drain_lane(plan, drained[0], segments, glyphs))
    letters = [letter for letter in LETTERS if any(segment.letter == letter for segment in segments)]
    yield _line(", ".join(f"{letter} {LETTERS[letter]}" for letter in letters), "dim")
    yield from _copied(plan, glyphs)
    optimizer_s = times.optimizer_s or 0.0
    window_s = (times.window_s or 0.0) + (times.bubble_s or 0.0)
    exchange = f" + exchange {duration(times.exchange_s)}" if times.exchange_s else ""
    bubble = f" + bubble {duration(times.bubble_s)}" if times.bubble_s else ""
    yield _line(
        f"{duration(times.step_s)} ({plan.source}) = {times.micro_batches} x (forward "
        f"{duration(times.forward_s)} + backward {duration(times.backward_s)}){exchange}{bubble} + "
        f"update {duration(optimizer_s)}"
    )
    yield _line(f"the state is constant for {duration(window_s)} of it ({share(window_s / times.step_s)})")
    yield from _evaluation(plan, times.step_s)


def _evaluation(plan: Plan, step_s: float) -> Iterator[RenderableType]:
    """Say what an evaluation adds, and that the copy goes on in it."""
    evaluation = plan.evaluation
    if evaluation is None or evaluation.time_s is None or evaluation.forward_s is None:
        return
    adds = evaluation.time_s / (evaluation.every * step_s)
    yield _line(
        f"evaluation of {plural(evaluation.batches, 'batch')}, {_often(evaluation.every)}: "
        f"{plural(evaluation.windows, 'more forward pass')} of each rank in "
        f"{duration(evaluation.time_s)}, {share(adds)} of the steps' time"
    )
    bytes_ = plan.forward.bytes_per_window
    if plan.tiers and bytes_ and plan.model.state_bytes_per_rank:
        copied = min(evaluation.windows * bytes_, plan.model.state_bytes_per_rank)
        yield _line(f"the state is constant in them, too: up to {size(copied)} of a snapshot is copied there", "dim")


def _copied(plan: Plan, glyphs: Glyphs) -> Iterator[RenderableType]:
    """Say in words what the lanes of copy and drain show, and what goes on from there."""
    forward, backward = plan.forward.bytes_per_window, plan.backward.bytes_per_window
    if not plan.tiers or forward is None or backward is None:
        return
    first = plan.tiers[0]
    yield _line(
        f"{glyphs.copy} copy of the state before this step, {size(forward)} in each F, {size(backward)} in each "
        f"B, {_every(first)}",
        "dim",
    )
    for position, tier in enumerate(_drained(plan)):
        if tier.write_s is not None:
            mark = glyphs.drain if position == 0 else " "
            yield _line(f"{mark} {WRITES[tier.type]} behind it, {duration(tier.write_s)}, {_every(tier)}", "dim")


def _drained(plan: Plan) -> list[TierPlan]:
    """The tiers that are filled behind the training, fastest first."""
    return [tier for tier in plan.tiers if tier.type not in ("memory", "peer")]


def _every(tier: TierPlan) -> str:
    return _often(tier.every)


def _often(every: int) -> str:
    return "every step" if every == 1 else f"every {every:,} steps"


def _lane(name: str, drawing: Text) -> Padding:
    return Padding(Text.assemble((f"{name:<{LABEL_COLUMNS}}", "dim"), drawing), (0, 0, 0, INDENT))


def _storage(plan: Plan, width: int) -> Iterator[RenderableType]:
    """List the two sets of storage parameters."""
    if not plan.tiers:
        yield _line("no tiers: nothing is copied")
        return
    table = _table("window", "per step", "bytes per window", "slice", "of its time", "to")
    times = plan.iteration
    sides = (("forward", plan.forward, times.forward_s), ("backward", plan.backward, times.backward_s))
    for name, side, seconds in sides:
        bytes_ = side.bytes_per_window
        used = UNKNOWN if bytes_ is None or not seconds else share(bytes_ / plan.storage.bytes_per_s / seconds)
        shown = UNKNOWN if bytes_ is None else size(bytes_)
        table.add_row(name, str(side.windows), shown, size(side.slice_bytes), used, ", ".join(side.tiers))
    yield Padding(fitting(table, width - INDENT), (0, 0, 0, INDENT))
    if plan.model.state_bytes_per_rank is None or plan.storage.copy_s is None:
        yield _line("the shard's size is not known before the model is built")
        return
    yield from _bullets(plan.why, "")


def _tiers(plan: Plan, width: int) -> Iterator[RenderableType]:
    if not plan.tiers:
        yield _line("none: a fault starts the run again from step 0", "yellow")
        return
    table = _table("tier", "every", "checkpoint", "write", "keep", "at most", "survives")
    for tier in plan.tiers:
        table.add_row(
            tier.type,
            plural(tier.every, "step") + (" (auto)" if tier.auto else ""),
            UNKNOWN if tier.bytes is None else size(tier.bytes),
            UNKNOWN if tier.write_s is None else duration(tier.write_s),
            str(tier.keep),
            UNKNOWN if tier.peak_bytes is None else size(tier.peak_bytes),
            ", ".join(_survives(tier)),
        )
    yield Padding(fitting(table, width - INDENT), (0, 0, 0, INDENT))
    for tier in plan.tiers:
        if tier.auto:
            yield _line(f"{tier.type} {_every(tier)}: {tier.why}", "dim")
    for tier in plan.tiers:
        if tier.replicas is not None and plan.model.state_bytes_per_rank is not None:
            node_bytes = plan.model.state_bytes_per_rank * plan.training.workers_per_node
            pace = "" if tier.pace_bytes_per_s is None else f", at {size(tier.pace_bytes_per_s)}/s beside gradients"
            to = plural(tier.replicas, "other node")
            yield _line(f"peer sends {size(node_bytes * tier.replicas)} per node and copy to {to}{pace}", "dim")
    for tier in _drained(plan):
        kept = "" if tier.keep_every is None else f" and one every {plural(tier.keep_every, 'step')}"
        peak = "" if tier.peak_bytes is None else f", at most {size(tier.peak_bytes)}"
        files = f" in {tier.peak_files:,} {'objects' if tier.type == 'object' else 'files and folders'}"
        yield _line(f"{tier.type} keeps the newest {tier.keep}{kept}{peak}{files}", "dim")


def _survives(tier: TierPlan) -> Iterator[str]:
    for kind in tier.survives:
        yield f"up to {tier.replicas} nodes" if kind == "node" and (tier.replicas or 0) > 1 else kind


def _memory(plan: Plan) -> Iterator[RenderableType]:
    need = plan.memory
    if need.device_bytes_per_rank is None or need.parts is None:
        yield _line("not known before the model is built")
        return
    parts = (
        ("weights", need.parts.weights_bytes),
        ("gradients", need.parts.gradients_bytes),
        ("optimizer", need.parts.optimizer_bytes),
        ("casts", need.parts.casts_bytes),
        ("gathered layers", need.parts.gathered_bytes),
        ("activations", need.parts.activations_bytes),
    )
    split = ", ".join(f"{name} {size(bytes_)}" for name, bytes_ in parts if bytes_)
    limit = "" if need.device_limit_bytes is None else f" of {size(need.device_limit_bytes)}"
    yield _line(f"rank {size(need.device_bytes_per_rank)}{limit}: {split}")
    if need.host_bytes_per_node is not None and need.slot_bytes_per_node is not None:
        slots = f", {size(need.slot_bytes_per_node)} of it snapshots in tmpfs" if need.slot_bytes_per_node else ""
        if need.replica_bytes_per_node:
            slots += f" ({size(need.replica_bytes_per_node)} for copies of other nodes')"
        limit = "" if need.host_limit_bytes is None else f" of {size(need.host_limit_bytes)}"
        yield _line(f"node {size(need.host_bytes_per_node)}{limit} host memory{slots}")


def _expected(plan: Plan, width: int) -> Iterator[RenderableType]:
    """Say what checkpoints cost, and what each kind of fault costs."""
    expected, step_s = plan.expected, plan.iteration.step_s
    if expected.overhead is None or expected.goodput is None or step_s is None:
        yield _line("not known without times: use --profile")
        return
    cost, allowed = shares(expected.overhead, expected.budget)
    yield _line(
        f"overhead {cost} of the step time (allowed {allowed}), stall {duration(expected.stall_s or 0.0)} per step"
    )
    table = _table("when", "once in", "lost work", "back after", "read from")
    for kind, words in KINDS.items():
        table.add_row(words, *_fault(plan, expected, kind, step_s))
    yield Padding(fitting(table, width - INDENT), (0, 0, 0, INDENT))
    yield _line(f"goodput {share(expected.goodput)} of the wall time goes into steps that last")


def _fault(plan: Plan, expected: Expected, kind: str, step_s: float) -> tuple[str, str, str, str]:
    """Return the cells of one kind of fault."""
    mean_s = getattr(expected.mtbf_s, kind)
    steps, wait_s = getattr(expected.lost_steps, kind), getattr(expected.recovery_s, kind)
    source = next((tier.type for tier in plan.tiers if kind in tier.survives), "nothing")
    return (
        "not given" if mean_s is None else duration(mean_s),
        UNKNOWN if steps is None else f"{_few(steps)} steps, {duration(steps * step_s)}",
        UNKNOWN if wait_s is None else duration(wait_s),
        source,
    )


def _few(steps: float) -> str:
    """Steps and parts of steps; a thousandth is exact enough."""
    return "< 0.001" if 0 < steps < 1e-3 else three_digits(steps)
