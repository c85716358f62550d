"""One step of a plan drawn to scale: its passes, and behind them the copy and the write to the next tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from ...planners.document import Plan, TierPlan

LABEL_COLUMNS = 10
"""Width of the lanes' names left of the drawing."""
DRAWN_MICRO_BATCHES = 8
"""With more than this, only the first and the last ones of `DRAWN_ENDS` are drawn."""
DRAWN_ENDS = (3, 2)
ELIDED_COLUMNS = 7
STYLES = {"F": "cyan", "B": "blue", "P": "dim cyan", "X": "magenta", "S": "bold red", "U": "bold yellow", "~": "dim"}
LETTERS = {
    "F": "forward",
    "B": "backward",
    "P": "waits in the pipeline",
    "X": "exchange of gradients",
    "S": "stall",
    "U": "update",
}


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters of the drawing."""

    line: str
    copy: str
    idle: str
    drain: str
    gap: str


UNICODE = Glyphs(line="─", copy="█", idle="·", drain="▒", gap="…")
ASCII = Glyphs(line="-", copy="#", idle=".", drain="=", gap="~")


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the drawn step: a letter of `LETTERS`, or `~` for what is left out."""

    letter: str
    begin_s: float
    length_s: float
    columns: int
    window: int
    """Windows before it in the step."""


def segments_of(plan: Plan, columns: int) -> list[Segment]:
    """Cut the step into segments and give each its columns: in proportion, but at least one."""
    stretches = list(_stretches(plan))
    elided = any(letter == "~" for letter, _, _ in stretches)
    shown_s = sum(length_s for letter, length_s, _ in stretches if letter != "~") or 1.0
    free = columns - (ELIDED_COLUMNS if elided else 0)
    spread_out = max(0, free - len(stretches))
    segments: list[Segment] = []
    begin_s, drawn_s, used = 0.0, 0.0, 0
    for letter, length_s, window in stretches:
        if letter == "~":
            segments.append(Segment(letter, begin_s, length_s, ELIDED_COLUMNS, window))
        else:
            drawn_s += length_s
            upto = int(spread_out * drawn_s / shown_s + 1e-9)
            segments.append(Segment(letter, begin_s, length_s, 1 + upto - used, window))
            used = upto
        begin_s += length_s
    return segments


def _stretches(plan: Plan) -> Iterator[tuple[str, float, int]]:
    """Yield letter, seconds and number of windows before for every stretch of the step."""
    times, n = plan.iteration, plan.iteration.micro_batches
    forward_s, backward_s = times.forward_s or 0.0, times.backward_s or 0.0
    head, tail = (n, 0) if n <= DRAWN_MICRO_BATCHES else DRAWN_ENDS
    for index in range(head):
        yield "F", forward_s, 2 * index
        yield "B", backward_s, 2 * index + 1
    if head + tail < n:
        yield "~", (n - head - tail) * (forward_s + backward_s), 2 * head
    for index in range(n - tail, n):
        yield "F", forward_s, 2 * index
        yield "B", backward_s, 2 * index + 1
    if times.bubble_s:
        yield "P", times.bubble_s, 2 * n
    if times.exchange_s:
        yield "X", times.exchange_s, 2 * n
    if plan.tiers and plan.storage.stall_s:
        yield "S", plan.storage.stall_s, 2 * n
    yield "U", times.optimizer_s or 0.0, 2 * n


def passes_lane(segments: Sequence[Segment], glyphs: Glyphs) -> Text:
    """Draw the passes, the wait if there is one, and the update."""
    lane = Text()
    for segment in segments:
        first = glyphs.gap if segment.letter == "~" else segment.letter
        rest = glyphs.gap if segment.letter == "~" else glyphs.line
        lane.append(first + rest * (segment.columns - 1), style=STYLES[segment.letter])
    return lane


def copy_lane(plan: Plan, segments: Sequence[Segment], glyphs: Glyphs) -> Text:
    """Mark, from the begin of each window, the time that the copy of its bytes needs."""
    lane = Text()
    for segment in segments:
        if segment.letter == "~":
            lane.append(glyphs.gap * segment.columns, style="dim")
            continue
        busy = 0
        if segment.letter == "S" or (segment.letter == "X" and plan.storage.stall_s):
            busy = segment.columns
        elif segment.letter in "FB" and (bytes_ := _window_bytes(plan, segment)) > 0:
            needed = bytes_ / plan.storage.bytes_per_s / segment.length_s if segment.length_s else 1.0
            busy = min(segment.columns, max(1, round(needed * segment.columns)))
        lane.append(glyphs.copy * busy, style="green")
        idle = glyphs.idle if segment.letter in "FB" else " "
        lane.append(idle * (segment.columns - busy), style="dim")
    return lane


def _window_bytes(plan: Plan, segment: Segment) -> int:
    """Return the bytes that are left for this window, at most its share."""
    stages = plan.forward.windows // plan.iteration.micro_batches
    forward, backward = (stages * (kind.bytes_per_window or 0) for kind in (plan.forward, plan.backward))
    pairs, odd = divmod(segment.window, 2)
    before = pairs * (forward + backward) + odd * forward
    mine = backward if odd else forward
    return max(0, min(mine, (plan.model.state_bytes_per_rank or 0) - before))


def drain_lane(plan: Plan, tier: TierPlan, segments: Sequence[Segment], glyphs: Glyphs) -> Text:
    """Mark the time of the write: it begins when the copy is whole and may reach into the next step."""
    begin_s = _copied_s(plan, segments)
    end_s = begin_s + (tier.write_s or 0.0)
    step_s = segments[-1].begin_s + segments[-1].length_s
    marks = ""
    for segment in segments:
        for column in range(segment.columns):
            now_s = segment.begin_s + (column + 0.5) / segment.columns * segment.length_s
            again = tier.every == 1 and now_s + step_s < end_s
            marks += glyphs.drain if begin_s <= now_s < end_s or again else " "
    if glyphs.drain not in marks:
        marks = marks[:-1] + glyphs.drain
    return Text(marks, style="magenta")


def _copied_s(plan: Plan, segments: Sequence[Segment]) -> float:
    """Return when, from the begin of the step, the copy is whole."""
    for segment in segments:
        if segment.letter in "FB":
            kind = plan.forward if segment.letter == "F" else plan.backward
            wanted = (kind.bytes_per_window or 0) * (kind.windows // plan.iteration.micro_batches)
            left = _window_bytes(plan, segment)
            if left < wanted:
                return segment.begin_s + left / plan.storage.bytes_per_s
    update = segments[-1]
    return update.begin_s
