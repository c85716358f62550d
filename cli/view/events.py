"""What an event means, in a person's words: decisions and faults, one sentence each."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .format import human_bytes, human_loss, human_seconds, near, plural
from .state import RunState, ends_attempt, integer, is_late, number, recovery_of

Level = Literal["good", "info", "warn", "bad"]

MAX_DETAIL = 300
MAX_ALIKE = 3
"""How often notes that differ only in their numbers are said."""
ALIKE_AGAIN_S = 600.0
"""After this long one is said again."""
_SIGNAL = re.compile(r"SIG[A-Z][A-Z0-9]+\b")
_SAYS_WHAT_HAPPENED = re.compile(r"(was|has|had|is|did|exited|ended|stopped|raised|failed|died|left|reported|ran)\b")
_EXIT_CODE = re.compile(r"(?:exit ?code )?(-?\d+)")


@dataclass(frozen=True)
class Note:
    """One sentence that stays on the screen; `below` is said in a second, quieter line."""

    level: Level
    text: str
    below: str = ""


@dataclass
class _Alike:
    """Notes that differ only in their numbers: how many, and when one was said."""

    count: int = 0
    said: float = 0.0


class Narrator:
    """Turns events into notes. What was said once is not said again for every step."""

    def __init__(self, max_restarts: Callable[[], int | None]) -> None:
        self._max_restarts = max_restarts
        self._said: set[tuple[object, ...]] = set()
        self._alike: dict[str, _Alike] = {}
        self._unsaid_restart = ""
        self._out: set[str] = set()
        """Tiers that are known to be out of order."""
        self._told: dict[str, Callable[[Mapping[str, Any], RunState], list[Note]]] = {
            "attempt": self._attempt,
            "restored": self._restored,
            "fault": self._fault,
            "skipped": self._skipped,
            "adjusted": self._adjusted,
            "evaluated": self._evaluated,
            "warning": self._warning,
            "waiting": self._waiting,
            "joined": self._joined,
            "resized": self._resized,
            "preempted": self._preempted,
        }

    def notes(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        """Return what is to be said about an event which `state` has already taken in."""
        tell = self._told.get(str(record.get("event")))
        return tell(record, state) if tell is not None else []

    def _once(self, *key: object) -> bool:
        """Tell whether this is new."""
        new = key not in self._said
        self._said.add(key)
        return new

    def _few(self, level: Level, text: str, record: Mapping[str, Any]) -> list[Note]:
        """Say the first few of many notes that are alike, and one more whenever none was said for a while."""
        known = self._alike.setdefault(re.sub(r"\d+", "#", text), _Alike())
        known.count += 1
        now = number(record, "time") or 0.0
        if known.count > MAX_ALIKE and now - known.said < ALIKE_AGAIN_S:
            return []
        known.said = now
        more = " (more like this go to events.jsonl only)" if known.count >= MAX_ALIKE else ""
        return [Note(level, text + more)]

    def _attempt(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        attempt = integer(record, "attempt")
        if attempt is None or not self._once("attempt", attempt):
            return []
        where = f": {plural(state.world, 'worker')}" if state.world else ""
        where += f" on {plural(state.nodes, 'node')}" if state.world and state.nodes else ""
        unsaid, self._unsaid_restart = self._unsaid_restart, ""
        return [Note("info", f"{unsaid}attempt {attempt}{where}")]

    def _restored(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        step, tier = integer(record, "step"), record.get("tier")
        if step is None or not self._once("restored", record.get("attempt"), step, tier):
            return []
        skipped = record.get("skipped")
        notes = []
        for item in skipped if isinstance(skipped, list) else []:
            if isinstance(item, dict) and self._once("passed over", *map(str, item.values())):
                notes.append(Note("warn", f"passed over {_checkpoint(item)}: {_one_line(item.get('reason'))}"))
        source = f" from {tier}" if tier else ""
        seconds = number(record, "seconds")
        took = f" in {_short_time(seconds)}" if seconds is not None else ""
        return [*notes, Note("good", f"resumed step {step}{source}{took}")]

    def _fault(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        attempt = record.get("attempt", state.attempt)
        what = describe_fault(record, None if state.step == 0 else state.step)
        log = record.get("log")
        below = f"log: {near(Path(log))}{_last_seen(record)}" if isinstance(log, str) and log else ""
        if record.get("kind") == "tier":
            return [Note("bad", f"{what} — stopping", below)]
        if not ends_attempt(record):
            return [Note("bad" if record.get("kind") == "taken" else "warn", what, below)]
        if not self._once("fault", attempt):
            return [Note("bad", f"{what} (same attempt)", below)]
        follows = self._what_follows(record, state)
        if record.get("kind") == "exception" and record.get("restarting") is None:
            # Some errors of the job's own code end the run at once: the next attempt, if any, tells the rest.
            self._unsaid_restart = f"{follows}, " if follows.startswith("restarting") else ""
            return [Note("bad", what, below)]
        return [Note("bad", f"{what} — {follows}", below)]

    def _what_follows(self, record: Mapping[str, Any], state: RunState) -> str:
        """Say what the launcher does now: its own word where the event has it, else by the count of restarts."""
        own_count, own_limit = integer(record, "restart"), integer(record, "max_restarts")
        count = state.restarts_in_row if own_count is None else own_count
        limit = self._max_restarts() if own_limit is None else own_limit
        if record.get("restarting") is False or (limit is not None and count > limit):
            return "no restart left" if limit is not None and count > limit else "not restarting"
        of = f" ({count} of {limit})" if limit is not None else f" (restart {count})"
        return f"restarting{of} from the newest whole step"

    def _skipped(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        step, count = integer(record, "step"), integer(record, "left_out") or 1
        tier, which = str(record.get("tier", "a tier")), f"step {step}" if step is not None else "a step"
        if is_late(record):
            which = which if count == 1 else f"{count} checkpoints up to {which}"
        elif count > 1 and tier in self._out:
            return []  # the first of this outage was said
        self._out.add(tier)
        return self._few("warn", f"{tier} left out {which}: {_one_line(record.get('reason'))}", record)

    def _adjusted(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        every = record.get("every")
        if not isinstance(every, Mapping):
            return []  # another pace changes nothing that a person would miss
        changes = [
            f"{tier} every {plural(new, 'step')} (was {old})"
            for tier, change in every.items()
            if isinstance(change, Mapping)
            and (new := integer(change, "to")) is not None
            and (old := integer(change, "from")) is not None
        ]
        return self._few("info", f"{', '.join(changes)}: {_one_line(record.get('reason'))}", record) if changes else []

    def _evaluated(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        words = evaluation_words(record)
        if number(record, "loss") is None:
            return self._few("warn", words, record)
        seconds = number(record, "seconds")
        took = f", in {_short_time(seconds)}" if seconds is not None else ""
        return self._few("info", f"evaluated {words}{took}", record)

    def _warning(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        recovery = recovery_of(record)
        if recovery is not None:
            self._out.discard(recovery[0])
            return self._few("good", _one_line(record.get("detail")), record)
        return self._few("warn", f"warning: {_one_line(record.get('detail'))}", record)

    def _waiting(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        return [Note("info", _one_line(record.get("detail")))]

    def _resized(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        before, now = integer(record, "before"), integer(record, "nodes")
        return [Note("info", f"going on with {plural(now, 'node')} (was {before})")] if now is not None else []

    def _joined(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        return self._few("info", f"node {record.get('node')} joined ({_one_line(record.get('host'))})", record)

    def _preempted(self, record: Mapping[str, Any], state: RunState) -> list[Note]:
        step, tier = integer(record, "step"), record.get("tier")
        where = f", safe in {tier}" if tier else ""
        return [Note("warn", f"asked to stop: step {step} is the last one{where}")] if step is not None else []


def evaluation_words(record: Mapping[str, Any]) -> str:
    """`step 100: loss 2.3100, perplexity 10.1 over 80 samples held out`."""
    step, loss, perplexity = integer(record, "step"), number(record, "loss"), number(record, "perplexity")
    if loss is None:
        return f"the loss of held-out data at step {step} is not finite"
    known = f", perplexity {perplexity:.4g}" if perplexity is not None else ""
    samples = integer(record, "samples")
    over = f" over {plural(samples, 'sample')} held out" if samples is not None else ""
    return f"step {step}: loss {human_loss(loss)}{known}{over}"


def describe_fault(record: Mapping[str, Any], last_step: int | None = None) -> str:
    """`rank 1 was killed by SIGKILL at step 120`; without the event's own step: `after step` the last one."""
    rank, step, node = integer(record, "rank"), integer(record, "step"), record.get("node")
    who = f"rank {rank}" if rank is not None else "the run"
    who += f" on {node}" if isinstance(node, str) and node else ""
    kind, detail = _one_line(record.get("kind"), ""), _one_line(record.get("detail"), "")
    where = f" at step {step}" if step is not None else f" after step {last_step}" if last_step is not None else ""
    where = "" if "step" in detail else where
    if kind in ("drainer", "tier", "taken"):
        return detail or f"the {kind} {'ended' if kind == 'drainer' else 'failed'}"
    if detail.startswith(f"{who}: "):
        kind, detail = "error", detail.removeprefix(f"{who}: ")
    elif detail.startswith(f"{who} "):
        return f"{detail}{where}"
    short = _known(kind, detail) or (detail if _SAYS_WHAT_HAPPENED.match(detail) else None)
    if short is not None:
        return f"{who} {short}{where}"
    label = kind.replace("_", " ").replace("-", " ")
    plain = label in ("", "error", "exception", "raise", "raised", "failed", "crash")
    failed = f"{who} failed{where}" if plain else f"{who} failed{where} ({label})"
    return f"{failed}: {detail}" if detail else failed


def _last_seen(record: Mapping[str, Any]) -> str:
    """Where a rank was when its stack was written, and the most memory that it had had."""
    stack, peak = record.get("stack"), number(record, "memory_peak_bytes")
    where = f"; it was at {_one_line(stack[0])}" if isinstance(stack, list) and stack else ""
    return where + (f"; memory peak {human_bytes(peak)}" if peak else "")


def _known(kind: str, detail: str) -> str | None:
    """Phrase the faults whose detail is one bare word: a signal, an exit code."""
    for text in (detail, kind if not detail else ""):
        if _SIGNAL.match(text):
            return f"was killed by {text}"
    code = _EXIT_CODE.fullmatch(detail)
    if code and kind in ("exit", "exited", "exitcode", "exit_code", "signal"):
        name = _signal_name(int(code[1]), kind)
        return f"was killed by {name}" if name else f"exited with code {code[1]}"
    if kind in ("silent", "hang", "hung", "heartbeat", "stalled") and not detail:
        return "has been silent"
    if kind in ("kill", "killed", "signal") and not detail:
        return "was killed"
    return None


def _signal_name(code: int, kind: str) -> str | None:
    """Name the signal behind a code: processes ended by one have it as a negative exit code."""
    if code >= 0 and kind != "signal":
        return None
    try:
        return signal.Signals(abs(code)).name
    except ValueError:
        return f"signal {abs(code)}"


def _short_time(seconds: float) -> str:
    return f"{seconds:.1f} s" if 0.05 <= seconds < 59.95 else human_seconds(seconds)


def _checkpoint(item: Mapping[str, Any]) -> str:
    step, tier = item.get("step"), item.get("tier")
    what = f"step {step}" if step is not None else "a checkpoint"
    return f"{what} in {tier}" if tier else what


def _one_line(value: object, default: str = "no reason given") -> str:
    """Return the first line of a text; of a traceback the last one, which has the error."""
    if not isinstance(value, str):
        return default if value is None else str(value)
    lines = [line.strip() for line in value.splitlines() if line.strip()]
    if not lines:
        return default
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    text = "".join(char if char.isprintable() else " " for char in line)
    return text if len(text) <= MAX_DETAIL else f"{text[: MAX_DETAIL - 1]}…"
