"""A picture of a benchmark: how much longer a step takes, and for how long a save keeps the training."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...specs.codes import Code
from ..terminal.refusal import Refused
from ..view.format import human_seconds, plural

FORMATS = (".png", ".pdf", ".svg")
OURS, THEIRS = "#1b7f5c", "#8a8f98"


def checked(target: str | None) -> Path | None:
    """Where to draw, looked at before anything runs; raises Refused."""
    if target is None:
        return None
    path = Path(target).absolute()
    if path.suffix.lower() not in FORMATS:
        raise Refused(Code.USAGE, f"--plot {target}: the name ends in one of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise Refused(Code.USAGE, f"--plot {target}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise Refused(Code.MISSING_RESOURCE, "--plot needs matplotlib: pip install 'dtrain[plot]'")
    return path


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw the document of `bench_page` into a file."""
    from matplotlib.figure import Figure

    methods = found["methods"]
    rows = range(len(methods))
    colours = [OURS if method["method"].startswith("dtrain") else THEIRS for method in methods]
    figure = Figure(figsize=(9.5, 1.4 + 0.5 * len(methods)), layout="constrained")
    longer, blocked = figure.subplots(1, 2, sharey=True)
    for row, method, colour in zip(rows, methods, colours, strict=True):
        ratio = {name: 100 * (method["step_ratio"][name] - 1) for name in ("low", "median", "high")}
        longer.plot([ratio["low"], ratio["high"]], [row, row], color=colour, linewidth=2)
        longer.plot([ratio["median"]], [row], "o", color=colour)
        longer.annotate(
            f"{ratio['median']:+.1f} %", (ratio["median"], row), xytext=(0, 7), textcoords="offset points", ha="center",
            fontsize=8,
        )  # fmt: skip
    longer.axvline(0, color="black", linewidth=0.8)
    longer.set_yticks(list(rows), [method["label"] for method in methods])
    longer.invert_yaxis()
    longer.set_xlabel("longer than a plain step, % (median, interval)")
    bars = blocked.barh(list(rows), [1000 * method["blocked_s"] for method in methods], color=colours)
    blocked.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    blocked.set_xlabel("training thread kept per save, ms")
    for axes in (longer, blocked):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.margins(x=0.12)
    workers, plain = plural(found["workers"], "worker"), human_seconds(found["plain"]["step_s"])
    figure.suptitle(f"{found['name']}: every step stored; {workers}, a plain step takes {plain}", fontsize=10)
    figure.savefig(path, dpi=150)
