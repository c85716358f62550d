"""The figures of a benchmark: one document for programs, one table for people."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ... import __version__
from ...planners.compare import STATISTIC, Block, block_from_json, compare
from ...planners.methods import METHODS, PLAIN
from ...planners.plan import Plan
from ...specs.codes import Code
from ...specs.models import Spec
from ..terminal.refusal import Refused
from ..view.format import for_terminal, human_bytes, human_percent, human_seconds, plural
from ..view.tables import fitting

HEADINGS = ("step", "interval", "blocked", "after", "CPU", "written")


def to_document(spec: Spec, plan: Plan, lines: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """All figures; times in seconds, sizes in bytes, ratios to plain steps. Raises Refused when there are none."""
    blocks = [block_from_json(line) for line in lines if line["what"] == "block"]
    if not blocks:
        raise Refused(Code.FAILED, "none of the methods works here")
    built, sized = (next(line for line in lines if line["what"] == what) for what in ("built", "sized"))
    return {
        "name": spec.name,
        "dtrain": __version__,
        "torch": built["torch"],
        "workers": spec.world_size,
        "threads_per_worker": built["threads"],
        "cores": len(os.sched_getaffinity(0)),
        "device": built["device"],
        "parameters": plan.model.parameters,
        "state_bytes": plan.model.state_bytes,
        "blocks": sized["rounds"],
        "steps_per_block": sized["steps"],
        "seconds": seconds,
        "statistic": STATISTIC,
        "plain": _plain(blocks),
        "methods": [
            {"label": METHODS[found.method].label, "survives": METHODS[found.method].survives, **found.to_json()}
            for found in compare(blocks)
        ],
        "failed": {line["method"]: line["error"] for line in lines if line["what"] == "failed"},
        "left_out": [tier.type for tier in spec.used_tiers if tier.type not in ("memory", "disk")],
    }


def _plain(blocks: Sequence[Block]) -> dict[str, Any]:
    plain = [block for block in blocks if block.method == PLAIN]
    return {
        "step_s": median(block.step_s for block in plain),
        "cpu_s": median(block.cpu_s / block.saves for block in plain),
        "blocks": len(plain),
    }


def say(console: Console, found: Mapping[str, Any]) -> None:
    """Print the table and what it rests on."""
    ascii_only = console.options.ascii_only
    frame, padding = (None, (0, 1, 0, 0)) if ascii_only else (box.SIMPLE_HEAD, (0, 0, 0, 0))
    table = Table(box=frame, padding=padding, pad_edge=False, show_edge=False)
    table.add_column("stored by", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in _rows(found):
        table.add_row(*(for_terminal(cell, ascii_only) for cell in cells))
    console.print()
    console.print(fitting(table, console.width) if console.is_terminal else table)
    console.print()
    for line in _notes(found):
        console.print(for_terminal(line, ascii_only), style="dim", soft_wrap=not console.is_terminal)


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    plain = found["plain"]
    yield "nothing", human_seconds(plain["step_s"]), "", "", "", human_seconds(plain["cpu_s"]), ""
    for method in found["methods"]:
        ratio = method["step_ratio"]
        yield (
            method["label"],
            _change(ratio["median"]),
            f"{_change(ratio['low'], '')} to {_change(ratio['high'])}",
            human_seconds(method["blocked_s"]),
            _change(method["step_after_ratio"]),
            _more(method["cpu_s"]),
            human_bytes(method["disk_bytes"] or method["memory_bytes"]),
        )


def _change(ratio: float, unit: str = " %") -> str:
    percent = 100 * (ratio - 1)
    return f"{percent:+.{0 if abs(percent) >= 99.95 else 1}f}{unit}"


def _more(seconds: float) -> str:
    return f"+{human_seconds(seconds)}" if seconds >= 0 else human_seconds(seconds)


def _notes(found: Mapping[str, Any]) -> Iterator[str]:
    workers, threads = plural(found["workers"], "worker"), plural(found["threads_per_worker"], "thread")
    where = f"{workers} of {threads} on {plural(found['cores'], 'core')} ({found['device']})"
    yield f"{where}, {human_bytes(found['state_bytes'])} of state, torch {found['torch']}"
    timed = plural(found["steps_per_block"], "timed step")
    yield (
        f"step: longer than a plain one, median of {plural(found['blocks'], 'block')} of {timed}, each beside the "
        "plain blocks before and after it; the first step after a switch is not timed"
    )
    coverage = [method["step_ratio"]["coverage"] for method in found["methods"]]
    if coverage:
        yield f"interval: of that median, by order statistics; covers {human_percent(min(coverage))}"
    yield (
        "blocked: the training thread of rank 0, per save; after: the step after a save without that, against a plain "
        "step; CPU: all processes, per save; written: per save, over all ranks"
    )
    for method in found["methods"]:
        yield f"a step stored by {method['label']} survives {_survives(method)}"
    for tier in found["left_out"]:
        yield f"left out: the spec's {tier} tier"


def _survives(method: Mapping[str, Any]) -> str:
    words, on_disk, saves = str(method["survives"]), method["disk_saves"], method["saves"]
    return f"{words}; {on_disk} of {saves} got there" if method["method"] == "dtrain-disk" else words
